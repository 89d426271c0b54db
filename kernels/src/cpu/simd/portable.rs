//! The operations in plain Rust: their definition, and what the other sets are tested against.

use super::{Isa, LANE_BYTES, LANES, Simd};

/// Plain Rust.
#[derive(Debug, Clone, Copy)]
pub struct Portable;

#[inline(always)]
fn map<T: Copy, U>(a: [T; LANES], f: impl Fn(T) -> U) -> [U; LANES] {
    std::array::from_fn(|lane| f(a[lane]))
}

#[inline(always)]
fn zip<T: Copy, U>(a: [T; LANES], b: [T; LANES], f: impl Fn(T, T) -> U) -> [U; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

#[inline(always)]
fn reduce<T: Copy>(mut a: [T; LANES], f: impl Fn(T, T) -> T) -> T {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            a[lane] = f(a[lane], a[lane + half]);
        }
    }
    a[0]
}

/// bfloat16 of a float, ties to even.
#[inline(always)]
pub(super) fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return ((bits >> 16) | 0x40) as u16;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

impl Simd for Portable {
    type F32 = [f32; LANES];
    type I32 = [i32; LANES];
    type Bytes = [u8; LANE_BYTES];
    type Signed = [u8; LANE_BYTES];
    type NibbleSums = [i32; LANES];

    const ISA: Isa = Isa::Portable;
    const ROWS: usize = 1;
    const STRIPS: bool = false;

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(never)]
    fn splat(self, value: f32) -> Self::F32 {
        [value; LANES]
    }

    #[inline(never)]
    fn load(self, values: &[f32; LANES]) -> Self::F32 {
        *values
    }

    #[inline(never)]
    fn load_partial(self, values: &[f32]) -> Self::F32 {
        let mut vector = [0.0; LANES];
        vector[..values.len()].copy_from_slice(values);
        vector
    }

    #[inline(never)]
    fn store(self, vector: Self::F32, values: &mut [f32; LANES]) {
        *values = vector;
    }

    #[inline(never)]
    fn store_partial(self, vector: Self::F32, values: &mut [f32]) {
        values.copy_from_slice(&vector[..values.len()]);
    }

    #[inline(never)]
    fn load_bf16(self, values: &[u16; LANES]) -> Self::F32 {
        map(*values, |bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(never)]
    fn load_bf16_pairs(self, values: &[[u16; 2]; LANES]) -> [Self::F32; 2] {
        let widen = |bits| f32::from_bits(u32::from(bits) << 16);
        [map(*values, |pair| widen(pair[0])), map(*values, |pair| widen(pair[1]))]
    }

    #[inline(never)]
    fn store_bf16(self, vector: Self::F32, values: &mut [u16; LANES]) {
        *values = map(vector, bf16_bits);
    }

    #[inline(never)]
    fn load_f16(self, values: &[u8; 2 * LANES]) -> Self::F32 {
        std::array::from_fn(|lane| {
            half::f16::from_le_bytes([values[2 * lane], values[2 * lane + 1]]).to_f32()
        })
    }

    #[inline(never)]
    fn load_u8(self, values: &[u8; LANES]) -> Self::F32 {
        map(*values, f32::from)
    }

    #[inline(never)]
    fn load_i8(self, values: &[i8; LANES]) -> Self::F32 {
        map(*values, f32::from)
    }

    #[inline(never)]
    fn store_i8(self, vector: Self::F32, values: &mut [i8; LANES]) {
        *values = map(vector, |value| value.round_ties_even() as i8);
    }

    #[inline(never)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a + b)
    }

    #[inline(never)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a - b)
    }

    #[inline(never)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a * b)
    }

    #[inline(never)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a / b)
    }

    #[inline(never)]
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(never)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(never)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(never)]
    fn abs(self, a: Self::F32) -> Self::F32 {
        map(a, f32::abs)
    }

    #[inline(never)]
    fn select_lt(self, a: Self::F32, b: Self::F32, yes: Self::F32, no: Self::F32) -> Self::F32 {
        std::array::from_fn(|lane| if a[lane] < b[lane] { yes[lane] } else { no[lane] })
    }

    #[inline(never)]
    fn round(self, a: Self::F32) -> Self::F32 {
        map(a, f32::round_ties_even)
    }

    #[inline(never)]
    fn to_i32(self, a: Self::F32) -> Self::I32 {
        map(a, |value| value.round_ties_even() as i32)
    }

    #[inline(never)]
    fn to_bits(self, a: Self::F32) -> Self::I32 {
        map(a, |value| value.to_bits().cast_signed())
    }

    #[inline(never)]
    fn splat_i32(self, value: i32) -> Self::I32 {
        [value; LANES]
    }

    #[inline(never)]
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, i32::wrapping_add)
    }

    #[inline(never)]
    fn shl_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        map(a, |value| value << BITS)
    }

    #[inline(never)]
    fn bits_to_f32(self, a: Self::I32) -> Self::F32 {
        map(a, |bits| f32::from_bits(bits.cast_unsigned()))
    }

    #[inline(never)]
    fn load_bytes(self, bytes: &[u8; LANE_BYTES]) -> Self::Bytes {
        *bytes
    }

    #[inline(never)]
    fn low_nibbles(self, bytes: Self::Bytes) -> Self::Bytes {
        bytes.map(|byte| byte & 0x0F)
    }

    #[inline(never)]
    fn high_nibbles(self, bytes: Self::Bytes) -> Self::Bytes {
        bytes.map(|byte| byte >> 4)
    }

    #[inline(never)]
    fn store_bytes(self, bytes: Self::Bytes, out: &mut [u8; LANE_BYTES]) {
        *out = bytes;
    }

    #[inline(never)]
    fn byte_to_f32<const BYTE: usize>(self, bytes: Self::Bytes) -> Self::F32 {
        std::array::from_fn(|lane| f32::from(bytes[4 * lane + BYTE]))
    }

    #[inline(never)]
    fn signed(self, biased: Self::Bytes) -> Self::Signed {
        biased
    }

    #[inline(never)]
    fn start_signed(self, base: i32, _: i32) -> Self::I32 {
        [base; LANES]
    }

    #[inline(never)]
    fn dot_signed(self, sum: Self::I32, weights: Self::Signed, activations: [i8; 4]) -> Self::I32 {
        std::array::from_fn(|lane| {
            (0..4).fold(sum[lane], |sum, i| {
                let weight = i32::from(weights[4 * lane + i]) - 128;
                sum + weight * i32::from(activations[i])
            })
        })
    }

    #[inline(never)]
    fn start_nibbles(self, base: i32) -> Self::NibbleSums {
        [base; LANES]
    }

    #[inline(never)]
    fn dot_nibbles(
        self,
        sums: Self::NibbleSums,
        weights: Self::Bytes,
        activations: [i8; 4],
    ) -> Self::NibbleSums {
        std::array::from_fn(|lane| {
            (0..4)
                .fold(sums[lane], |sum, i| sum + i32::from(weights[4 * lane + i]) * i32::from(activations[i]))
        })
    }

    #[inline(never)]
    fn finish_nibbles(self, sums: Self::NibbleSums, _: i32) -> Self::I32 {
        sums
    }

    #[inline(never)]
    fn are_finite(self, pair: [Self::F32; 2]) -> bool {
        pair.as_flattened().iter().all(|lane| lane.is_finite())
    }

    #[inline(never)]
    fn reduce_add(self, a: Self::F32) -> f32 {
        reduce(a, |a, b| a + b)
    }

    #[inline(never)]
    fn reduce_max(self, a: Self::F32) -> f32 {
        reduce(a, |a, b| if a > b { a } else { b })
    }

    #[inline(never)]
    fn reduce_max_i32(self, a: Self::I32) -> i32 {
        reduce(a, i32::max)
    }
}
