//! Quantized weights times quantized activations: exact integer sums per group, float sums over
//! groups in index order.
//!
//! Per output and group, whatever rows share the pass: `t = f32(sum) * w_scale`, rounded once;
//! `acc = fma(t, a_scale, acc)`; then `acc = fma(w_sum, a_middle, acc)`, where `w_sum` is the sum of
//! the group's weights without their minimum; with a minimum, `acc = fma(w_min, a_sum, acc)`.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over rows and tiles are unrolled, several arrays by one index"
)]

use std::cell::Cell;
use std::ops::Range;

use super::codes::{Ahead, Bytes, CHUNKS, Codes, Nibbles};
use super::quantized::{CodeLayout, QuantizedWeight, Tile};
use super::scales::{Half, HalfMin, ScaleLayout, Scales, Super, SuperMin};
use super::strips;
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::quantize::{BLOCK_ROWS, GroupBlock, START_VALUE};
use crate::cpu::simd::{LANES, Simd};

/// Multiply tiles `tiles` of `weight` with the rows of `blocks` `[num_row_blocks, num_groups]`;
/// write `out` `[num_rows, num_tiles, 16]`.
pub(super) fn multiply(
    isa: Isa,
    weight: &QuantizedWeight,
    tiles: Range<usize>,
    blocks: &[GroupBlock],
    out: &mut [[f32; LANES]],
) {
    match (weight.code_layout, weight.scale_layout) {
        (CodeLayout::Nibbles { zero: 8 }, ScaleLayout::Half) => {
            isa.dispatch(Multiply::<Nibbles<8>, Half>::new(weight, tiles, blocks, out));
        }
        (CodeLayout::Nibbles { .. }, ScaleLayout::HalfMin) => {
            isa.dispatch(Multiply::<Nibbles<0>, HalfMin>::new(weight, tiles, blocks, out));
        }
        (CodeLayout::Nibbles { .. }, ScaleLayout::SuperMin) => {
            isa.dispatch(Multiply::<Nibbles<0>, SuperMin>::new(weight, tiles, blocks, out));
        }
        (CodeLayout::Bytes, ScaleLayout::Half) => {
            isa.dispatch(Multiply::<Bytes, Half>::new(weight, tiles, blocks, out));
        }
        (CodeLayout::Bytes, ScaleLayout::HalfMin) => {
            isa.dispatch(Multiply::<Bytes, HalfMin>::new(weight, tiles, blocks, out));
        }
        (CodeLayout::Bytes, ScaleLayout::SuperMin) => {
            isa.dispatch(Multiply::<Bytes, SuperMin>::new(weight, tiles, blocks, out));
        }
        (CodeLayout::Bytes, ScaleLayout::Super) => {
            isa.dispatch(Multiply::<Bytes, Super>::new(weight, tiles, blocks, out));
        }
        (codes, scales) => unreachable!("no format has {codes:?} with {scales:?}"),
    }
}

struct Multiply<'a, C, G> {
    weight: &'a QuantizedWeight,
    tiles: Range<usize>,
    blocks: &'a [GroupBlock],
    out: &'a mut [[f32; LANES]],
    layout: std::marker::PhantomData<(C, G)>,
}

impl<'a, C, G> Multiply<'a, C, G> {
    fn new(
        weight: &'a QuantizedWeight,
        tiles: Range<usize>,
        blocks: &'a [GroupBlock],
        out: &'a mut [[f32; LANES]],
    ) -> Self {
        Self { weight, tiles, blocks, out, layout: std::marker::PhantomData }
    }
}

impl<C: Codes, G: Scales> Kernel for Multiply<'_, C, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let num_tiles = self.tiles.len();
        let num_rows = self.out.len() / num_tiles;
        if S::STRIPS && num_rows > BLOCK_ROWS {
            strips::multiply::<S, C, G>(s, self.weight, self.tiles, self.blocks, self.out);
            return;
        }
        let num_groups = self.weight.num_groups();
        let num_steps = num_rows.div_ceil(S::ROWS) * num_groups;
        // Taken and put back: the work itself must be inlined here, not into a closure.
        let mut sums = SUMS.take();
        for (column, tile) in self.tiles.enumerate() {
            let tile = self.weight.tile(tile);
            sums.clear();
            if num_rows > S::ROWS {
                for index in 0..num_groups {
                    let sum = weight_sum::<S, C, G>(s, tile, index);
                    sums.push(s.to_array(sum));
                }
            }
            let tile_bytes = self.weight.tile_bytes();
            let next = tile.codes.as_ptr().wrapping_add(tile_bytes);
            let mut ahead = Ahead::new(next, tile_bytes, num_steps);
            let mut row = 0;
            while row < num_rows {
                let blocks = &self.blocks[row / BLOCK_ROWS * num_groups..][..num_groups];
                let pass = Pass {
                    tile,
                    blocks,
                    first: row % BLOCK_ROWS,
                    num_rows: num_rows - row,
                    sums: &sums,
                    stride: num_tiles,
                    out: &mut self.out[row * num_tiles + column..],
                };
                row += pass.run_some::<S, C, G>(s, &mut ahead);
            }
        }
        SUMS.set(sums);
    }
}

thread_local! {
    /// Sums of the weights of a tile's groups, where several passes need them.
    static SUMS: Cell<Vec<[f32; LANES]>> = const { Cell::new(Vec::new()) };
}

/// One tile times some rows of a block; row r goes to `out[r * stride]`.
struct Pass<'a> {
    tile: Tile<'a>,
    blocks: &'a [GroupBlock],
    first: usize,
    num_rows: usize,
    /// Of the weights of each group, or empty where they are still to be computed.
    sums: &'a [[f32; LANES]],
    stride: usize,
    out: &'a mut [[f32; LANES]],
}

impl Pass<'_> {
    /// Take as many rows as the registers hold; returns how many.
    #[inline(always)]
    fn run_some<S: Simd, C: Codes, G: Scales>(self, s: S, ahead: &mut Ahead) -> usize {
        if S::ROWS == 1 {
            return self.run::<S, C, G, 1>(s, ahead);
        }
        match self.num_rows {
            1 => self.run::<S, C, G, 1>(s, ahead),
            2 => self.run::<S, C, G, 2>(s, ahead),
            3 | 4 => self.run::<S, C, G, 4>(s, ahead),
            _ if S::ROWS == 4 => self.run::<S, C, G, 4>(s, ahead),
            _ => self.run::<S, C, G, 8>(s, ahead),
        }
    }

    /// Take `R` rows, of which those that exist are written.
    #[inline(always)]
    fn run<S: Simd, C: Codes, G: Scales, const R: usize>(self, s: S, ahead: &mut Ahead) -> usize {
        let Self { tile, blocks, first, sums: weight_sums, .. } = self;
        assert!(first + R <= BLOCK_ROWS);
        assert!(weight_sums.is_empty() || weight_sums.len() >= blocks.len());
        let mut accs = [s.zero(); R];
        let groups = tile.codes.chunks_exact(C::GROUP_BYTES).zip(blocks);
        for (index, (group, block)) in groups.enumerate() {
            ahead.step(s);
            // Everything that checks a bound comes before the sums, so that these are one straight
            // run of instructions.
            let scales = [G::scale(s, tile.scales, index, 0), G::scale(s, tile.scales, index, 1)];
            let min = G::min(s, tile.scales, index);
            let weight_sum = if weight_sums.is_empty() {
                weight_sum::<S, C, G>(s, tile, index)
            } else {
                s.load(&weight_sums[index])
            };
            if G::HALVES {
                for half in 0..2 {
                    let sums = half_sums::<S, C, R>(s, group, block, first, half);
                    add_group::<S, C, R>(s, scales[half], block, first, &sums, &mut accs);
                }
            } else {
                let sums = group_sums::<S, C, R>(s, group, block, first);
                add_group::<S, C, R>(s, scales[0], block, first, &sums, &mut accs);
            }
            for r in 0..R {
                accs[r] = s.fma(weight_sum, s.splat(block.middles[first + r]), accs[r]);
            }
            if G::HAS_MIN {
                for r in 0..R {
                    accs[r] = s.fma(min, s.splat(block.sums[first + r]), accs[r]);
                }
            }
        }
        for (acc, out) in accs.into_iter().zip(self.out.iter_mut().step_by(self.stride)).take(self.num_rows) {
            s.store(acc, out);
        }
        R.min(self.num_rows)
    }
}

/// The sum of the weights of a group without their minimum: as a product with ones.
#[inline(always)]
pub(super) fn weight_sum<S: Simd, C: Codes, G: Scales>(s: S, tile: Tile<'_>, index: usize) -> S::F32 {
    const ONES: &GroupBlock = &GroupBlock::ONES;
    let group = &tile.codes[index * C::GROUP_BYTES..(index + 1) * C::GROUP_BYTES];
    let scales = [G::scale(s, tile.scales, index, 0), G::scale(s, tile.scales, index, 1)];
    let mut accs = [s.zero()];
    if G::HALVES {
        for half in 0..2 {
            let sums = half_sums::<S, C, 1>(s, group, ONES, 0, half);
            add_group::<S, C, 1>(s, scales[half], ONES, 0, &sums, &mut accs);
        }
    } else {
        let sums = group_sums::<S, C, 1>(s, group, ONES, 0);
        add_group::<S, C, 1>(s, scales[0], ONES, 0, &sums, &mut accs);
    }
    accs[0]
}

/// The integer sums of a group for rows `first..first + R`.
#[inline(always)]
fn group_sums<S: Simd, C: Codes, const R: usize>(
    s: S,
    group: &[u8],
    block: &GroupBlock,
    first: usize,
) -> [C::Sums<S>; R] {
    let mut sums = [C::start(s, block, first); R];
    for r in 1..R {
        sums[r] = C::start(s, block, first + r);
    }
    for j in 0..CHUNKS / 2 {
        let weights = C::pair(s, group, j);
        for r in 0..R {
            sums[r] = C::dot(s, sums[r], weights[0], block.codes[first + r][j]);
        }
        for r in 0..R {
            let codes = block.codes[first + r][CHUNKS / 2 + j];
            sums[r] = C::dot(s, sums[r], weights[1], codes);
        }
    }
    sums
}

/// The same for one half of a group.
#[inline(always)]
fn half_sums<S: Simd, C: Codes, const R: usize>(
    s: S,
    group: &[u8],
    block: &GroupBlock,
    first: usize,
    half: usize,
) -> [C::Sums<S>; R] {
    let mut sums = [C::start_half(s, block, first, half); R];
    for r in 1..R {
        sums[r] = C::start_half(s, block, first + r, half);
    }
    for j in 0..CHUNKS / 2 {
        let weights = C::pair(s, group, j)[half];
        for r in 0..R {
            let codes = block.codes[first + r][half * CHUNKS / 2 + j];
            sums[r] = C::dot(s, sums[r], weights, codes);
        }
    }
    sums
}

/// `acc = fma(f32(sum) * w_scale, a_scale, acc)`.
///
/// The sums arrive as the bits of `START_VALUE + sum`. `START_VALUE * w_scale` is exact, so the
/// fused multiply-add that takes it off again rounds `sum * w_scale` once, as a product would.
#[inline(always)]
fn add_group<S: Simd, C: Codes, const R: usize>(
    s: S,
    scale: S::F32,
    block: &GroupBlock,
    first: usize,
    sums: &[C::Sums<S>; R],
    accs: &mut [S::F32; R],
) {
    let offset = s.mul(scale, s.splat(-START_VALUE));
    for r in 0..R {
        let sum = s.bits_to_f32(C::finish(s, sums[r], block, first + r));
        let scaled = s.fma(sum, scale, offset);
        accs[r] = s.fma(scaled, s.splat(block.scales[first + r]), accs[r]);
    }
}
