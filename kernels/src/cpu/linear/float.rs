//! Float activations times weights of any layout: values are widened a strip of inputs at a time,
//! then multiplied in input order with one fused multiply-add each.

#![expect(unsafe_code, reason = "units write their own tiles of one slice")]

use std::ops::Range;

use super::LinearError;
use super::quantized::QuantizedWeight;
use super::widen::{ask, widen};
use crate::cpu::buffer::{Buffer, Number};
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::pool::Pool;
use crate::cpu::shared::SharedSlice;
use crate::cpu::simd::{LANES, Simd};
use crate::dequantize::{self, Format};

/// Tiles and inputs widened at a time: 16 KiB, which stay in the first cache.
const TILES: usize = 4;
pub(super) const STRIP: usize = 64;

/// A float weight matrix as stored, sixteen outputs side by side: `[num_tiles, num_inputs, 16]`.
#[derive(Debug)]
pub(super) struct FloatWeight {
    pub(super) num_inputs: usize,
    pub(super) values: Values,
}

#[derive(Debug)]
pub(super) enum Values {
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
        let Self { source, tiles, x, num_inputs, out } = self;
        let stride = tiles.len();
        let mut scratch = [[[0.0; LANES]; STRIP]; TILES];
        out.fill([0.0; LANES]);
        for column in (0..stride).step_by(TILES) {
            let width = TILES.min(stride - column);
            for start in (0..num_inputs).step_by(STRIP) {
                let inputs = start..num_inputs.min(start + STRIP);
                let mut strips: [&[[f32; LANES]]; TILES] = [&[]; TILES];
                let later = inputs.end + STRIP..inputs.end + 2 * STRIP;
                for (t, (strip, scratch)) in strips.iter_mut().zip(&mut scratch).take(width).enumerate() {
                    ask(s, source, tiles.start + column + t, later.clone());
                    *strip = widen(s, source, tiles.start + column + t, inputs.clone(), scratch);
                }
                let strips = Strips { tiles: &strips[..width], inputs, num_inputs, stride };
                strips.multiply(s, x, &mut out[column..]);
            }
        }
    }
}

/// Some inputs of some tiles.
struct Strips<'a> {
    /// `[num_tiles, inputs, 16]`.
    tiles: &'a [&'a [[f32; LANES]]],
    inputs: Range<usize>,
    num_inputs: usize,
    stride: usize,
}

impl Strips<'_> {
    /// Continue the sums of all rows of `x`; row r's of tile t are in `out[r * stride + t]`.
    ///
    /// Passes have as many sums as the registers hold, and where possible eight: a fused
    /// multiply-add waits four cycles for the one before, and two start in each.
    #[inline(always)]
    fn multiply<S: Simd>(&self, s: S, x: &[f32], out: &mut [[f32; LANES]]) {
        let num_rows = x.len() / self.num_inputs;
        let mut row = 0;
        while row < num_rows {
            let x = &x[row * self.num_inputs..];
            let out = &mut out[row * self.stride..];
            let left = num_rows - row;
            row += match S::ROWS {
                8 if left >= 8 => self.row_passes::<S, 8, 2>(s, x, out),
                8 if left >= 2 => self.row_passes::<S, 2, 4>(s, x, out),
                4 if left >= 4 => self.row_passes::<S, 4, 1>(s, x, out),
                4 | 8 => self.row_passes::<S, 1, 4>(s, x, out),
                _ => self.row_passes::<S, 1, 1>(s, x, out),
            };
        }
    }

    /// `R` rows, `T` tiles at a time; returns `R`.
    #[inline(always)]
    fn row_passes<S: Simd, const R: usize, const T: usize>(
        &self,
        s: S,
        x: &[f32],
        out: &mut [[f32; LANES]],
    ) -> usize {
        let mut rows: [&[f32]; R] = [&[]; R];
        for (row, x) in rows.iter_mut().zip(x.chunks_exact(self.num_inputs)) {
            *row = &x[self.inputs.clone()];
        }
        let (wholes, rest) = self.tiles.as_chunks::<T>();
        for (index, strips) in wholes.iter().enumerate() {
            pass::<S, R, T>(s, *strips, rows, self.stride, &mut out[index * T..]);
        }
        for (index, strip) in rest.iter().enumerate() {
            pass::<S, R, 1>(s, [strip], rows, self.stride, &mut out[wholes.len() * T + index..]);
        }
        R
    }
}

#[inline(always)]
fn pass<S: Simd, const R: usize, const T: usize>(
    s: S,
    strips: [&[[f32; LANES]]; T],
    x: [&[f32]; R],
    stride: usize,
    out: &mut [[f32; LANES]],
) {
    let len = strips[0].len();
    assert!(strips.iter().all(|strip| strip.len() == len) && x.iter().all(|x| x.len() == len));
    let mut accs = [[s.zero(); T]; R];
    for r in 0..R {
        for t in 0..T {
            accs[r][t] = s.load(&out[r * stride + t]);
        }
    }
    for k in 0..len {
        for t in 0..T {
            let weights = s.load(&strips[t][k]);
            for r in 0..R {
                accs[r][t] = s.fma(weights, s.splat(x[r][k]), accs[r][t]);
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            s.store(accs[r][t], &mut out[r * stride + t]);
        }
    }
}

/// Whether a format is stored as floats.
pub(super) fn is_float(format: Format) -> bool {
    dequantize::Format::block_len(format) == 1
}
