//! Activations as signed bytes in groups of 32, in the order in which matrix kernels read them.
//!
//! A group has a middle, halfway between its least and its greatest value, and a scale, the distance
//! from there to either over 127. A code is (x - middle) / scale rounded to nearest, ties to even,
//! so within ±127, and stands for middle + scale * code. Activations lean to one side often enough
//! that a middle halves the error that a scale alone makes. A row's codes depend on that row alone.

#![expect(unsafe_code, reason = "units write their own rows of one slice")]

use super::isa::{Isa, Kernel};
use super::pool::{Pool, PoolError};
use super::shared::SharedSlice;
use super::simd::{LANES, Simd};

/// Values that share a scale.
pub const GROUP: usize = 32;
/// The same, to count in sums.
const GROUP_LEN: i32 = 32;
/// Rows that are stored side by side.
pub const BLOCK_ROWS: usize = 8;

/// Integer sums start at the bits of 1.5 * 2^23: as long as the sum stays within ±2^22, the bits
/// read as a float are 1.5 * 2^23 + sum, which needs no conversion.
pub const START: i32 = 0x4B40_0000;
/// `START` read as a float.
pub const START_VALUE: f32 = 12_582_912.0;

/// Groups narrower than this are their middle: 127 / radius would not be finite.
const SMALLEST_RADIUS: f32 = 1e-36;

/// One group of eight rows.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct GroupBlock {
    /// Codes in chunks of four.
    pub codes: [[[i8; 4]; GROUP / 4]; BLOCK_ROWS],
    /// Steps between codes; NaN for a group with a value that is not finite.
    pub scales: [f32; BLOCK_ROWS],
    /// What code 0 stands for; it is multiplied with the sum of a group of weights.
    pub middles: [f32; BLOCK_ROWS],
    /// The sum of what the codes stand for, which a weight's minimum is multiplied with.
    pub sums: [f32; BLOCK_ROWS],
    /// `START` - 128 * (sum of the codes): for weights with a bias of 128.
    pub minus_bias: [i32; BLOCK_ROWS],
    /// The same for the first and the second 16 codes.
    pub half_minus_bias: [[i32; BLOCK_ROWS]; 2],
    /// `START` - 8 * (sum of the codes): for 4-bit weights whose zero is 8.
    pub minus_eight: [i32; BLOCK_ROWS],
}

impl GroupBlock {
    const ZERO: Self = Self {
        codes: [[[0; 4]; GROUP / 4]; BLOCK_ROWS],
        scales: [0.0; BLOCK_ROWS],
        middles: [0.0; BLOCK_ROWS],
        sums: [0.0; BLOCK_ROWS],
        minus_bias: [START; BLOCK_ROWS],
        half_minus_bias: [[START; BLOCK_ROWS]; 2],
        minus_eight: [START; BLOCK_ROWS],
    };

    /// All codes 1, so that products with it are sums of weights.
    pub const ONES: Self = Self {
        codes: [[[1; 4]; GROUP / 4]; BLOCK_ROWS],
        scales: [1.0; BLOCK_ROWS],
        middles: [0.0; BLOCK_ROWS],
        sums: [GROUP as f32; BLOCK_ROWS],
        minus_bias: [START - 128 * GROUP_LEN; BLOCK_ROWS],
        half_minus_bias: [[START - 64 * GROUP_LEN; BLOCK_ROWS]; 2],
        minus_eight: [START - 8 * GROUP_LEN; BLOCK_ROWS],
    };
}

/// Quantized activations `[num_rows, num_cols]`.
#[derive(Debug)]
pub struct QuantizedRows {
    num_rows: usize,
    num_groups: usize,
    /// `[num_row_blocks, num_groups]`.
    blocks: Vec<GroupBlock>,
}

impl QuantizedRows {
    /// Room for `num_rows` rows, at first zeros.
    ///
    /// # Panics
    /// If `num_cols` is not a multiple of 32.
    pub fn zeros(num_rows: usize, num_cols: usize) -> Self {
        assert!(num_cols.is_multiple_of(GROUP), "{num_cols} columns are not whole groups of {GROUP}");
        let num_groups = num_cols / GROUP;
        let num_blocks = num_rows.div_ceil(BLOCK_ROWS) * num_groups;
        Self { num_rows, num_groups, blocks: vec![GroupBlock::ZERO; num_blocks] }
    }

    /// Hold `num_rows` rows from now on; their contents are unspecified until written. Allocates
    /// only beyond the largest number so far.
    pub fn set_num_rows(&mut self, num_rows: usize) {
        let num_blocks = num_rows.div_ceil(BLOCK_ROWS) * self.num_groups;
        self.blocks.resize(num_blocks, GroupBlock::ZERO);
        self.num_rows = num_rows;
    }

    /// Rows held.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Values per row.
    pub fn num_cols(&self) -> usize {
        self.num_groups * GROUP
    }

    /// Groups per row.
    pub fn num_groups(&self) -> usize {
        self.num_groups
    }

    /// `[num_row_blocks, num_groups]`: row r is row r % 8 of the blocks of r / 8.
    pub fn blocks(&self) -> &[GroupBlock] {
        &self.blocks
    }

    /// As `blocks`, to be written.
    pub fn blocks_mut(&mut self) -> &mut [GroupBlock] {
        &mut self.blocks
    }

    /// Quantize `x` `[num_rows, num_cols]`, f32.
    ///
    /// # Panics
    /// If `x` has another size.
    pub fn quantize(&mut self, isa: Isa, pool: &Pool, x: &[f32]) -> Result<(), PoolError> {
        let (num_rows, num_cols, num_groups) = (self.num_rows, self.num_cols(), self.num_groups);
        assert_eq!(x.len(), num_rows * num_cols, "x is not [num_rows, num_cols]");
        let blocks = SharedSlice::new(&mut self.blocks);
        pool.run(num_rows.div_ceil(BLOCK_ROWS), |unit, _| {
            // SAFETY: each unit has the blocks of its own eight rows.
            let blocks = unsafe { blocks.part(unit * num_groups..(unit + 1) * num_groups) };
            let first = unit * BLOCK_ROWS;
            let last = num_rows.min(first + BLOCK_ROWS);
            for row in first..last {
                let x = &x[row * num_cols..(row + 1) * num_cols];
                let row = row - first;
                isa.dispatch(QuantizeRow { x, blocks, row });
            }
        })
    }
}

struct QuantizeRow<'a> {
    x: &'a [f32],
    blocks: &'a mut [GroupBlock],
    row: usize,
}

impl Kernel for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        quantize_row(s, self.x, self.blocks, self.row);
    }
}

/// Quantize one row `[num_cols]` into row `row` (0 to 7) of its blocks `[num_groups]`.
#[inline(always)]
pub fn quantize_row<S: Simd>(s: S, x: &[f32], blocks: &mut [GroupBlock], row: usize) {
    let (halves, _) = x.as_chunks::<LANES>();
    let (groups, _) = halves.as_chunks::<2>();
    for ([low, high], block) in groups.iter().zip(blocks) {
        quantize_group(s, [s.load(low), s.load(high)], block, row);
    }
}

/// Quantize one group, given as two vectors, into row `row` (0 to 7) of its block.
#[inline(always)]
pub fn quantize_group<S: Simd>(s: S, x: [S::F32; 2], block: &mut GroupBlock, row: usize) {
    // No closures: they would not be inlined into the code that is compiled for `S`.
    let negated = [s.sub(s.zero(), x[0]), s.sub(s.zero(), x[1])];
    let [greatest, minus_least] = s.reduce_max_pair([s.max(x[0], x[1]), s.max(negated[0], negated[1])]);
    // Halves first: the difference of two finite values need not be finite.
    let (greatest, least) = (0.5 * greatest, -0.5 * minus_least);
    let (radius, middle) = (greatest - least, greatest + least);
    let (scale, factor) = if !s.are_finite(x) {
        (f32::NAN, None)
    } else if radius < SMALLEST_RADIUS {
        (0.0, None)
    } else {
        (radius / 127.0, Some(127.0 / radius))
    };
    let codes = match factor {
        Some(factor) => {
            let (middle, factor) = (s.splat(middle), s.splat(factor));
            let distances = [s.sub(x[0], middle), s.sub(x[1], middle)];
            [s.round(s.mul(distances[0], factor)), s.round(s.mul(distances[1], factor))]
        }
        None => [s.zero(); 2],
    };
    let (halves, _) = block.codes[row].as_flattened_mut().as_chunks_mut::<LANES>();
    s.store_i8(codes[0], &mut halves[0]);
    s.store_i8(codes[1], &mut halves[1]);
    // Exact: whole numbers below 2^13, converted as `START` tells, without the checks of a cast.
    let sums = s.reduce_add_pair(codes);
    let sums = [whole(sums[0]), whole(sums[1])];
    let sum = sums[0] + sums[1];
    block.scales[row] = scale;
    block.middles[row] = middle;
    block.sums[row] = scale * sum as f32 + GROUP as f32 * middle;
    block.minus_bias[row] = START - 128 * sum;
    block.half_minus_bias[0][row] = START - 128 * sums[0];
    block.half_minus_bias[1][row] = START - 128 * sums[1];
    block.minus_eight[row] = START - 8 * sum;
}

/// A whole number within ±2^22.
#[inline(always)]
fn whole(value: f32) -> i32 {
    (value + START_VALUE).to_bits().cast_signed() - START
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn quantized(isa: Isa, x: &[f32], num_rows: usize) -> QuantizedRows {
        let mut rows = QuantizedRows::zeros(num_rows, x.len() / num_rows);
        rows.quantize(isa, &Pool::new(2).unwrap(), x).unwrap();
        rows
    }

    /// Codes, then scale, middle and sum as bits, then where integer sums start.
    type Described = (Vec<i8>, [u32; 3], [i32; 4]);

    fn row_of(rows: &QuantizedRows, row: usize) -> Vec<Described> {
        let first = row / BLOCK_ROWS * rows.num_groups();
        let blocks = &rows.blocks()[first..first + rows.num_groups()];
        let row = row % BLOCK_ROWS;
        let describe = |block: &GroupBlock| {
            (
                block.codes[row].as_flattened().to_vec(),
                floats(block.scales[row], block.middles[row], block.sums[row]),
                [
                    block.minus_bias[row],
                    block.half_minus_bias[0][row],
                    block.half_minus_bias[1][row],
                    block.minus_eight[row],
                ],
            )
        };
        blocks.iter().map(describe).collect()
    }

    /// Bits; what a group that is not finite has beside its scale is of no consequence.
    fn floats(scale: f32, middle: f32, sum: f32) -> [u32; 3] {
        if scale.is_nan() { [f32::NAN.to_bits(); 3] } else { [scale, middle, sum].map(f32::to_bits) }
    }

    /// The definition, one value after the other.
    fn expected(x: &[f32]) -> Described {
        let least = x.iter().copied().fold(f32::INFINITY, f32::min);
        let greatest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (radius, middle) = (0.5 * greatest - 0.5 * least, 0.5 * greatest + 0.5 * least);
        let (scale, codes): (f32, Vec<i8>) = if x.iter().any(|x| !x.is_finite()) {
            (f32::NAN, vec![0; x.len()])
        } else if radius < SMALLEST_RADIUS {
            (0.0, vec![0; x.len()])
        } else {
            let factor = 127.0 / radius;
            let code = |x: &f32| ((x - middle) * factor).round_ties_even() as i8;
            (radius / 127.0, x.iter().map(code).collect())
        };
        let sum = |codes: &[i8]| codes.iter().copied().map(i32::from).sum::<i32>();
        let (low, high) = (sum(&codes[..16]), sum(&codes[16..]));
        let starts =
            [START - 128 * (low + high), START - 128 * low, START - 128 * high, START - 8 * (low + high)];
        let sum = scale * (low + high) as f32 + GROUP as f32 * middle;
        (codes, floats(scale, middle, sum), starts)
    }

    fn value() -> impl Strategy<Value = f32> {
        prop_oneof![
            8 => -10.0_f32..10.0,
            1 => any::<f32>(),
            1 => prop::sample::select(vec![0.0, -0.0, 1e-36, 1e-38, 1e-44, 1e38, 127.0, 0.5]),
        ]
    }

    proptest! {
        #[test]
        fn every_set_follows_the_definition(x in prop::collection::vec(value(), 3 * 2 * GROUP)) {
            for isa in Isa::available() {
                let rows = quantized(isa, &x, 3);
                for row in 0..3 {
                    let groups = row_of(&rows, row);
                    for (group, actual) in groups.iter().enumerate() {
                        let start = row * 2 * GROUP + group * GROUP;
                        let want = expected(&x[start..start + GROUP]);
                        prop_assert_eq!(actual, &want, "{} {} {}", isa, row, group);
                    }
                }
            }
        }
    }

    #[test]
    fn codes_stand_for_the_values_to_half_a_step() {
        let x: Vec<f32> = (0..GROUP).map(|i| 100.0 + (i * 37 % 32) as f32).collect();
        let rows = quantized(Isa::best(), &x, 1);
        let block = &rows.blocks()[0];
        for (x, code) in x.iter().zip(block.codes[0].as_flattened()) {
            let value = block.middles[0] + block.scales[0] * f32::from(*code);
            assert!((value - x).abs() <= 0.5 * block.scales[0] * 1.001, "{x} became {value}");
        }
        assert!(block.scales[0] < 0.13, "steps are as wide as the values are far apart, not as large");
    }

    #[test]
    fn equal_values_are_kept_exactly() {
        for value in [0.0, -3.25, 1e38] {
            let rows = quantized(Isa::best(), &[value; GROUP], 1);
            let block = &rows.blocks()[0];
            assert_eq!((block.scales[0], block.middles[0]), (0.0, value));
        }
    }

    #[test]
    fn a_row_is_the_same_at_any_place() {
        let x: Vec<f32> = (0..20 * 64).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
        let all = quantized(Isa::best(), &x, 20);
        for row in 0..20 {
            let alone = quantized(Isa::best(), &x[row * 64..(row + 1) * 64], 1);
            assert_eq!(row_of(&all, row), row_of(&alone, 0));
        }
    }

    #[test]
    fn rows_come_and_go() {
        let mut rows = QuantizedRows::zeros(1, 64);
        for num_rows in [9, 3, 17, 0] {
            rows.set_num_rows(num_rows);
            assert_eq!(rows.num_rows(), num_rows);
            assert_eq!(rows.blocks().len(), num_rows.div_ceil(8) * 2);
        }
    }

    #[test]
    #[should_panic(expected = "33 columns are not whole groups of 32")]
    fn columns_are_whole_groups() {
        QuantizedRows::zeros(1, 33);
    }
}
