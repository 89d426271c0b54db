//! What this machine can do at most: memory read, and the products of the micro-kernels on data
//! that stays in the first cache. Measures; knows no model.

#![expect(clippy::cast_precision_loss, reason = "counts of bytes and operations become rates")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::buffer::Buffer;
use super::isa::{Isa, Kernel};
use super::pool::{Pool, PoolError};
use super::simd::{LANE_BYTES, LANES, Simd};

/// Far more than a machine caches.
const READ_BYTES: usize = 1 << 30;
/// Read by one thread at a time.
const READ_UNIT_BYTES: usize = 256 << 10;
/// Each rate is the best of what this time allows, and of `MIN_RUNS`.
const MEASURE_FOR: Duration = Duration::from_millis(400);
const MIN_RUNS: usize = 3;
/// Work units per thread and run: whoever is done first takes another.
const UNITS_PER_THREAD: usize = 8;
/// Passes over the cached data per work unit, so that handing it out costs nothing against it.
const PASSES: usize = 32;

/// Products of one lane between a start and a finish of the integer sums.
const DOTS: usize = 8;
/// Groups of `DOTS` in an integer pass: 16 KiB of weights and 4 KiB of activations.
const GROUPS: usize = 16;
/// Inputs in a float pass: the same sizes.
const INPUTS: usize = 128;
/// Sums kept at once: as many as the registers hold, which hides how long one takes.
const ROWS: usize = 8;
const TILES: usize = 2;

/// Rates of all threads together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// 10^9 bytes per second read from memory, each once and in order.
    pub read_gb_s: f64,
    /// 10^9 additions and multiplications per second of `Simd::dot_nibbles`.
    pub int8_gop_s: f64,
    /// 10^9 additions and multiplications per second of `Simd::fma`.
    pub f32_gflop_s: f64,
}

/// Measure on the threads of `pool`; takes two seconds and, for a moment, 1 GiB.
pub fn measure(pool: &Pool, isa: Isa) -> Result<Limits, PoolError> {
    measure_within(pool, isa, READ_BYTES, MEASURE_FOR)
}

fn measure_within(
    pool: &Pool,
    isa: Isa,
    read_bytes: usize,
    measure_for: Duration,
) -> Result<Limits, PoolError> {
    let (dots, fmas) = (CachedDots::new(), CachedFloats::new());
    Ok(Limits {
        read_gb_s: read_rate(pool, isa, read_bytes, measure_for)?,
        int8_gop_s: op_rate(pool, measure_for, || isa.dispatch(Dots { data: &dots, num_passes: PASSES }))?,
        f32_gflop_s: op_rate(pool, measure_for, || isa.dispatch(Fmas { data: &fmas, num_passes: PASSES }))?,
    })
}

/// What a kernel computed and how many additions and multiplications that took.
struct Computed {
    sum: f32,
    num_ops: usize,
}

/// 10^9 operations per second of units of `work` on all threads.
fn op_rate(pool: &Pool, measure_for: Duration, work: impl Fn() -> Computed + Sync) -> Result<f64, PoolError> {
    let num_units = pool.num_threads() * UNITS_PER_THREAD;
    let num_ops = num_units * work().num_ops;
    let seconds = best_seconds(measure_for, || {
        pool.run(num_units, |_, _| {
            black_box(work().sum);
        })
    })?;
    Ok(num_ops as f64 / seconds / 1e9)
}

/// 10^9 bytes per second.
fn read_rate(pool: &Pool, isa: Isa, num_bytes: usize, measure_for: Duration) -> Result<f64, PoolError> {
    let mut memory = Buffer::<f32>::zeroed(num_bytes / size_of::<f32>());
    // Pages that were never written are all the same one.
    memory.fill(1.0);
    let units: Vec<&[f32]> = memory.chunks(READ_UNIT_BYTES / size_of::<f32>()).collect();
    let seconds = best_seconds(measure_for, || {
        pool.run(units.len(), |unit, _| {
            black_box(isa.dispatch(Largest(units[unit])));
        })
    })?;
    Ok(memory.num_bytes() as f64 / seconds / 1e9)
}

/// The quickest run: whatever else the machine does only adds.
fn best_seconds(
    measure_for: Duration,
    mut run: impl FnMut() -> Result<(), PoolError>,
) -> Result<f64, PoolError> {
    let start = Instant::now();
    let mut best = Duration::MAX;
    let mut num_runs = 0;
    while num_runs < MIN_RUNS || start.elapsed() < measure_for {
        let run_start = Instant::now();
        run()?;
        best = best.min(run_start.elapsed());
        num_runs += 1;
    }
    Ok(best.as_secs_f64())
}

/// The largest of some numbers: one instruction per 16 of them, so memory sets the pace.
struct Largest<'a>(&'a [f32]);

impl Kernel for Largest<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        const CHAINS: usize = 8;
        let mut largest = [s.splat(f32::NEG_INFINITY); CHAINS];
        for vectors in self.0.as_chunks::<LANES>().0.as_chunks::<CHAINS>().0 {
            for (largest, vector) in largest.iter_mut().zip(vectors) {
                *largest = s.max(*largest, s.load(vector));
            }
        }
        largest.into_iter().map(|vector| s.reduce_max(vector)).fold(f32::NEG_INFINITY, f32::max)
    }
}

/// `GROUPS` groups of weights for each tile, and of activations for each row.
struct CachedDots {
    weights: Vec<[[[u8; LANE_BYTES]; TILES]; DOTS]>,
    activations: Vec<[[[i8; 4]; ROWS]; DOTS]>,
}

impl CachedDots {
    fn new() -> Self {
        Self {
            weights: vec![[[[3; LANE_BYTES]; TILES]; DOTS]; GROUPS],
            activations: vec![[[[1, -2, 3, 4]; ROWS]; DOTS]; GROUPS],
        }
    }
}

/// The integer products of the linear layers alone. Unpacking and scales are left out, so no linear
/// layer reaches this rate.
struct Dots<'a> {
    data: &'a CachedDots,
    num_passes: usize,
}

impl Dots<'_> {
    #[inline(always)]
    fn compute<S: Simd, const T: usize, const R: usize>(self, s: S) -> Computed {
        let mut total = s.splat_i32(0);
        for _ in 0..self.num_passes {
            // Or the compiler could see that all passes are the same.
            let data = black_box(self.data);
            for (weights, activations) in data.weights.iter().zip(&data.activations) {
                let mut sums = [[s.start_nibbles(0); R]; T];
                for (weights, activations) in weights.iter().zip(activations) {
                    for (sums, weights) in sums.iter_mut().zip(weights) {
                        let weights = s.load_bytes(weights);
                        for (sum, activations) in sums.iter_mut().zip(activations) {
                            *sum = s.dot_nibbles(*sum, weights, *activations);
                        }
                    }
                }
                for sum in sums.as_flattened() {
                    total = s.add_i32(total, s.finish_nibbles(*sum, 0));
                }
            }
        }
        Computed {
            sum: s.reduce_max_i32(total) as f32,
            num_ops: self.num_passes * GROUPS * DOTS * T * R * LANE_BYTES * 2,
        }
    }
}

impl Kernel for Dots<'_> {
    type Output = Computed;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Computed {
        match S::ROWS {
            1 => self.compute::<S, 1, 1>(s),
            4 => self.compute::<S, 1, 4>(s),
            _ => self.compute::<S, TILES, ROWS>(s),
        }
    }
}

/// `INPUTS` weights for each output of each tile, and inputs of each row.
struct CachedFloats {
    weights: Vec<[[f32; LANES]; TILES]>,
    inputs: Vec<[f32; ROWS]>,
}

impl CachedFloats {
    fn new() -> Self {
        Self { weights: vec![[[0.5; LANES]; TILES]; INPUTS], inputs: vec![[0.25; ROWS]; INPUTS] }
    }
}

/// Fused multiply-adds on as many accumulators as the registers hold.
struct Fmas<'a> {
    data: &'a CachedFloats,
    num_passes: usize,
}

impl Fmas<'_> {
    #[inline(always)]
    fn compute<S: Simd, const T: usize, const R: usize>(self, s: S) -> Computed {
        let mut sums = [[s.zero(); R]; T];
        for _ in 0..self.num_passes {
            let data = black_box(self.data);
            for (weights, inputs) in data.weights.iter().zip(&data.inputs) {
                for (sums, weights) in sums.iter_mut().zip(weights) {
                    let weights = s.load(weights);
                    for (sum, input) in sums.iter_mut().zip(inputs) {
                        *sum = s.fma(weights, s.splat(*input), *sum);
                    }
                }
            }
        }
        let total = sums.as_flattened().iter().fold(s.zero(), |a, b| s.add(a, *b));
        Computed { sum: s.reduce_max(total), num_ops: self.num_passes * INPUTS * T * R * LANES * 2 }
    }
}

impl Kernel for Fmas<'_> {
    type Output = Computed;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Computed {
        if S::STRIPS { self.compute::<S, TILES, ROWS>(s) } else { self.compute::<S, 1, 4>(s) }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::float_cmp, reason = "all sums are exact")]

    use super::*;

    #[test]
    fn kernels_compute_what_their_rates_count() {
        let (dots, floats) = (CachedDots::new(), CachedFloats::new());
        for isa in Isa::available() {
            let computed = isa.dispatch(Dots { data: &dots, num_passes: 2 });
            // Each lane: its share of the multiply-adds, all 3 * (1 - 2 + 3 + 4) / 4.
            let per_lane = computed.num_ops / 2 / LANES;
            assert_eq!(computed.sum, per_lane as f32 * 4.5, "{isa}");
            let computed = isa.dispatch(Fmas { data: &floats, num_passes: 2 });
            let per_lane = computed.num_ops / 2 / LANES;
            assert_eq!(computed.sum, per_lane as f32 * 0.125, "{isa}");
        }
    }

    #[test]
    fn the_largest_number_of_all_lanes_is_found() {
        for isa in Isa::available() {
            for position in [0, 17, 1000, 2047] {
                let mut numbers = vec![1.0; 2048];
                numbers[position] = 2.0;
                assert_eq!(isa.dispatch(Largest(&numbers)), 2.0, "{isa} at {position}");
            }
        }
    }

    #[test]
    fn rates_are_numbers() {
        let pool = Pool::new(2).unwrap();
        for isa in Isa::available() {
            let limits = measure_within(&pool, isa, 4 << 20, Duration::ZERO).unwrap();
            for rate in [limits.read_gb_s, limits.int8_gop_s, limits.f32_gflop_s] {
                assert!(rate.is_finite() && rate > 0.0, "{isa}: {limits:?}");
            }
        }
    }
}
