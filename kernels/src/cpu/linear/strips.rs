//! The products of `int8` for many rows: a strip of a tile is unpacked once, then serves them all.
//!
//! Every output sees the same operations in the same order as in `int8`.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over rows and tiles are unrolled, several arrays by one index"
)]

use std::cell::Cell;
use std::ops::Range;

use super::codes::{CHUNKS, Codes};
use super::quantized::QuantizedWeight;
use super::scales::Scales;
use crate::cpu::quantize::{BLOCK_ROWS, GroupBlock, START_VALUE};
use crate::cpu::simd::{LANE_BYTES, LANES, Simd};

/// Groups of a strip, at most: with three tiles 19 KiB, which stay in the first cache.
const STRIP: usize = 9;
/// Tiles that share the loads of activations.
const TILES: usize = 3;
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
        let columns = Columns {
            scales: [[0.0; LANES]; 2],
            min: [0.0; LANES],
        };
        Self {
            codes: [[[[0; LANE_BYTES]; CHUNKS]; STRIP]; TILES],
            columns: [[columns; STRIP]; TILES],
        }
    }
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// As `int8::multiply`, for any number of rows.
#[inline(always)]
pub(super) fn multiply<S: Simd, C: Codes, G: Scales>(
    s: S,
    weight: &QuantizedWeight,
    tiles: Range<usize>,
    blocks: &[GroupBlock],
    out: &mut [[f32; LANES]],
) {
    let (num_tiles, num_groups) = (tiles.len(), weight.num_groups());
    let num_rows = out.len() / num_tiles;
    let num_strips = num_groups.div_ceil(STRIP);
    let strip_len = num_groups.div_ceil(num_strips);
    // Taken and put back: the work itself must be inlined here, not into a closure.
    let mut scratch = SCRATCH.take().unwrap_or_default();
    let Scratch { codes, columns } = &mut *scratch;
    out.fill([0.0; LANES]);
    for column in (0..num_tiles).step_by(TILES) {
        let tile = tiles.start + column;
        let width = TILES.min(num_tiles - column);
        for first in (0..num_groups).step_by(strip_len) {
            let groups = first..num_groups.min(first + strip_len);
            for t in 0..width {
                unpack::<S, C, G>(
                    s,
                    weight,
                    tile + t,
                    groups.clone(),
                    &mut codes[t],
                    &mut columns[t],
                );
            }
            let strip = Strip {
                codes: std::array::from_fn(|t| {
                    let t = t.min(width - 1);
                    wide_codes::<C>(weight, tile + t, &groups, &codes[t])
                }),
                columns: std::array::from_fn(|t| &columns[t][..groups.len()]),
            };
            for row in (0..num_rows).step_by(ROWS) {
                let start = row / BLOCK_ROWS * num_groups;
                let blocks = &blocks[start + groups.start..start + groups.end];
                let rows = ROWS.min(num_rows - row);
                let out = &mut out[row * num_tiles + column..];
                let first = row % BLOCK_ROWS;
                match width {
                    1 => pass::<S, C, G, 1>(s, &strip, blocks, first, rows, num_tiles, out),
                    2 => pass::<S, C, G, 2>(s, &strip, blocks, first, rows, num_tiles, out),
                    _ => pass::<S, C, G, 3>(s, &strip, blocks, first, rows, num_tiles, out),
                }
            }
        }
    }
    SCRATCH.set(Some(scratch));
}

/// The codes of a strip: in place where a byte is a code, else as unpacked.
#[inline(always)]
fn wide_codes<'a, C: Codes>(
    weight: &'a QuantizedWeight,
    tile: usize,
    groups: &Range<usize>,
    unpacked: &'a [WideGroup; STRIP],
) -> &'a [WideGroup] {
    if C::PACKED {
        return &unpacked[..groups.len()];
    }
    let chunks = weight.tile(tile).codes.as_chunks::<LANE_BYTES>().0;
    &chunks.as_chunks::<CHUNKS>().0[groups.clone()]
}

#[inline(always)]
fn unpack<S: Simd, C: Codes, G: Scales>(
    s: S,
    weight: &QuantizedWeight,
    tile: usize,
    groups: Range<usize>,
    codes: &mut [WideGroup; STRIP],
    columns: &mut [Columns; STRIP],
) {
    let tile = weight.tile(tile);
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
        if G::HAS_MIN {
            s.store(G::min(s, tile.scales, index), &mut columns.min);
        }
    }
}

/// Continue the sums of rows `first..first + 4` of a block over a strip; row r's of tile t are in
/// `out[r * stride + t]`. Of the rows, `num_rows` exist.
#[inline(always)]
fn pass<S: Simd, C: Codes, G: Scales, const T: usize>(
    s: S,
    strip: &Strip<'_>,
    blocks: &[GroupBlock],
    first: usize,
    num_rows: usize,
    stride: usize,
    out: &mut [[f32; LANES]],
) {
    assert!(first + ROWS <= BLOCK_ROWS);
    let len = blocks.len();
    assert!((0..T).all(|t| strip.codes[t].len() == len && strip.columns[t].len() == len));
    let mut accs = [[s.zero(); T]; ROWS];
    for r in 0..ROWS.min(num_rows) {
        for t in 0..T {
            accs[r][t] = s.load(&out[r * stride + t]);
        }
    }
    for (index, block) in blocks.iter().enumerate() {
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
        if G::HAS_MIN {
            for t in 0..T {
                let min = s.load(&columns[t].min);
                for r in 0..ROWS {
                    let sum = s.splat(block.scaled_sums[first + r]);
                    accs[r][t] = s.fma(min, sum, accs[r][t]);
                }
            }
        }
    }
    for r in 0..ROWS.min(num_rows) {
        for t in 0..T {
            s.store(accs[r][t], &mut out[r * stride + t]);
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
