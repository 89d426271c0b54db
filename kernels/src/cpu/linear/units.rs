//! Cuts products into units of work for the pool and brings their results to where they belong.

#![expect(unsafe_code, reason = "units write their own outputs of one slice")]

use std::cell::RefCell;
use std::ops::Range;

use super::strips::TILES;
use super::{Context, Input, LinearError, PackedLinear, Storage, float, int8};
use crate::cpu::isa::Isa;
use crate::cpu::quantize::{BLOCK_ROWS, GROUP};
use crate::cpu::shared::SharedSlice;
use crate::cpu::simd::LANES;

/// Rows of a unit, at most.
pub(super) const UNIT_ROWS: usize = 64;
/// Vectors of 16 results that are computed at a time: 12 KiB.
pub(super) const BLOCK: usize = UNIT_ROWS * TILES;
/// Units per thread that keep all threads busy to the end.
const UNITS_PER_THREAD: usize = 6;
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

/// How a product is cut: by tiles of 16 outputs, and by rows in multiples of a row block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    num_tiles: usize,
    num_rows: usize,
    tiles_per_unit: usize,
}

impl Cut {
    /// For few rows, tiles are cut in multiples of `step`; for many, of `TILES * step`.
    pub(super) fn new(
        ctx: Context<'_>,
        num_tiles: usize,
        num_groups: usize,
        num_rows: usize,
        step: usize,
    ) -> Self {
        let rows = num_rows.min(UNIT_ROWS);
        let step = if rows > BLOCK_ROWS { TILES * step } else { step };
        let tile_cost = num_groups * (GROUP_COST.0 + GROUP_COST.1 * rows);
        let total = tile_cost * num_tiles * num_rows.div_ceil(UNIT_ROWS);
        let share = total / (UNITS_PER_THREAD * ctx.pool.num_threads());
        let unit_cost = share.clamp(UNIT_COST.start, UNIT_COST.end);
        let tiles = unit_cost / tile_cost.max(1);
        Self { num_tiles, num_rows, tiles_per_unit: (tiles / step * step).max(step) }
    }

    pub(super) fn num_units(&self) -> usize {
        self.num_tiles.div_ceil(self.tiles_per_unit) * self.num_rows.div_ceil(UNIT_ROWS)
    }

    /// The tiles and rows of a unit. Units of the same tiles follow each other.
    pub(super) fn unit(&self, unit: usize) -> (Range<usize>, Range<usize>) {
        let num_row_units = self.num_rows.div_ceil(UNIT_ROWS);
        let tile = unit / num_row_units * self.tiles_per_unit;
        let row = unit % num_row_units * UNIT_ROWS;
        (tile..self.num_tiles.min(tile + self.tiles_per_unit), row..self.num_rows.min(row + UNIT_ROWS))
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
        check_len("the output", out.len(), num_rows * projection.weight.num_outputs)?;
    }
    let mut first_unit = 0;
    let mut parts = Vec::with_capacity(projections.len());
    for projection in projections {
        let weight = projection.weight;
        let num_tiles = weight.num_outputs.div_ceil(LANES);
        let cut = Cut::new(ctx, num_tiles, weight.num_inputs.div_ceil(GROUP), num_rows, 1);
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
                copy(values, out);
            }
        });
    };
    ctx.pool.run(first_unit, work).map_err(LinearError::Pool)
}

/// Room for `BLOCK` vectors, kept per thread: to zero it would cost as much as a small unit.
pub(super) struct Results(Box<[[f32; LANES]; BLOCK]>);

thread_local! {
    static SPARE: RefCell<Vec<Results>> = const { RefCell::new(Vec::new()) };
}

impl Results {
    /// Room with anything in it.
    pub(super) fn take() -> Self {
        let spare = SPARE.with_borrow_mut(Vec::pop);
        spare.unwrap_or_else(|| Self(Box::new([[0.0; LANES]; BLOCK])))
    }

    /// For the next unit.
    pub(super) fn give_back(self) {
        SPARE.with_borrow_mut(|spare| spare.push(self));
    }

    /// The first `len` vectors.
    pub(super) fn first(&mut self, len: usize) -> &mut [[f32; LANES]] {
        &mut self.0[..len]
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
    let mut results = Results::take();
    let tiles_per_block = match rows.len() {
        few @ ..=BLOCK_ROWS => BLOCK / few.max(1),
        _ => TILES,
    };
    for tile in tiles.clone().step_by(tiles_per_block) {
        let tiles = tile..tiles.end.min(tile + tiles_per_block);
        let block = results.first(rows.len() * tiles.len());
        multiply(isa, weight, input, tiles.clone(), rows.clone(), block);
        let num_outputs = weight.num_outputs.min(tiles.end * LANES) - tile * LANES;
        for (row, values) in rows.clone().zip(block.chunks_exact(tiles.len())) {
            consume(tile, row, &values.as_flattened()[..num_outputs]);
        }
    }
    results.give_back();
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
            float::multiply(isa, float::Source::Quantized(source), tiles, x, num_inputs, out);
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
            check_len("the input", x.num_rows() * x.num_cols(), num_rows * weight.num_inputs)
        }
    }
}

pub(super) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), LinearError> {
    if actual == expected { Ok(()) } else { Err(LinearError::Shape { what, actual, expected }) }
}

/// Copy a row's outputs, mostly whole tiles: quicker than a call for so few.
pub(super) fn copy(values: &[f32], out: &mut [f32]) {
    let (tiles, rest) = out.as_chunks_mut::<LANES>();
    let (whole, partial) = values.as_chunks::<LANES>();
    for (out, values) in tiles.iter_mut().zip(whole) {
        *out = *values;
    }
    rest.copy_from_slice(partial);
}
