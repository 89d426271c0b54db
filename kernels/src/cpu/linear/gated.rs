//! The first half of a gated feed-forward layer in one pass over its input.

#![expect(unsafe_code, reason = "units write their own outputs of one slice")]

use std::ops::Range;

use super::strips::TILES;
use super::units::{BLOCK, Cut, Results, UNIT_ROWS, check_input, check_len, copy, multiply};
use super::{Context, Input, LinearError, PackedLinear};
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::math::silu;
use crate::cpu::quantize::{BLOCK_ROWS, GROUP, GroupBlock, QuantizedRows, quantize_group};
use crate::cpu::shared::SharedSlice;
use crate::cpu::simd::{LANES, Simd};

/// Many rows are taken so many at a time, with `2 * TILES` tiles.
const ROWS: usize = UNIT_ROWS / 2;

/// Where silu(gate) * up goes, `[num_rows, num_outputs]`.
#[derive(Debug)]
pub enum GatedOutput<'a> {
    /// f32.
    Float(&'a mut [f32]),
    /// Quantized as the input of the next layer.
    Quantized(&'a mut QuantizedRows),
}

/// `silu(x W_gate^T) * (x W_up^T)`.
pub fn gated_silu(
    ctx: Context<'_>,
    input: Input<'_>,
    num_rows: usize,
    gate: &PackedLinear,
    up: &PackedLinear,
    output: GatedOutput<'_>,
) -> Result<(), LinearError> {
    let num_outputs = gate.num_outputs;
    check_input(gate, input, num_rows)?;
    check_input(up, input, num_rows)?;
    check_len("a row of the up projection", up.num_outputs, num_outputs)?;
    let target = match output {
        GatedOutput::Float(out) => {
            check_len("the output", out.len(), num_rows * num_outputs)?;
            Target::Float(SharedSlice::new(out))
        }
        GatedOutput::Quantized(rows) => {
            check_len("a row of the output", rows.num_cols(), num_outputs)?;
            let len = rows.num_rows() * num_outputs;
            check_len("the output", len, num_rows * num_outputs)?;
            Target::Quantized(SharedSlice::new(rows.blocks_mut()))
        }
    };
    // Tiles in pairs: whole groups of the next layer. Each costs twice.
    let num_groups = 2 * gate.num_inputs.div_ceil(GROUP);
    let cut = Cut::new(ctx, num_outputs.div_ceil(LANES), num_groups, num_rows, 2);
    let work = |unit: usize, _: usize| {
        let (tiles, rows) = cut.unit(unit);
        gated_unit(ctx.isa, [gate, up], input, tiles, rows, &target);
    };
    ctx.pool.run(cut.num_units(), work).map_err(LinearError::Pool)
}

enum Target<'a> {
    /// `[num_rows, num_outputs]`.
    Float(SharedSlice<'a, f32>),
    /// `[num_row_blocks, num_outputs / 32]`.
    Quantized(SharedSlice<'a, GroupBlock>),
}

/// Tiles and rows of a unit, as many at a time as the blocks hold.
fn gated_unit(
    isa: Isa,
    [gate, up]: [&PackedLinear; 2],
    input: Input<'_>,
    tiles: Range<usize>,
    rows: Range<usize>,
    target: &Target<'_>,
) {
    let (mut gate_results, mut up_results) = (Results::take(), Results::take());
    let (gates, ups) = (gate_results.first(BLOCK), up_results.first(BLOCK));
    let (num_rows, num_tiles, width) = if rows.len() > BLOCK_ROWS {
        (ROWS, 2 * TILES, TILES)
    } else {
        (BLOCK_ROWS, BLOCK / BLOCK_ROWS, BLOCK / BLOCK_ROWS)
    };
    for row in rows.clone().step_by(num_rows) {
        let rows = row..rows.end.min(row + num_rows);
        for tile in tiles.clone().step_by(num_tiles) {
            let tiles = tile..tiles.end.min(tile + num_tiles);
            let len = rows.len() * tiles.len();
            for tile in tiles.clone().step_by(width) {
                let part = tile..tiles.end.min(tile + width);
                let block = (tile - tiles.start) * rows.len()..(part.end - tiles.start) * rows.len();
                let (gates, ups) = (&mut gates[block.clone()], &mut ups[block]);
                multiply(isa, gate, input, part.clone(), rows.clone(), gates);
                multiply(isa, up, input, part, rows.clone(), ups);
            }
            let gates = &mut gates[..len];
            isa.dispatch(Gate { gates, ups: &ups[..len] });
            let gated = Gated { values: gates, tiles, rows: rows.clone(), width };
            match target {
                Target::Float(out) => gated.write(out, gate.num_outputs),
                Target::Quantized(blocks) => {
                    isa.dispatch(Quantize { gated, blocks, num_groups: gate.num_outputs / GROUP });
                }
            }
        }
    }
    gate_results.give_back();
    up_results.give_back();
}

/// silu(gate) * up in place of the gates.
struct Gate<'a> {
    gates: &'a mut [[f32; LANES]],
    ups: &'a [[f32; LANES]],
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (gate, up) in self.gates.iter_mut().zip(self.ups) {
            let gated = s.mul(silu(s, s.load(gate)), s.load(up));
            s.store(gated, gate);
        }
    }
}

/// Results of some tiles and rows: blocks of `width` tiles, each `[num_rows, width, 16]`; the last
/// may be narrower.
struct Gated<'a> {
    values: &'a [[f32; LANES]],
    tiles: Range<usize>,
    rows: Range<usize>,
    width: usize,
}

impl Gated<'_> {
    /// The block that begins at tile `tile` of ours.
    fn block(&self, tile: usize) -> impl Iterator<Item = &[[f32; LANES]]> {
        let width = self.width.min(self.tiles.len() - tile);
        let start = tile * self.rows.len();
        self.values[start..start + width * self.rows.len()].chunks_exact(width)
    }

    #[inline(always)]
    fn vector(&self, row: usize, tile: usize) -> &[f32; LANES] {
        let first = tile / self.width * self.width;
        let width = self.width.min(self.tiles.len() - first);
        &self.values[first * self.rows.len() + row * width + tile - first]
    }

    fn write(&self, out: &SharedSlice<'_, f32>, num_outputs: usize) {
        for tile in (0..self.tiles.len()).step_by(self.width) {
            let first = (self.tiles.start + tile) * LANES;
            for (row, values) in self.rows.clone().zip(self.block(tile)) {
                let values = values.as_flattened();
                let values = &values[..values.len().min(num_outputs - first)];
                let start = row * num_outputs + first;
                // SAFETY: each unit has its own tiles and rows.
                copy(values, unsafe { out.part(start..start + values.len()) });
            }
        }
    }
}

/// Pairs of tiles to groups of the next layer.
struct Quantize<'a> {
    gated: Gated<'a>,
    blocks: &'a SharedSlice<'a, GroupBlock>,
    num_groups: usize,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { gated, blocks, num_groups } = self;
        for group in 0..gated.tiles.len() / 2 {
            for row in 0..gated.rows.len() {
                let halves = [s.load(gated.vector(row, 2 * group)), s.load(gated.vector(row, 2 * group + 1))];
                let row = gated.rows.start + row;
                let index = row / BLOCK_ROWS * num_groups + gated.tiles.start / 2 + group;
                // SAFETY: each unit has its own pairs of tiles and row blocks.
                let block = unsafe { &mut blocks.part(index..index + 1)[0] };
                quantize_group(s, halves, block, row % BLOCK_ROWS);
            }
        }
    }
}
