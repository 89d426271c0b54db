//! Scales and minima of quantized weights: how a tile's columns are stored, and their values.
//!
//! All values are exact in f32: the product of a half and a small integer has at most 19 bits.

use super::stored::{self, SUPER_GROUPS};
use crate::cpu::simd::{LANES, Simd};
use crate::dequantize::Format;

/// Bytes of a column of IEEE halves.
const HALVES: usize = 2 * LANES;
/// Bytes of a block of 256 inputs in `SuperMin`: d, dmin, then scale and minimum per group.
const SUPER_MIN_BYTES: usize = 2 * HALVES + SUPER_GROUPS * 2 * LANES;
/// The same in `Super`: d, then two scales per group.
const SUPER_BYTES: usize = HALVES + SUPER_GROUPS * 2 * LANES;

/// How the scales of a tile are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleLayout {
    /// An IEEE half per group.
    Half,
    /// Two IEEE halves per group: scale and minimum.
    HalfMin,
    /// Halves d and dmin per 8 groups, and 8-bit scale and minimum per group.
    SuperMin,
    /// A half d per 8 groups, and two signed 8-bit scales per group, each for 16 inputs.
    Super,
}

impl ScaleLayout {
    /// Bytes of a tile.
    pub(super) fn tile_bytes(self, num_groups: usize) -> usize {
        match self {
            Self::Half => num_groups * HALVES,
            Self::HalfMin => num_groups * 2 * HALVES,
            Self::SuperMin => num_groups / SUPER_GROUPS * SUPER_MIN_BYTES,
            Self::Super => num_groups / SUPER_GROUPS * SUPER_BYTES,
        }
    }

    /// Put the scales of one output in place.
    pub(super) fn write(self, format: Format, row: &[u8], lane: usize, tile: &mut [u8]) {
        match self {
            Self::Half => {
                for (index, group) in tile.chunks_exact_mut(HALVES).enumerate() {
                    let (scale, _) = stored::half_scales(format, row, index);
                    put(group, 2 * lane, scale);
                }
            }
            Self::HalfMin => {
                for (index, group) in tile.chunks_exact_mut(2 * HALVES).enumerate() {
                    let (scale, min) = stored::half_scales(format, row, index);
                    put(group, 2 * lane, scale);
                    put(group, HALVES + 2 * lane, min.unwrap_or_default());
                }
            }
            Self::SuperMin => {
                for (index, block) in tile.chunks_exact_mut(SUPER_MIN_BYTES).enumerate() {
                    let scales = stored::super_scales(format, row, index);
                    put(block, 2 * lane, scales.halves[0]);
                    put(block, HALVES + 2 * lane, scales.halves[1]);
                    for (group, (scale, min)) in scales.groups.into_iter().enumerate() {
                        let start = 2 * HALVES + group * 2 * LANES + lane;
                        block[start] = scale;
                        block[start + LANES] = min;
                    }
                }
            }
            Self::Super => {
                for (index, block) in tile.chunks_exact_mut(SUPER_BYTES).enumerate() {
                    let (d, scales) = stored::six_bit_scales(row, index);
                    put(block, 2 * lane, d);
                    for (half_group, scale) in scales.into_iter().enumerate() {
                        block[HALVES + half_group * LANES + lane] = scale;
                    }
                }
            }
        }
    }

    /// The scales of the two halves of one output's group, and its minimum.
    pub(super) fn read(self, tile: &[u8], group: usize, lane: usize) -> ([f32; 2], Option<f32>) {
        match self {
            Self::Half => ([half(tile, group * HALVES + 2 * lane); 2], None),
            Self::HalfMin => {
                let start = group * 2 * HALVES + 2 * lane;
                ([half(tile, start); 2], Some(half(tile, start + HALVES)))
            }
            Self::SuperMin => {
                let block = &tile[group / SUPER_GROUPS * SUPER_MIN_BYTES..];
                let start = 2 * HALVES + group % SUPER_GROUPS * 2 * LANES + lane;
                let scale = half(block, 2 * lane) * f32::from(block[start]);
                let min = half(block, HALVES + 2 * lane) * f32::from(block[start + LANES]);
                ([scale; 2], Some(-min))
            }
            Self::Super => {
                let block = &tile[group / SUPER_GROUPS * SUPER_BYTES..];
                let start = HALVES + group % SUPER_GROUPS * 2 * LANES + lane;
                let d = half(block, 2 * lane);
                let scale = |start: usize| d * f32::from(block[start].cast_signed());
                ([scale(start), scale(start + LANES)], None)
            }
        }
    }
}

fn put(bytes: &mut [u8], start: usize, value: [u8; 2]) {
    bytes[start..start + 2].copy_from_slice(&value);
}

fn half(bytes: &[u8], start: usize) -> f32 {
    half::f16::from_le_bytes([bytes[start], bytes[start + 1]]).to_f32()
}

/// `N` bytes of a tile.
#[inline(always)]
fn column<const N: usize>(tile: &[u8], start: usize) -> &[u8; N] {
    match tile[start..].first_chunk() {
        Some(column) => column,
        None => panic!("a column at {start} of {} bytes of scales", tile.len()),
    }
}

/// A scale layout as the kernels read it.
pub(super) trait Scales {
    /// Whether groups have a minimum.
    const HAS_MIN: bool;
    /// Whether the halves of a group have scales of their own.
    const HALVES: bool;

    /// The scales of half `half` of group `group`; of the whole group without `HALVES`.
    fn scale<S: Simd>(s: S, tile: &[u8], group: usize, half: usize) -> S::F32;

    /// The minima of a group; called only with `HAS_MIN`.
    fn min<S: Simd>(s: S, _tile: &[u8], _group: usize) -> S::F32 {
        s.zero()
    }
}

/// `ScaleLayout::Half`.
pub(super) struct Half;
/// `ScaleLayout::HalfMin`.
pub(super) struct HalfMin;
/// `ScaleLayout::SuperMin`.
pub(super) struct SuperMin;
/// `ScaleLayout::Super`.
pub(super) struct Super;

impl Scales for Half {
    const HAS_MIN: bool = false;
    const HALVES: bool = false;

    #[inline(always)]
    fn scale<S: Simd>(s: S, tile: &[u8], group: usize, _: usize) -> S::F32 {
        s.load_f16(column(tile, group * HALVES))
    }
}

impl Scales for HalfMin {
    const HAS_MIN: bool = true;
    const HALVES: bool = false;

    #[inline(always)]
    fn scale<S: Simd>(s: S, tile: &[u8], group: usize, _: usize) -> S::F32 {
        s.load_f16(column(tile, group * 2 * HALVES))
    }

    #[inline(always)]
    fn min<S: Simd>(s: S, tile: &[u8], group: usize) -> S::F32 {
        s.load_f16(column(tile, group * 2 * HALVES + HALVES))
    }
}

impl Scales for SuperMin {
    const HAS_MIN: bool = true;
    const HALVES: bool = false;

    #[inline(always)]
    fn scale<S: Simd>(s: S, tile: &[u8], group: usize, _: usize) -> S::F32 {
        let block = group / SUPER_GROUPS * SUPER_MIN_BYTES;
        let start = block + 2 * HALVES + group % SUPER_GROUPS * 2 * LANES;
        s.mul(s.load_f16(column(tile, block)), s.load_u8(column(tile, start)))
    }

    #[inline(always)]
    fn min<S: Simd>(s: S, tile: &[u8], group: usize) -> S::F32 {
        let block = group / SUPER_GROUPS * SUPER_MIN_BYTES;
        let start = block + 2 * HALVES + group % SUPER_GROUPS * 2 * LANES + LANES;
        let dmin = s.load_f16(column(tile, block + HALVES));
        s.mul(s.sub(s.zero(), dmin), s.load_u8(column(tile, start)))
    }
}

impl Scales for Super {
    const HAS_MIN: bool = false;
    const HALVES: bool = true;

    #[inline(always)]
    fn scale<S: Simd>(s: S, tile: &[u8], group: usize, half: usize) -> S::F32 {
        let block = group / SUPER_GROUPS * SUPER_BYTES;
        let start = block + HALVES + (group % SUPER_GROUPS * 2 + half) * LANES;
        let scales = column::<LANES>(tile, start).map(u8::cast_signed);
        s.mul(s.load_f16(column(tile, block)), s.load_i8(&scales))
    }
}
