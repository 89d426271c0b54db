//! How keys and values are stored: f32, bf16 or int8.

use super::UNIT;
use crate::cpu::simd::Simd;

/// A storage format: how a number is kept and where in its tile.
pub trait KvFormat: Copy + Send + Sync + 'static {
    /// One stored number.
    type Value: Copy + Default + Send + Sync;
    /// A value that poisons all that it touches, in a tile whose scales are NaN.
    const POISON: Self::Value;
    /// Whether tiles have scales.
    const SCALED: bool;

    /// Store `row` to `out`; returns its scale.
    fn encode(row: &[f32], out: &mut [Self::Value]) -> f32;

    /// The two vectors of a unit.
    fn load<S: Simd>(simd: S, unit: &[Self::Value; UNIT]) -> (S::F32, S::F32);

    /// Place in its unit of the number in vector `half`, lane `lane`.
    fn place(half: usize, lane: usize) -> usize;
}

/// f32, stored as is.
#[derive(Debug, Clone, Copy)]
pub struct F32Kv;

impl KvFormat for F32Kv {
    type Value = f32;
    const POISON: f32 = f32::NAN;
    const SCALED: bool = false;

    #[inline(always)]
    fn encode(row: &[f32], out: &mut [f32]) -> f32 {
        out.copy_from_slice(row);
        1.0
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, unit: &[f32; UNIT]) -> (S::F32, S::F32) {
        let (halves, _) = unit.as_chunks::<16>();
        (simd.load(&halves[0]), simd.load(&halves[1]))
    }

    #[inline(always)]
    fn place(half: usize, lane: usize) -> usize {
        half * 16 + lane
    }
}

/// bf16, rounded to nearest even. The two vectors of a unit share its 16 words, so that one shift
/// or mask unpacks each.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Kv;

impl KvFormat for Bf16Kv {
    type Value = u16;
    const POISON: u16 = u16::MAX;
    const SCALED: bool = false;

    #[inline(always)]
    fn encode(row: &[f32], out: &mut [u16]) -> f32 {
        for (out, &value) in out.iter_mut().zip(row) {
            *out = half::bf16::from_f32(value).to_bits();
        }
        1.0
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, unit: &[u16; UNIT]) -> (S::F32, S::F32) {
        let (pairs, _) = unit.as_chunks::<2>();
        let (pairs, _) = pairs.as_chunks::<16>();
        let [first, second] = simd.load_bf16_pairs(&pairs[0]);
        (first, second)
    }

    #[inline(always)]
    fn place(half: usize, lane: usize) -> usize {
        lane * 2 + half
    }
}

/// int8 with a scale per token and head, for keys and for values.
#[derive(Debug, Clone, Copy)]
pub struct Int8Kv;

impl KvFormat for Int8Kv {
    type Value = i8;
    const POISON: i8 = -1;
    const SCALED: bool = true;

    #[inline(always)]
    fn encode(row: &[f32], out: &mut [i8]) -> f32 {
        // NaN and infinity have the largest bits, so a scale that is not finite keeps them.
        let amax = f32::from_bits(row.iter().map(|value| value.abs().to_bits()).max().unwrap_or(0));
        let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
        for (out, &value) in out.iter_mut().zip(row) {
            *out = round_ties_even(value * inverse) as i8;
        }
        amax / 127.0
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, unit: &[i8; UNIT]) -> (S::F32, S::F32) {
        let (halves, _) = unit.as_chunks::<16>();
        (simd.load_i8(&halves[0]), simd.load_i8(&halves[1]))
    }

    #[inline(always)]
    fn place(half: usize, lane: usize) -> usize {
        half * 16 + lane
    }
}

/// `f32::round_ties_even` for |value| < 2^22, without a library call.
#[inline(always)]
fn round_ties_even(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (value + SHIFT) - SHIFT
}
