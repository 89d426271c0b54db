//! One span of 256 positions for a tile of queries: scores, softmax, weighted values.
#![expect(
    clippy::needless_range_loop,
    reason = "closures and iterators in the inner loops may not be inlined into the code that is \
              compiled for an instruction set"
)]

use std::ops::Range;

use super::Context;
use super::partial::Partial;
use crate::cpu::isa::Isa;
use crate::cpu::kv::{BLOCK_SIZE, KvFormat, Tile, UNIT};
use crate::cpu::math;
use crate::cpu::simd::Simd;

/// Positions in a span.
pub(super) const SPAN: usize = 256;

/// Positions whose values stay in the nearest cache while all queries of a tile read them.
const STRIP: usize = 64;

/// How many of the next queries share a pass over keys or values. More of them share the unpacking,
/// as far as there are registers for their sums.
#[inline(always)]
fn sharing<S: Simd>(num_left: usize) -> usize {
    match num_left {
        8.. if is_wide::<S>() => 8,
        4.. => 4,
        few => few,
    }
}

/// Queries that see the same KV head of one row.
///
/// Both ends of `visible` rise from query to query.
pub(super) struct Queries<'a> {
    /// `[num_queries, dim]`, times the scale of the scores, padded with zeros.
    pub(super) values: &'a [f32],
    /// Absolute positions that each query sees.
    pub(super) visible: &'a [Range<usize>],
    /// Numbers per query.
    pub(super) dim: usize,
}

impl Queries<'_> {
    #[inline(always)]
    fn query(&self, index: usize) -> &[[f32; 2]] {
        let (pairs, _) = self.values[index * self.dim..][..self.dim].as_chunks();
        pairs
    }

    /// What a query sees of the positions from `start` on, at most `len`, counted from `start`.
    #[inline(always)]
    fn seen(&self, index: usize, start: usize, len: usize) -> Range<usize> {
        let visible = &self.visible[index];
        visible.start.clamp(start, start + len) - start..visible.end.clamp(start, start + len) - start
    }
}

/// Compute `partial` of the span that starts at position `start`. `scores` is `[num_queries, SPAN]`.
#[inline(always)]
pub(super) fn attend_span<S: Simd, F: KvFormat>(
    simd: S,
    context: Context<'_, F>,
    queries: &Queries<'_>,
    start: usize,
    scores: &mut [f32],
    partial: &mut Partial,
) {
    let num_queries = queries.visible.len();
    let mut first = 0;
    while first < num_queries {
        let count = sharing::<S>(num_queries - first);
        let rows = &mut scores[first * SPAN..][..count * SPAN];
        match count {
            8 => score_queries::<S, F, 8>(simd, context, queries, first, start, rows),
            4 => score_queries::<S, F, 4>(simd, context, queries, first, start, rows),
            3 => score_queries::<S, F, 3>(simd, context, queries, first, start, rows),
            2 => score_queries::<S, F, 2>(simd, context, queries, first, start, rows),
            _ => score_queries::<S, F, 1>(simd, context, queries, first, start, rows),
        }
        first += count;
    }
    for index in 0..num_queries {
        let seen = queries.seen(index, start, SPAN);
        let row = &mut scores[index * SPAN..][..SPAN];
        (partial.max[index], partial.sum[index]) = softmax(simd, context, start, seen, row);
    }
    partial.values.fill(0.0);
    for strip in (0..SPAN).step_by(STRIP) {
        let mut first = 0;
        while first < num_queries {
            let count = sharing::<S>(num_queries - first);
            let rows = &scores[first * SPAN..][..count * SPAN];
            let values = &mut partial.values[first * queries.dim..][..count * queries.dim];
            weigh_strip(simd, context, queries, first, start, strip, rows, values);
            first += count;
        }
    }
}

/// Scores of N neighbouring queries in all blocks that one of them sees.
#[inline(always)]
fn score_queries<S: Simd, F: KvFormat, const N: usize>(
    simd: S,
    context: Context<'_, F>,
    queries: &Queries<'_>,
    first: usize,
    start: usize,
    rows: &mut [f32],
) {
    let seen = queries.seen(first, start, SPAN).start..queries.seen(first + N - 1, start, SPAN).end;
    let mut query = [queries.query(first); N];
    for n in 1..N {
        query[n] = queries.query(first + n);
    }
    let (mut block, end) = (seen.start / BLOCK_SIZE, seen.end.div_ceil(BLOCK_SIZE));
    let first_block = start / BLOCK_SIZE;
    while block < end {
        let mut tiles = [context.tile(first_block + block); 4];
        let num_blocks = if !is_wide::<S>() {
            1
        } else if N <= 4 && block + 4 <= end {
            4
        } else if block + 2 <= end {
            2
        } else {
            1
        };
        for b in 1..num_blocks {
            tiles[b] = context.tile(first_block + block + b);
        }
        match num_blocks {
            4 => score_blocks::<S, F, N, 4>(simd, tiles, query, block, rows),
            2 => score_blocks::<S, F, N, 2>(simd, [tiles[0], tiles[1]], query, block, rows),
            _ => score_blocks::<S, F, N, 1>(simd, [tiles[0]], query, block, rows),
        }
        block += num_blocks;
    }
}

/// Scores of N queries in B blocks: one chain of fused multiply-adds over dimensions per score.
#[inline(always)]
fn score_blocks<S: Simd, F: KvFormat, const N: usize, const B: usize>(
    simd: S,
    tiles: [Tile<'_, F::Value>; B],
    query: [&[[f32; 2]]; N],
    block: usize,
    rows: &mut [f32],
) {
    let num_pairs = tiles[0].keys.len();
    let mut keys = [tiles[0].keys; B];
    for b in 0..B {
        keys[b] = &tiles[b].keys[..num_pairs];
    }
    let mut query = query;
    for n in 0..N {
        query[n] = &query[n][..num_pairs];
    }
    let mut sums = [[simd.zero(); B]; N];
    for pair in 0..num_pairs {
        let mut units = [(simd.zero(), simd.zero()); B];
        for b in 0..B {
            units[b] = F::load(simd, &keys[b][pair]);
        }
        for n in 0..N {
            let [even, odd] = query[n][pair];
            let (even, odd) = (simd.splat(even), simd.splat(odd));
            for b in 0..B {
                sums[n][b] = simd.fma(even, units[b].0, sums[n][b]);
                sums[n][b] = simd.fma(odd, units[b].1, sums[n][b]);
            }
        }
    }
    for b in 0..B {
        let scales = simd.load(tiles[b].key_scales);
        for n in 0..N {
            let sum = if F::SCALED { simd.mul(sums[n][b], scales) } else { sums[n][b] };
            simd.store(sum, vector_mut(&mut rows[n * SPAN..], block + b));
        }
    }
}

/// Turn the scores of one query that it sees into weights relative to their maximum; returns the
/// maximum and the sum of the weights. Weights of int8 values carry the values' scales.
#[inline(always)]
fn softmax<S: Simd, F: KvFormat>(
    simd: S,
    context: Context<'_, F>,
    start: usize,
    seen: Range<usize>,
    row: &mut [f32],
) -> (f32, f32) {
    if seen.is_empty() {
        return (f32::NEG_INFINITY, 0.0);
    }
    let (first, end) = (seen.start / BLOCK_SIZE, seen.end.div_ceil(BLOCK_SIZE));
    row[first * BLOCK_SIZE..seen.start].fill(f32::NEG_INFINITY);
    row[seen.end..end * BLOCK_SIZE].fill(f32::NEG_INFINITY);
    let mut max = simd.splat(f32::NEG_INFINITY);
    for block in first..end {
        max = simd.max(max, simd.load(vector(row, block)));
    }
    let max = simd.reduce_max(max);
    let shift = simd.splat(max);
    let mut sum = simd.splat(0.0);
    for block in first..end {
        let weights = math::exp_nonpositive(simd, simd.sub(simd.load(vector(row, block)), shift));
        sum = simd.add(sum, weights);
        let weights = if F::SCALED {
            let tile = context.tile(start / BLOCK_SIZE + block);
            simd.mul(weights, simd.load(tile.value_scales))
        } else {
            weights
        };
        simd.store(weights, vector_mut(row, block));
    }
    (max, simd.reduce_add(sum))
}

/// Add the weighted values of one strip of the span to those of up to eight queries.
///
/// Positions that all of them see are read once for all; the others one query at a time, in order.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the loop body of attend_span")]
fn weigh_strip<S: Simd, F: KvFormat>(
    simd: S,
    context: Context<'_, F>,
    queries: &Queries<'_>,
    first: usize,
    start: usize,
    strip: usize,
    rows: &[f32],
    values: &mut [f32],
) {
    let dim = queries.dim;
    let count = values.len() / dim;
    let seen = |index: usize| {
        let seen = queries.seen(first + index, start + strip, STRIP);
        seen.start + strip..seen.end + strip
    };
    let shared = seen(count - 1).start..seen(0).end;
    let shared = if shared.is_empty() { seen(0).end..seen(0).end } else { shared };
    let block = start / BLOCK_SIZE;
    // Both ends rise from query to query, so these two are equal only if all are.
    let num_ragged = if seen(0) == seen(count - 1) { 0 } else { count };
    for index in 0..num_ragged {
        let before = seen(index).start..seen(index).end.min(shared.start);
        weigh::<S, F, 1>(
            simd,
            context,
            block,
            before,
            &rows[index * SPAN..],
            &mut values[index * dim..][..dim],
        );
    }
    match count {
        8 => weigh::<S, F, 8>(simd, context, block, shared.clone(), rows, values),
        4 => weigh::<S, F, 4>(simd, context, block, shared.clone(), rows, values),
        3 => weigh::<S, F, 3>(simd, context, block, shared.clone(), rows, values),
        2 => weigh::<S, F, 2>(simd, context, block, shared.clone(), rows, values),
        _ => weigh::<S, F, 1>(simd, context, block, shared.clone(), rows, values),
    }
    for index in 0..num_ragged {
        let after = seen(index).start.max(shared.end)..seen(index).end;
        weigh::<S, F, 1>(
            simd,
            context,
            block,
            after,
            &rows[index * SPAN..],
            &mut values[index * dim..][..dim],
        );
    }
}

/// Add the weighted values of `positions`, counted from the span's first `block`, for N queries.
#[inline(always)]
fn weigh<S: Simd, F: KvFormat, const N: usize>(
    simd: S,
    context: Context<'_, F>,
    block: usize,
    positions: Range<usize>,
    rows: &[f32],
    values: &mut [f32],
) {
    if positions.is_empty() {
        return;
    }
    let num_units = values.len() / N / UNIT;
    let mut unit = 0;
    while unit < num_units {
        if is_wide::<S>() && N <= 4 && unit + 2 <= num_units {
            weigh_units::<S, F, N, 2>(simd, context, block, positions.clone(), rows, values, unit);
            unit += 2;
        } else {
            weigh_units::<S, F, N, 1>(simd, context, block, positions.clone(), rows, values, unit);
            unit += 1;
        }
    }
}

/// The same for U units of 32 dimensions: one chain of fused multiply-adds over positions per number.
#[inline(always)]
fn weigh_units<S: Simd, F: KvFormat, const N: usize, const U: usize>(
    simd: S,
    context: Context<'_, F>,
    block: usize,
    positions: Range<usize>,
    rows: &[f32],
    values: &mut [f32],
    unit: usize,
) {
    let dim = values.len() / N;
    let num_units = dim / UNIT;
    let place = |n: usize, u: usize| n * dim / BLOCK_SIZE + 2 * (unit + u);
    let (rows, _) = rows.as_chunks::<SPAN>();
    let rows = &rows[..N];
    let mut sums = [[(simd.zero(), simd.zero()); U]; N];
    for n in 0..N {
        for u in 0..U {
            sums[n][u].0 = simd.load(vector(values, place(n, u)));
            sums[n][u].1 = simd.load(vector(values, place(n, u) + 1));
        }
    }
    let mut position = positions.start;
    while position < positions.end {
        let index = position / BLOCK_SIZE;
        let tile = context.tile(block + index);
        let end = positions.end.min((index + 1) * BLOCK_SIZE);
        for position in position..end {
            let units = &tile.values[position % BLOCK_SIZE * num_units + unit..][..U];
            let mut token = [(simd.zero(), simd.zero()); U];
            for u in 0..U {
                token[u] = F::load(simd, &units[u]);
            }
            for n in 0..N {
                let weight = simd.splat(rows[n][position % SPAN]);
                for u in 0..U {
                    sums[n][u].0 = simd.fma(weight, token[u].0, sums[n][u].0);
                    sums[n][u].1 = simd.fma(weight, token[u].1, sums[n][u].1);
                }
            }
        }
        position = end;
    }
    for n in 0..N {
        for u in 0..U {
            simd.store(sums[n][u].0, vector_mut(values, place(n, u)));
            simd.store(sums[n][u].1, vector_mut(values, place(n, u) + 1));
        }
    }
}

/// Whether there are registers for more than one block or unit at a time.
#[inline(always)]
fn is_wide<S: Simd>() -> bool {
    matches!(S::ISA, Isa::Avx512)
}

/// The 16 numbers at `index` vectors from the start.
#[inline(always)]
fn vector(values: &[f32], index: usize) -> &[f32; BLOCK_SIZE] {
    &values.as_chunks().0[index]
}

#[inline(always)]
fn vector_mut(values: &mut [f32], index: usize) -> &mut [f32; BLOCK_SIZE] {
    &mut values.as_chunks_mut().0[index]
}
