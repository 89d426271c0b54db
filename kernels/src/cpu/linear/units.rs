//! Cuts products into units of work for the pool and brings their results to where they belong.

#![expect(unsafe_code, reason = "units write their own outputs of one slice")]

use std::ops::Range;

use super::{Context, Input, LinearError, PackedLinear, Storage, float, int8};
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::math::silu;
use crate::cpu::quantize::{BLOCK_ROWS, GROUP, GroupBlock, QuantizedRows, quantize_group};
use crate::cpu::shared::SharedSlice;
use crate::cpu::simd::{LANES, Simd};

/// Rows of a unit, at most.
const UNIT_ROWS: usize = 64;
/// Vectors of 16 results that are computed at a time: 16 KiB.
const BLOCK: usize = 192;
/// Units per thread that keep all threads busy to the end.
const UNITS_PER_THREAD: usize = 4;
/// Cycles, roughly, below which a unit is not worth claiming, and above which it is too coarse.
const UNIT_COST: Range<usize> = 4_000..60_000;
/// Cycles, roughly, for one group of a tile: to bring it from memory, and for each row.
const GROUP_COST: (usize, usize) = (40, 6);

/// Where a product goes; f32 `[num_rows, num_outputs]`.
#[derive(Debug)]
pub enum Output<'a> {
    /// Overwrite.
    Store(&'a mut [f32]),
    /// Add to what is there.
    Add(&'a mut [f32]),
}

/// One product of several that share an input.
#[derive(Debug)]
pub struct Projection<'a> {
    /// The matrix.
    pub weight: &'a PackedLinear,
    /// Where the product goes.
    pub output: Output<'a>,
}

/// Where silu(gate) * up goes, `[num_rows, num_outputs]`.
#[derive(Debug)]
pub enum GatedOutput<'a> {
    /// f32.
    Float(&'a mut [f32]),
    /// Quantized as the input of the next layer.
    Quantized(&'a mut QuantizedRows),
}

/// How a product is cut: by tiles of 16 outputs, and by rows in multiples of a row block.
#[derive(Debug, Clone, Copy)]
struct Cut {
    num_tiles: usize,
    num_rows: usize,
    tiles_per_unit: usize,
}

impl Cut {
    /// `tile_cost` is the cost of one tile per group; tiles are cut in multiples of `step`.
    fn new(
        ctx: Context<'_>,
        num_tiles: usize,
        num_groups: usize,
        num_rows: usize,
        step: usize,
    ) -> Self {
        let rows = num_rows.min(UNIT_ROWS).next_multiple_of(2);
        let tile_cost = num_groups * (GROUP_COST.0 + GROUP_COST.1 * rows);
        let total = tile_cost * num_tiles * num_rows.div_ceil(UNIT_ROWS);
        let share = total / (UNITS_PER_THREAD * ctx.pool.num_threads());
        let unit_cost = share.clamp(UNIT_COST.start, UNIT_COST.end);
        let tiles = (unit_cost / tile_cost.max(1)).clamp(1, num_tiles.max(1));
        Self {
            num_tiles,
            num_rows,
            tiles_per_unit: tiles.next_multiple_of(if num_rows > BLOCK_ROWS {
                step * 3
            } else {
                step
            }),
        }
    }

    fn num_units(&self) -> usize {
        self.num_tiles.div_ceil(self.tiles_per_unit) * self.num_rows.div_ceil(UNIT_ROWS)
    }

    /// The tiles and rows of a unit. Units of the same tiles follow each other.
    fn unit(&self, unit: usize) -> (Range<usize>, Range<usize>) {
        let num_row_units = self.num_rows.div_ceil(UNIT_ROWS);
        let tile = unit / num_row_units * self.tiles_per_unit;
        let row = unit % num_row_units * UNIT_ROWS;
        (
            tile..self.num_tiles.min(tile + self.tiles_per_unit),
            row..self.num_rows.min(row + UNIT_ROWS),
        )
    }
}

/// Multiply one input with several matrices: y = x W^T each.
pub fn project(
    ctx: Context<'_>,
    input: Input<'_>,
    num_rows: usize,
    projections: &mut [Projection<'_>],
) -> Result<(), LinearError> {
    for projection in &*projections {
        let (Output::Store(out) | Output::Add(out)) = &projection.output;
        check_input(projection.weight, input, num_rows)?;
        check_len(
            "the output",
            out.len(),
            num_rows * projection.weight.num_outputs,
        )?;
    }
    let mut first_unit = 0;
    let mut parts = Vec::with_capacity(projections.len());
    for projection in projections {
        let weight = projection.weight;
        let num_tiles = weight.num_outputs.div_ceil(LANES);
        let cut = Cut::new(
            ctx,
            num_tiles,
            weight.num_inputs.div_ceil(GROUP),
            num_rows,
            1,
        );
        let (add, out) = match &mut projection.output {
            Output::Store(out) => (false, out),
            Output::Add(out) => (true, out),
        };
        parts.push((first_unit, cut, weight, add, SharedSlice::new(out)));
        first_unit += cut.num_units();
    }
    let work = |unit: usize, _: usize| {
        let part = parts.partition_point(|&(first, ..)| first <= unit) - 1;
        let (first, cut, weight, add, out) = &parts[part];
        let (tiles, rows) = cut.unit(unit - first);
        each_block(ctx.isa, weight, input, tiles, rows, |tile, row, values| {
            let start = row * weight.num_outputs + tile * LANES;
            // SAFETY: each unit has its own tiles and rows.
            let out = unsafe { out.part(start..start + values.len()) };
            if *add {
                for (out, value) in out.iter_mut().zip(values) {
                    *out += value;
                }
            } else {
                let (tiles, rest) = out.as_chunks_mut::<LANES>();
                let (full, partial) = values.as_chunks::<LANES>();
                for (out, values) in tiles.iter_mut().zip(full) {
                    *out = *values;
                }
                rest.copy_from_slice(partial);
            }
        });
    };
    ctx.pool.run(first_unit, work).map_err(LinearError::Pool)
}

/// The gated feed-forward's first half: `silu(x W_gate^T) * (x W_up^T)`.
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
            check_len(
                "the output",
                rows.num_rows() * num_outputs,
                num_rows * num_outputs,
            )?;
            Target::Quantized(SharedSlice::new(rows.blocks_mut()))
        }
    };
    // Twice the tiles' cost, and whole groups of outputs.
    let num_groups = 2 * gate.num_inputs.div_ceil(GROUP);
    let cut = Cut::new(ctx, num_outputs.div_ceil(LANES), num_groups, num_rows, 2);
    let work = |unit: usize, _: usize| {
        let (tiles, rows) = cut.unit(unit);
        gated_unit(ctx.isa, [gate, up], input, tiles, rows, &target);
    };
    ctx.pool
        .run(cut.num_units(), work)
        .map_err(LinearError::Pool)
}

enum Target<'a> {
    /// `[num_rows, num_outputs]`.
    Float(SharedSlice<'a, f32>),
    /// `[num_row_blocks, num_outputs / 32]`.
    Quantized(SharedSlice<'a, GroupBlock>),
}

/// A pair of tiles and eight rows at a time: one group block of the next layer.
fn gated_unit(
    isa: Isa,
    [gate, up]: [&PackedLinear; 2],
    input: Input<'_>,
    tiles: Range<usize>,
    rows: Range<usize>,
    target: &Target<'_>,
) {
    let num_groups = gate.num_outputs / GROUP;
    for row in rows.clone().step_by(BLOCK_ROWS) {
        let rows = row..rows.end.min(row + BLOCK_ROWS);
        for tile in tiles.clone().step_by(2) {
            let tiles = tile..tiles.end.min(tile + 2);
            let len = rows.len() * tiles.len();
            let mut gates = [[0.0; LANES]; 2 * BLOCK_ROWS];
            let mut ups = gates;
            multiply(
                isa,
                gate,
                input,
                tiles.clone(),
                rows.clone(),
                &mut gates[..len],
            );
            multiply(isa, up, input, tiles.clone(), rows.clone(), &mut ups[..len]);
            let gated = Gated {
                gates: &mut gates[..len],
                ups: &ups[..len],
            };
            match target {
                Target::Float(out) => {
                    isa.dispatch(gated);
                    for (index, values) in gates[..len].iter().enumerate() {
                        let (row, tile) = (
                            rows.start + index / tiles.len(),
                            tiles.start + index % tiles.len(),
                        );
                        let start = row * gate.num_outputs;
                        let columns = tile * LANES..gate.num_outputs.min((tile + 1) * LANES);
                        // SAFETY: each unit has its own tiles and rows.
                        let out = unsafe { out.part(start + columns.start..start + columns.end) };
                        out.copy_from_slice(&values[..out.len()]);
                    }
                }
                Target::Quantized(blocks) => {
                    let index = row / BLOCK_ROWS * num_groups + tile / 2;
                    // SAFETY: each unit has its own pairs of tiles and row blocks.
                    let block = unsafe { &mut blocks.part(index..index + 1)[0] };
                    isa.dispatch(QuantizeGated { gated, block });
                }
            }
        }
    }
}

/// silu(gate) * up in place of the gates.
struct Gated<'a> {
    gates: &'a mut [[f32; LANES]],
    ups: &'a [[f32; LANES]],
}

impl Kernel for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (gate, up) in self.gates.iter_mut().zip(self.ups) {
            let gated = s.mul(silu(s, s.load(gate)), s.load(up));
            s.store(gated, gate);
        }
    }
}

/// The same for pairs of tiles, quantized.
struct QuantizeGated<'a> {
    gated: Gated<'a>,
    block: &'a mut GroupBlock,
}

impl Kernel for QuantizeGated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Gated { gates, ups } = self.gated;
        let pairs = gates.as_chunks::<2>().0.iter().zip(ups.as_chunks::<2>().0);
        for (row, (gates, ups)) in pairs.enumerate() {
            let gated = [
                s.mul(silu(s, s.load(&gates[0])), s.load(&ups[0])),
                s.mul(silu(s, s.load(&gates[1])), s.load(&ups[1])),
            ];
            quantize_group(s, gated, self.block, row);
        }
    }
}

/// Compute tiles and rows a block at a time; `consume(tile, row, values)` gets the outputs of a
/// row from `tile` on.
fn each_block(
    isa: Isa,
    weight: &PackedLinear,
    input: Input<'_>,
    tiles: Range<usize>,
    rows: Range<usize>,
    mut consume: impl FnMut(usize, usize, &[f32]),
) {
    let mut block = [[0.0; LANES]; BLOCK];
    let tiles_per_block = (BLOCK / rows.len().max(1)).min(tiles.len());
    for tile in tiles.clone().step_by(tiles_per_block) {
        let tiles = tile..tiles.end.min(tile + tiles_per_block);
        let block = &mut block[..rows.len() * tiles.len()];
        multiply(isa, weight, input, tiles.clone(), rows.clone(), block);
        let num_outputs = weight.num_outputs.min(tiles.end * LANES) - tile * LANES;
        for (row, values) in rows.clone().zip(block.chunks_exact(tiles.len())) {
            consume(tile, row, &values.as_flattened()[..num_outputs]);
        }
    }
}

/// Multiply tiles with rows that begin at a row block; write `out` `[num_rows, num_tiles, 16]`.
pub(super) fn multiply(
    isa: Isa,
    weight: &PackedLinear,
    input: Input<'_>,
    tiles: Range<usize>,
    rows: Range<usize>,
    out: &mut [[f32; LANES]],
) {
    match (&weight.storage, input) {
        (Storage::Quantized(weight), Input::Quantized(x)) => {
            let blocks = rows.start / BLOCK_ROWS..rows.end.div_ceil(BLOCK_ROWS);
            let num_groups = x.num_groups();
            let blocks = &x.blocks()[blocks.start * num_groups..blocks.end * num_groups];
            int8::multiply(isa, weight, tiles, blocks, out);
        }
        (Storage::Quantized(source), Input::Float(x)) => {
            let num_inputs = weight.num_inputs;
            let x = &x[rows.start * num_inputs..rows.end * num_inputs];
            float::multiply(
                isa,
                float::Source::Quantized(source),
                tiles,
                x,
                num_inputs,
                out,
            );
        }
        (Storage::Float(source), Input::Float(x)) => {
            let num_inputs = weight.num_inputs;
            let x = &x[rows.start * num_inputs..rows.end * num_inputs];
            float::multiply(isa, float::Source::Float(source), tiles, x, num_inputs, out);
        }
        (Storage::Float(_), Input::Quantized(_)) => unreachable!("refused by check_input"),
    }
}

pub(super) fn check_input(
    weight: &PackedLinear,
    input: Input<'_>,
    num_rows: usize,
) -> Result<(), LinearError> {
    match input {
        Input::Float(x) => check_len("the input", x.len(), num_rows * weight.num_inputs),
        Input::Quantized(_) if !weight.takes_quantized() => Err(LinearError::FloatWeight),
        Input::Quantized(x) => {
            check_len("a row of the input", x.num_cols(), weight.num_inputs)?;
            check_len(
                "the input",
                x.num_rows() * x.num_cols(),
                num_rows * weight.num_inputs,
            )
        }
    }
}

fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), LinearError> {
    if actual == expected {
        Ok(())
    } else {
        Err(LinearError::Shape {
            what,
            actual,
            expected,
        })
    }
}
