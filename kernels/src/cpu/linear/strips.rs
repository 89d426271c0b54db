//! The products of `int8` for many rows: a strip of a tile is unpacked once, then serves them all.
//!
//! Every output sees the same operations in the same order as in `int8`.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over rows and tiles are unrolled, several arrays by one index"
)]

use std::cell::Cell;
use std::ops::Range;

use super::codes::{Ahead, CHUNKS, Codes};
use super::int8::weight_sum;
use super::quantized::{QuantizedWeight, Tile};
use super::scales::Scales;
use crate::cpu::quantize::{BLOCK_ROWS, GroupBlock, START_VALUE};
use crate::cpu::simd::{LANE_BYTES, LANES, Simd};

/// Groups of a strip, at most: with three tiles 19 KiB, which stay in the first cache.
const STRIP: usize = 9;
/// Tiles that share the loads of activations.
pub(super) const TILES: usize = 3;
/// Rows that share the loads of weights.
const ROWS: usize = 4;

/// Codes of a group, one per byte.
type WideGroup = [[u8; LANE_BYTES]; CHUNKS];

/// The scales of a group of a tile, computed once.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Columns {
    /// Of each half, or of the whole group in the first.
    scales: [[f32; LANES]; 2],
    /// Of the weights, without the minimum.
    sum: [f32; LANES],
    min: [f32; LANES],
}

/// A strip of the tiles that are worked on.
struct Strip<'a> {
    codes: [&'a [WideGroup]; TILES],
    columns: [&'a [Columns]; TILES],
}

/// What strips are unpacked into.
struct Scratch {
    codes: [[WideGroup; STRIP]; TILES],
    columns: [[Columns; STRIP]; TILES],
}

impl Default for Scratch {
    fn default() -> Self {
        let columns = Columns { scales: [[0.0; LANES]; 2], sum: [0.0; LANES], min: [0.0; LANES] };
        Self { codes: [[[[0; LANE_BYTES]; CHUNKS]; STRIP]; TILES], columns: [[columns; STRIP]; TILES] }
    }
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// As `int8::multiply`, for at most `TILES` tiles.
#[inline(always)]
pub(super) fn multiply<S: Simd, C: Codes, G: Scales>(
    s: S,
    weight: &QuantizedWeight,
    tiles: Range<usize>,
    blocks: &[GroupBlock],
    out: &mut [[f32; LANES]],
) {
    assert!(tiles.len() <= TILES);
    let num_groups = weight.num_groups();
    let strip_len = num_groups.div_ceil(num_groups.div_ceil(STRIP));
    let num_passes = (out.len() / tiles.len()).div_ceil(ROWS);
    let num_bytes = tiles.len() * weight.tile_bytes();
    let next = weight.tile(tiles.start).codes.as_ptr().wrapping_add(num_bytes);
    let mut ahead = Ahead::new(next, num_bytes, num_passes * num_groups);
    // Taken and put back: the work itself must be inlined here, not into a closure.
    let mut scratch = SCRATCH.take().unwrap_or_default();
    let Scratch { codes, columns } = &mut *scratch;
    for first in (0..num_groups).step_by(strip_len) {
        let groups = first..num_groups.min(first + strip_len);
        for (t, tile) in tiles.clone().enumerate() {
            let tile = weight.tile(tile);
            unpack::<S, C, G>(s, tile, groups.clone(), &mut codes[t], &mut columns[t]);
        }
        let last = tiles.len() - 1;
        let strip = Strip {
            codes: std::array::from_fn(|t| {
                let t = t.min(last);
                wide_codes::<C>(weight.tile(tiles.start + t), &groups, &codes[t])
            }),
            columns: std::array::from_fn(|t| &columns[t][..groups.len()]),
        };
        let row_blocks = blocks.chunks_exact(num_groups).map(|blocks| &blocks[groups.clone()]);
        match tiles.len() {
            1 => passes::<S, C, G, 1>(s, &strip, row_blocks, first == 0, out, &mut ahead),
            2 => passes::<S, C, G, 2>(s, &strip, row_blocks, first == 0, out, &mut ahead),
            _ => passes::<S, C, G, 3>(s, &strip, row_blocks, first == 0, out, &mut ahead),
        }
    }
    SCRATCH.set(Some(scratch));
}

/// Continue the sums of all rows over a strip, or begin them with the first.
#[inline(always)]
fn passes<'a, S: Simd, C: Codes, G: Scales, const T: usize>(
    s: S,
    strip: &Strip<'_>,
    row_blocks: impl Iterator<Item = &'a [GroupBlock]>,
    is_first: bool,
    out: &mut [[f32; LANES]],
    ahead: &mut Ahead,
) {
    let rows = out.as_chunks_mut::<T>().0;
    for (blocks, rows) in row_blocks.zip(rows.chunks_mut(BLOCK_ROWS)) {
        for (half, rows) in rows.chunks_mut(ROWS).enumerate() {
            pass::<S, C, G, T>(s, strip, blocks, half * ROWS, is_first, rows, ahead);
        }
    }
}

/// The codes of a strip: in place where a byte is a code, else as unpacked.
#[inline(always)]
fn wide_codes<'a, C: Codes>(
    tile: Tile<'a>,
    groups: &Range<usize>,
    unpacked: &'a [WideGroup; STRIP],
) -> &'a [WideGroup] {
    if C::PACKED {
        return &unpacked[..groups.len()];
    }
    let chunks = tile.codes.as_chunks::<LANE_BYTES>().0;
    &chunks.as_chunks::<CHUNKS>().0[groups.clone()]
}

#[inline(always)]
fn unpack<S: Simd, C: Codes, G: Scales>(
    s: S,
    tile: Tile<'_>,
    groups: Range<usize>,
    codes: &mut [WideGroup; STRIP],
    columns: &mut [Columns; STRIP],
) {
    let packed = &tile.codes[groups.start * C::GROUP_BYTES..groups.end * C::GROUP_BYTES];
    if C::PACKED {
        for (wide, group) in codes.iter_mut().zip(packed.chunks_exact(C::GROUP_BYTES)) {
            let (low, high) = wide.split_at_mut(CHUNKS / 2);
            let halves = low.iter_mut().zip(high);
            for ((low, high), chunk) in halves.zip(group.as_chunks::<LANE_BYTES>().0) {
                let packed = s.load_bytes(chunk);
                s.store_bytes(s.low_nibbles(packed), low);
                s.store_bytes(s.high_nibbles(packed), high);
            }
        }
    }
    for (index, columns) in groups.zip(columns) {
        s.store(G::scale(s, tile.scales, index, 0), &mut columns.scales[0]);
        if G::HALVES {
            s.store(G::scale(s, tile.scales, index, 1), &mut columns.scales[1]);
        }
        s.store(weight_sum::<S, C, G>(s, tile, index), &mut columns.sum);
        if G::HAS_MIN {
            s.store(G::min(s, tile.scales, index), &mut columns.min);
        }
    }
}

/// As `passes` for up to four rows of a block, from row `first` on.
#[inline(always)]
fn pass<S: Simd, C: Codes, G: Scales, const T: usize>(
    s: S,
    strip: &Strip<'_>,
    blocks: &[GroupBlock],
    first: usize,
    is_first: bool,
    rows: &mut [[[f32; LANES]; T]],
    ahead: &mut Ahead,
) {
    assert!(first + ROWS <= BLOCK_ROWS);
    let len = blocks.len();
    assert!((0..T).all(|t| strip.codes[t].len() == len && strip.columns[t].len() == len));
    let mut accs = [[s.zero(); T]; ROWS];
    if !is_first {
        for (accs, row) in accs.iter_mut().zip(&*rows) {
            for t in 0..T {
                accs[t] = s.load(&row[t]);
            }
        }
    }
    for (index, block) in blocks.iter().enumerate() {
        ahead.step(s);
        let codes: [&WideGroup; T] = std::array::from_fn(|t| &strip.codes[t][index]);
        let columns: [&Columns; T] = std::array::from_fn(|t| &strip.columns[t][index]);
        if G::HALVES {
            for half in 0..2 {
                let mut sums = [[C::start_half(s, block, first, half); T]; ROWS];
                for r in 1..ROWS {
                    sums[r] = [C::start_half(s, block, first + r, half); T];
                }
                let chunks = half * CHUNKS / 2..(half + 1) * CHUNKS / 2;
                dots::<S, C, T>(s, codes, block, first, chunks, &mut sums);
                add::<S, C, T>(s, columns, half, block, first, &sums, &mut accs);
            }
        } else {
            let mut sums = [[C::start(s, block, first); T]; ROWS];
            for r in 1..ROWS {
                sums[r] = [C::start(s, block, first + r); T];
            }
            dots::<S, C, T>(s, codes, block, first, 0..CHUNKS, &mut sums);
            add::<S, C, T>(s, columns, 0, block, first, &sums, &mut accs);
        }
        for t in 0..T {
            let sum = s.load(&columns[t].sum);
            for r in 0..ROWS {
                accs[r][t] = s.fma(sum, s.splat(block.middles[first + r]), accs[r][t]);
            }
        }
        if G::HAS_MIN {
            for t in 0..T {
                let min = s.load(&columns[t].min);
                for r in 0..ROWS {
                    accs[r][t] = s.fma(min, s.splat(block.sums[first + r]), accs[r][t]);
                }
            }
        }
    }
    for (accs, row) in accs.into_iter().zip(rows) {
        for t in 0..T {
            s.store(accs[t], &mut row[t]);
        }
    }
}

#[inline(always)]
fn dots<S: Simd, C: Codes, const T: usize>(
    s: S,
    codes: [&WideGroup; T],
    block: &GroupBlock,
    first: usize,
    chunks: Range<usize>,
    sums: &mut [[C::Sums<S>; T]; ROWS],
) {
    for chunk in chunks {
        for t in 0..T {
            let weights = C::wide(s, &codes[t][chunk]);
            for r in 0..ROWS {
                let activations = block.codes[first + r][chunk];
                sums[r][t] = C::dot(s, sums[r][t], weights, activations);
            }
        }
    }
}

/// As `int8::add_group`.
#[inline(always)]
fn add<S: Simd, C: Codes, const T: usize>(
    s: S,
    columns: [&Columns; T],
    half: usize,
    block: &GroupBlock,
    first: usize,
    sums: &[[C::Sums<S>; T]; ROWS],
    accs: &mut [[S::F32; T]; ROWS],
) {
    for t in 0..T {
        let scale = s.load(&columns[t].scales[half]);
        let offset = s.mul(scale, s.splat(-START_VALUE));
        for r in 0..ROWS {
            let sum = s.bits_to_f32(C::finish(s, sums[r][t], block, first + r));
            let scaled = s.fma(sum, scale, offset);
            accs[r][t] = s.fma(scaled, s.splat(block.scales[first + r]), accs[r][t]);
        }
    }
}
