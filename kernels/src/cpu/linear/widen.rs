//! Weights of any layout as f32, a strip of inputs at a time, bit for bit as `dequantize` has them.

use std::ops::Range;

use super::float::{STRIP, Source, Values};
use super::quantized::{CodeLayout, QuantizedWeight};
use super::scales::{Half, HalfMin, ScaleLayout, Scales, Super, SuperMin};
use crate::cpu::quantize::GROUP;
use crate::cpu::simd::{LANE_BYTES, LANES, Simd};

/// The values of some inputs of a tile, `[num_inputs, 16]`, in place where they are stored so.
#[inline(always)]
pub(super) fn widen<'a, S: Simd>(
    s: S,
    source: Source<'a>,
    tile: usize,
    inputs: Range<usize>,
    scratch: &'a mut [[f32; LANES]; STRIP],
) -> &'a [[f32; LANES]] {
    let out = &mut scratch[..inputs.len()];
    match source {
        Source::Float(weight) => {
            let start = tile * weight.num_inputs;
            let columns = start + inputs.start..start + inputs.end;
            match &weight.values {
                Values::F32(values) => return &values.as_chunks::<LANES>().0[columns],
                Values::Bf16(values) => {
                    let columns = &values.as_chunks::<LANES>().0[columns];
                    for (out, column) in out.iter_mut().zip(columns) {
                        s.store(s.load_bf16(column), out);
                    }
                }
                Values::F16(values) => {
                    let values = values.as_flattened().as_chunks::<{ 2 * LANES }>().0;
                    let columns = &values[columns];
                    for (out, column) in out.iter_mut().zip(columns) {
                        s.store(s.load_f16(column), out);
                    }
                }
            }
        }
        Source::Quantized(weight) => {
            let groups = inputs.start / GROUP..inputs.end / GROUP;
            match weight.scale_layout {
                ScaleLayout::Half => widen_groups::<S, Half>(s, weight, tile, groups, out),
                ScaleLayout::HalfMin => widen_groups::<S, HalfMin>(s, weight, tile, groups, out),
                ScaleLayout::SuperMin => widen_groups::<S, SuperMin>(s, weight, tile, groups, out),
                ScaleLayout::Super => widen_groups::<S, Super>(s, weight, tile, groups, out),
            }
        }
    }
    out
}

/// Ask for the cache lines of some inputs of a tile, or of what follows where it has no such
/// inputs. The strips of several tiles are too many streams for the hardware to foresee.
#[inline(always)]
pub(super) fn ask<S: Simd>(s: S, source: Source<'_>, tile: usize, inputs: Range<usize>) {
    match source {
        Source::Float(weight) => {
            let (start, width) = match &weight.values {
                Values::F32(values) => (values.as_ptr().cast::<u8>(), 4),
                Values::Bf16(values) => (values.as_ptr().cast(), 2),
                Values::F16(values) => (values.as_ptr().cast(), 2),
            };
            let column = tile * weight.num_inputs + inputs.start;
            ask_bytes(s, start.wrapping_add(column * LANES * width), inputs.len() * LANES * width);
        }
        Source::Quantized(weight) => {
            let tile = weight.tile(tile);
            for part in [tile.codes, tile.scales] {
                let group_bytes = part.len() / weight.num_groups();
                let start = part.as_ptr().wrapping_add(inputs.start / GROUP * group_bytes);
                ask_bytes(s, start, inputs.len() / GROUP * group_bytes);
            }
        }
    }
}

#[inline(always)]
fn ask_bytes<S: Simd>(s: S, start: *const u8, num_bytes: usize) {
    for offset in (0..num_bytes).step_by(LANE_BYTES) {
        s.prefetch(start.wrapping_add(offset));
    }
}

/// Scale * (code - zero), then + minimum, each rounded.
#[inline(always)]
fn widen_groups<S: Simd, G: Scales>(
    s: S,
    weight: &QuantizedWeight,
    tile: usize,
    groups: Range<usize>,
    out: &mut [[f32; LANES]],
) {
    let tile = weight.tile(tile);
    let layout = weight.code_layout;
    let zero = s.splat(f32::from(layout.zero()));
    for (index, out) in groups.zip(out.as_chunks_mut::<GROUP>().0) {
        let codes = tile.codes.chunks_exact(layout.group_bytes()).nth(index).unwrap_or_default();
        let chunks = codes.as_chunks::<LANE_BYTES>().0;
        let second = usize::from(G::HALVES);
        let scales = [G::scale(s, tile.scales, index, 0), G::scale(s, tile.scales, index, second)];
        let min = G::min(s, tile.scales, index);
        let (low, high) = out.as_chunks_mut::<4>().0.split_at_mut(GROUP / 8);
        for (j, (low, high)) in low.iter_mut().zip(high).enumerate() {
            let bytes = match layout {
                CodeLayout::Nibbles { .. } => {
                    let packed = s.load_bytes(&chunks[j]);
                    [s.low_nibbles(packed), s.high_nibbles(packed)]
                }
                CodeLayout::Bytes => [s.load_bytes(&chunks[j]), s.load_bytes(&chunks[j + 4])],
            };
            widen_chunk::<S, G>(s, bytes[0], zero, scales[0], min, low);
            widen_chunk::<S, G>(s, bytes[1], zero, scales[1], min, high);
        }
    }
}

#[inline(always)]
fn widen_chunk<S: Simd, G: Scales>(
    s: S,
    bytes: S::Bytes,
    zero: S::F32,
    scale: S::F32,
    min: S::F32,
    out: &mut [[f32; LANES]; 4],
) {
    let codes = [
        s.byte_to_f32::<0>(bytes),
        s.byte_to_f32::<1>(bytes),
        s.byte_to_f32::<2>(bytes),
        s.byte_to_f32::<3>(bytes),
    ];
    for (code, out) in codes.into_iter().zip(out) {
        let product = s.mul(scale, s.sub(code, zero));
        let value = if G::HAS_MIN { s.add(product, min) } else { product };
        s.store(value, out);
    }
}
