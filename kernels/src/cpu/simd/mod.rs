//! Vectors of sixteen lanes, the same on every instruction set. Holds no kernel.
//!
//! Code written against `Simd` gives the same bits everywhere: every operation is one IEEE
//! operation per lane, a fused multiply-add happens only where `fma` is written, and reductions
//! follow one fixed tree.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use portable::Portable;

use super::isa::Isa;

/// Lanes of a vector.
pub const LANES: usize = 16;
/// Bytes of a `Bytes` vector: four consecutive ones per lane.
pub const LANE_BYTES: usize = 4 * LANES;

/// The operations of one instruction set. A value is the proof that the processor has it.
///
/// Names without a type are on `f32` lanes.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen `f32`.
    type F32: Copy;
    /// Sixteen `i32`.
    type I32: Copy;
    /// Sixteen lanes of four bytes.
    type Bytes: Copy;
    /// Signed bytes prepared as the weight side of `dot_signed`.
    type Signed: Copy;
    /// Running sums of `dot_nibbles`.
    type NibbleSums: Copy;

    /// The instruction set.
    const ISA: Isa;
    /// Rows of activations that a pass over one tile of packed weights takes at most: 1, 4 or 8.
    const ROWS: usize;
    /// Whether there are registers for a pass over several tiles of unpacked weights.
    const STRIPS: bool;

    /// Ask for the cache line of an address, which need not be valid.
    fn prefetch(self, address: *const u8);

    /// The same value in all lanes.
    fn splat(self, value: f32) -> Self::F32;
    /// Sixteen values.
    fn load(self, values: &[f32; LANES]) -> Self::F32;
    /// Up to sixteen values; further lanes are zero.
    fn load_partial(self, values: &[f32]) -> Self::F32;
    /// Write sixteen values.
    fn store(self, vector: Self::F32, values: &mut [f32; LANES]);
    /// Write the first lanes, as many as `values` has.
    fn store_partial(self, vector: Self::F32, values: &mut [f32]);
    /// Sixteen bfloat16, widened.
    fn load_bf16(self, values: &[u16; LANES]) -> Self::F32;
    /// Two vectors of bfloat16 stored lane by lane, widened.
    fn load_bf16_pairs(self, values: &[[u16; 2]; LANES]) -> [Self::F32; 2];
    /// Write as bfloat16, rounded to nearest, ties to even; a NaN stays a NaN.
    fn store_bf16(self, vector: Self::F32, values: &mut [u16; LANES]);
    /// Sixteen IEEE halves, little-endian, widened.
    fn load_f16(self, values: &[u8; 2 * LANES]) -> Self::F32;
    /// Sixteen unsigned bytes, converted.
    fn load_u8(self, values: &[u8; LANES]) -> Self::F32;
    /// Sixteen signed bytes, converted.
    fn load_i8(self, values: &[i8; LANES]) -> Self::F32;
    /// Write as signed bytes, rounded to nearest, ties to even. Lanes must round into `i8`.
    fn store_i8(self, vector: Self::F32, values: &mut [i8; LANES]);

    /// a + b.
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// a - b.
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// a * b.
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// a / b.
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// a * b + c, rounded once.
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// a < b ? a : b, so b where either is NaN.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// a > b ? a : b, so b where either is NaN.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Without the sign bit.
    fn abs(self, a: Self::F32) -> Self::F32;
    /// a < b ? yes : no.
    fn select_lt(self, a: Self::F32, b: Self::F32, yes: Self::F32, no: Self::F32) -> Self::F32;
    /// To an integral value, ties to even.
    fn round(self, a: Self::F32) -> Self::F32;
    /// To integers, ties to even. Lanes must round into `i32`.
    fn to_i32(self, a: Self::F32) -> Self::I32;
    /// The bits as integers.
    fn to_bits(self, a: Self::F32) -> Self::I32;

    /// The same integer in all lanes.
    fn splat_i32(self, value: i32) -> Self::I32;
    /// a + b, wrapping.
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// Shifted left by `BITS`.
    fn shl_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32;
    /// The bits as floats.
    fn bits_to_f32(self, a: Self::I32) -> Self::F32;

    /// 64 bytes.
    fn load_bytes(self, bytes: &[u8; LANE_BYTES]) -> Self::Bytes;
    /// The lower four bits of each byte.
    fn low_nibbles(self, bytes: Self::Bytes) -> Self::Bytes;
    /// The upper four bits of each byte.
    fn high_nibbles(self, bytes: Self::Bytes) -> Self::Bytes;
    /// Write 64 bytes.
    fn store_bytes(self, bytes: Self::Bytes, out: &mut [u8; LANE_BYTES]);
    /// Byte `BYTE` of each lane, 0 to 3, converted.
    fn byte_to_f32<const BYTE: usize>(self, bytes: Self::Bytes) -> Self::F32;

    /// Prepare signed values stored with a bias of 128.
    fn signed(self, biased: Self::Bytes) -> Self::Signed;
    /// Where a sum of `dot_signed` starts so that it ends at `base` + the sum, given
    /// `base_minus_bias` = `base` - 128 * (sum of the activations it will meet).
    fn start_signed(self, base: i32, base_minus_bias: i32) -> Self::I32;
    /// Per lane: sum + the products of four weights with the four activations, exact.
    fn dot_signed(self, sum: Self::I32, weights: Self::Signed, activations: [i8; 4]) -> Self::I32;

    /// Empty sums that will end at `base` + the sum.
    fn start_nibbles(self, base: i32) -> Self::NibbleSums;
    /// Per lane: add the products of four weights of 0..16 with the four activations. At most 8
    /// times before `finish_nibbles`.
    fn dot_nibbles(
        self,
        sums: Self::NibbleSums,
        weights: Self::Bytes,
        activations: [i8; 4],
    ) -> Self::NibbleSums;
    /// The sums, exact; `base` as it was given to `start_nibbles`.
    fn finish_nibbles(self, sums: Self::NibbleSums, base: i32) -> Self::I32;

    /// Whether no lane of either is infinite or NaN.
    fn are_finite(self, pair: [Self::F32; 2]) -> bool;
    /// The sum of the lanes: lanes i and i + 8, then 4, 2, 1 apart.
    fn reduce_add(self, a: Self::F32) -> f32;
    /// The largest lane, by `max` in the order of `reduce_add`.
    fn reduce_max(self, a: Self::F32) -> f32;
    /// The largest lane.
    fn reduce_max_i32(self, a: Self::I32) -> i32;

    /// `reduce_add` of each: two take hardly longer than one.
    #[inline(always)]
    fn reduce_add_pair(self, pair: [Self::F32; 2]) -> [f32; 2] {
        [self.reduce_add(pair[0]), self.reduce_add(pair[1])]
    }

    /// `reduce_max` of each.
    #[inline(always)]
    fn reduce_max_pair(self, pair: [Self::F32; 2]) -> [f32; 2] {
        [self.reduce_max(pair[0]), self.reduce_max(pair[1])]
    }

    /// All lanes zero.
    #[inline(always)]
    fn zero(self) -> Self::F32 {
        self.splat(0.0)
    }

    /// The lanes as an array.
    #[inline(always)]
    fn to_array(self, a: Self::F32) -> [f32; LANES] {
        let mut values = [0.0; LANES];
        self.store(a, &mut values);
        values
    }
}
