//! Rates of the linear kernels beside the machine's own limits.
//!
//! `cargo bench -p rung-kernels --bench linear -- [threads] [isa]`
#![allow(clippy::all, clippy::pedantic, clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use rung_kernels::cpu::isa::{Isa, Kernel};
use rung_kernels::cpu::linear::{Context, Input, Output, PackedLinear, Projection, project};
use rung_kernels::cpu::pool::{Pool, default_num_threads};
use rung_kernels::cpu::quantize::QuantizedRows;
use rung_kernels::cpu::simd::{LANE_BYTES, Simd};
use rung_kernels::dequantize::Format;

struct Sum<'a>(&'a [u8]);
impl Kernel for Sum<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sums = [s.splat_i32(0); 8];
        for chunk in self.0.as_chunks::<{ 8 * LANE_BYTES }>().0 {
            for (i, bytes) in chunk.as_chunks::<LANE_BYTES>().0.iter().enumerate() {
                let (lo, _) = bytes.split_at(64);
                let v = unsafe { &*(lo.as_ptr() as *const [f32; 16]) };
                sums[i] = s.max_i32(sums[i], s.to_bits(s.load(v)));
            }
        }
        let mut total = 0.0;
        for x in sums {
            total += s.reduce_add(s.bits_to_f32(x));
        }
        total
    }
}

fn bandwidth(pool: &Pool, isa: Isa, bytes: usize) -> f64 {
    let data = rung_kernels::cpu::buffer::Buffer::<u8>::zeroed(bytes);
    let mut data = data;
    data.fill(1);
    let part = 256 << 10;
    best(5, || {
        pool.run(bytes / part, |unit, _| {
            black_box(isa.dispatch(Sum(&data[unit * part..(unit + 1) * part])));
        })
        .unwrap();
    })
    .recip()
        * bytes as f64
        / 1e9
}

struct Dots(usize);
impl Kernel for Dots {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sums = [s.start_nibbles(0); 12];
        let w = s.load_bytes(black_box(&[3; 64]));
        let acts: [[i8; 4]; 12] = black_box([[1, 2, 3, 4]; 12]);
        for _ in 0..self.0 {
            for r in 0..12 {
                sums[r] = s.dot_nibbles(sums[r], w, acts[r]);
            }
        }
        let mut total = 0.0;
        for x in sums {
            total += s.reduce_add(s.bits_to_f32(s.finish_nibbles(x, 0)));
        }
        total
    }
}

/// GMAC/s.
fn peak(pool: &Pool, isa: Isa) -> f64 {
    let n = 200_000;
    let units = pool.num_threads();
    let t = best(20, || {
        pool.run(units, |_, _| {
            black_box(isa.dispatch(Dots(n)));
        })
        .unwrap();
    });
    (units * n * 12 * 64) as f64 / t / 1e9
}

fn best(n: usize, mut f: impl FnMut()) -> f64 {
    let mut t = f64::MAX;
    for _ in 0..n {
        let start = (Instant::now(), cpu_time());
        f();
        let wall = start.0.elapsed().as_secs_f64();
        t = t.min(if CPU_TIME.load(std::sync::atomic::Ordering::Relaxed) {
            cpu_time() - start.1
        } else {
            wall
        });
    }
    t
}

static CPU_TIME: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

fn cpu_time() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let threads = args.first().map_or_else(default_num_threads, |a| a.parse().unwrap());
    let isas = args.get(1).map_or(vec![Isa::best()], |a| vec![Isa::from_name(a).unwrap()]);
    let formats: Vec<Format> = args.get(2).map_or(vec![Format::Q4_1, Format::Q8_0], |a| {
        a.split(',').map(|f| Format::from_name(f).unwrap()).collect()
    });
    let float = args.get(3).is_some_and(|a| a == "float");
    let ms: Vec<usize> = args
        .get(4)
        .map_or(vec![1, 2, 4, 8, 16, 32, 128, 512], |a| a.split(',').map(|m| m.parse().unwrap()).collect());
    let only: Option<usize> = args.get(5).map(|a| a.parse().unwrap());
    let pool = Pool::new(threads).unwrap();
    CPU_TIME.store(threads == 1, std::sync::atomic::Ordering::Relaxed);
    for isa in isas {
        let peak = peak(&pool, isa);
        let b100 = bandwidth(&pool, isa, 100 << 20);
        let b1000 = bandwidth(&pool, isa, 1000 << 20);
        println!(
            "{isa} threads {threads}: {peak:.0} GMAC/s pure; read {b100:.1} GB/s of 100 MB, {b1000:.1} of 1 GB"
        );
        for &format in &formats {
            for (n, k) in [(96, 1536), (96, 576), (576, 576), (1536, 576), (576, 1536), (49152, 576)] {
                if k % format.block_len() != 0 || only.is_some_and(|o| o != n) {
                    continue;
                }
                let bytes = format.row_bytes(k).unwrap() * n;
                let copies = if n == 96 { 1 } else { ((100 << 20) / bytes).max(1) };
                let data: Vec<u8> = (0..bytes)
                    .map(|i| (if format.block_len() == 1 { 0x3c } else { i * 31 % 61 }) as u8)
                    .collect();
                let weights: Vec<_> =
                    (0..copies).map(|_| PackedLinear::pack(format, &data, n, k, &pool).unwrap()).collect();
                let ctx = Context { pool: &pool, isa };
                print!("{:5} {n:5}x{k:<5}", format.name());
                for m in ms.iter().copied() {
                    if m > 32 && n > 10000 {
                        continue;
                    }
                    let x: Vec<f32> = (0..m * k).map(|i| ((i * 7) % 13) as f32 - 6.0).collect();
                    let mut q = QuantizedRows::zeros(m, k);
                    q.quantize(isa, &pool, &x).unwrap();
                    let mut out = vec![0.0; m * n];
                    let passes =
                        if n == 96 { 1 + 300 / m } else { (copies * 32 / m.max(32)).max(1).min(copies) };
                    let t = best(if n == 96 { 200 } else { 12 }, || {
                        for w in weights.iter().cycle().take(passes) {
                            let input = if float { Input::Float(&x) } else { Input::Quantized(&q) };
                            project(
                                ctx,
                                input,
                                m,
                                &mut [Projection { weight: w, output: Output::Store(&mut out) }],
                            )
                            .unwrap();
                        }
                    }) / passes as f64;
                    let gbs = weights[0].num_bytes() as f64 / t / 1e9;
                    let gmacs = (m * n * k) as f64 / t / 1e9;
                    print!(
                        " | m{m} {:.0}us {gbs:.1}GB/s {:.0}% {:.0}%",
                        t * 1e6,
                        gbs / b100 * 100.0,
                        gmacs / peak * 100.0
                    );
                }
                println!();
            }
        }
    }
}
