//! Float activations times weights of any layout: values are widened a strip of inputs at a time,
//! then multiplied in input order with one fused multiply-add each.

#![expect(unsafe_code, reason = "units write their own tiles of one slice")]

use std::ops::Range;

use super::LinearError;
use super::quantized::{CodeLayout, QuantizedWeight};
use super::scales::{Half, HalfMin, ScaleLayout, Scales, Super, SuperMin};
use crate::cpu::buffer::{Buffer, Number};
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::pool::Pool;
use crate::cpu::quantize::GROUP;
use crate::cpu::shared::SharedSlice;
use crate::cpu::simd::{LANE_BYTES, LANES, Simd};
use crate::dequantize::{self, Format};

/// Inputs widened at a time: 16 KiB, which stay in the first cache.
const STRIP: usize = 256;
/// Rows that share a pass.
const ROWS: usize = 8;

/// A float weight matrix as stored, sixteen outputs side by side: `[num_tiles, num_inputs, 16]`.
#[derive(Debug)]
pub(super) struct FloatWeight {
    num_inputs: usize,
    values: Values,
}

#[derive(Debug)]
enum Values {
    F32(Buffer<f32>),
    Bf16(Buffer<u16>),
    /// Little-endian.
    F16(Buffer<[u8; 2]>),
}

impl FloatWeight {
    /// Repack stored rows; their sizes are checked by the caller.
    pub(super) fn pack(
        format: Format,
        data: &[u8],
        num_outputs: usize,
        num_inputs: usize,
        pool: &Pool,
    ) -> Result<Self, LinearError> {
        let shape = (num_outputs, num_inputs);
        let values = match format {
            Format::F32 => Values::F32(interleave(data, shape, f32::from_le_bytes, pool)?),
            Format::BF16 => Values::Bf16(interleave(data, shape, u16::from_le_bytes, pool)?),
            Format::F16 => Values::F16(interleave(data, shape, |bytes| bytes, pool)?),
            other => unreachable!("{other:?} is not a float format"),
        };
        Ok(Self { num_inputs, values })
    }

    /// Bytes resident.
    pub(super) fn num_bytes(&self) -> usize {
        match &self.values {
            Values::F32(values) => values.num_bytes(),
            Values::Bf16(values) => values.num_bytes(),
            Values::F16(values) => values.num_bytes(),
        }
    }

    /// The values of one output.
    pub(super) fn dequantize_row(&self, output: usize, out: &mut [f32]) {
        let start = output / LANES * self.num_inputs * LANES + output % LANES;
        for (input, out) in out.iter_mut().enumerate() {
            let index = start + input * LANES;
            *out = match &self.values {
                Values::F32(values) => values[index],
                Values::Bf16(values) => f32::from_bits(u32::from(values[index]) << 16),
                Values::F16(values) => half::f16::from_le_bytes(values[index]).to_f32(),
            };
        }
    }
}

fn interleave<T: Number, const N: usize>(
    data: &[u8],
    (num_outputs, num_inputs): (usize, usize),
    decode: impl Fn([u8; N]) -> T + Sync,
    pool: &Pool,
) -> Result<Buffer<T>, LinearError> {
    let (num_tiles, tile_len) = (num_outputs.div_ceil(LANES), num_inputs * LANES);
    let mut out = Buffer::zeroed(num_tiles * tile_len);
    let shared = SharedSlice::new(&mut out);
    pool.run(num_tiles, |tile, _| {
        // SAFETY: each unit has its own tile.
        let values = unsafe { shared.part(tile * tile_len..(tile + 1) * tile_len) };
        for lane in 0..LANES.min(num_outputs - tile * LANES) {
            let start = (tile * LANES + lane) * num_inputs * N;
            let row = data[start..start + num_inputs * N].as_chunks::<N>().0;
            for (column, value) in values.chunks_exact_mut(LANES).zip(row) {
                column[lane] = decode(*value);
            }
        }
    })
    .map_err(LinearError::Pool)?;
    Ok(out)
}

/// Where the values of a tile come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source<'a> {
    Float(&'a FloatWeight),
    Quantized(&'a QuantizedWeight),
}

/// Multiply tiles `tiles` with the rows of `x` `[num_rows, num_inputs]`; write `out`
/// `[num_rows, num_tiles, 16]`.
pub(super) fn multiply(
    isa: Isa,
    source: Source<'_>,
    tiles: Range<usize>,
    x: &[f32],
    num_inputs: usize,
    out: &mut [[f32; LANES]],
) {
    isa.dispatch(Multiply { source, tiles, x, num_inputs, out });
}

struct Multiply<'a> {
    source: Source<'a>,
    tiles: Range<usize>,
    x: &'a [f32],
    num_inputs: usize,
    out: &'a mut [[f32; LANES]],
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let num_tiles = self.tiles.len();
        self.out.fill([0.0; LANES]);
        let mut scratch = [[0.0; LANES]; STRIP];
        for (column, tile) in self.tiles.enumerate() {
            for start in (0..self.num_inputs).step_by(STRIP) {
                let inputs = start..self.num_inputs.min(start + STRIP);
                let strip = widen(s, self.source, tile, inputs.clone(), &mut scratch);
                let rows = self.x.chunks(self.num_inputs * ROWS);
                for (index, x) in rows.enumerate() {
                    let out = &mut self.out[index * ROWS * num_tiles + column..];
                    multiply_rows(s, strip, x, self.num_inputs, start, num_tiles, out);
                }
            }
        }
    }
}

/// The values of some inputs of a tile, `[num_inputs, 16]`, in place where they are stored so.
#[inline(always)]
fn widen<'a, S: Simd>(
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

/// As `dequantize` computes it: scale * (code - zero), then + minimum, each rounded.
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
    let group_bytes = layout.group_bytes();
    for (index, out) in groups.zip(out.as_chunks_mut::<GROUP>().0) {
        let codes = &tile.codes[index * group_bytes..(index + 1) * group_bytes];
        let min = if G::HAS_MIN { G::min(s, tile.scales, index) } else { s.zero() };
        for (chunk, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let half = if G::HALVES { chunk / 4 } else { 0 };
            let scale = G::scale(s, tile.scales, index, half);
            let stored = match layout {
                CodeLayout::Nibbles { .. } => chunk % 4,
                CodeLayout::Bytes => chunk,
            };
            let bytes = &codes.as_chunks::<LANE_BYTES>().0[stored];
            let bytes = s.load_bytes(bytes);
            let bytes = match layout {
                CodeLayout::Nibbles { .. } if chunk < 4 => s.low_nibbles(bytes),
                CodeLayout::Nibbles { .. } => s.high_nibbles(bytes),
                CodeLayout::Bytes => bytes,
            };
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
    }
}

/// Continue the sums of up to eight rows over a strip that begins at input `start`; row r's are
/// in `out[r * stride]`.
#[inline(always)]
fn multiply_rows<S: Simd>(
    s: S,
    strip: &[[f32; LANES]],
    x: &[f32],
    num_inputs: usize,
    start: usize,
    stride: usize,
    out: &mut [[f32; LANES]],
) {
    let num_rows = x.len() / num_inputs;
    let row = |r: usize| &x[r * num_inputs + start..][..strip.len()];
    let mut r = 0;
    while r < num_rows {
        let out = &mut out[r * stride..];
        r += match num_rows - r {
            8.. => pass::<S, 8>(s, strip, std::array::from_fn(|i| row(r + i)), stride, out),
            4.. => pass::<S, 4>(s, strip, std::array::from_fn(|i| row(r + i)), stride, out),
            2.. => pass::<S, 2>(s, strip, std::array::from_fn(|i| row(r + i)), stride, out),
            _ => pass::<S, 1>(s, strip, [row(r)], stride, out),
        };
    }
}

#[inline(always)]
fn pass<S: Simd, const R: usize>(
    s: S,
    strip: &[[f32; LANES]],
    x: [&[f32]; R],
    stride: usize,
    out: &mut [[f32; LANES]],
) -> usize {
    assert!(x.iter().all(|x| x.len() == strip.len()));
    let mut accs = [s.zero(); R];
    for r in 0..R {
        accs[r] = s.load(&out[r * stride]);
    }
    for (k, weights) in strip.iter().enumerate() {
        let weights = s.load(weights);
        for r in 0..R {
            accs[r] = s.fma(weights, s.splat(x[r][k]), accs[r]);
        }
    }
    for r in 0..R {
        s.store(accs[r], &mut out[r * stride]);
    }
    R
}

/// Whether a format is stored as floats.
pub(super) fn is_float(format: Format) -> bool {
    dequantize::Format::block_len(format) == 1
}
