//! Causal attention of a step's queries over paged keys and values.
//!
//! A query's answer depends on its position and on what is stored for its row, and on nothing else:
//! spans of 256 positions are counted from position 0, each gives a partial (maximum, sum, weighted
//! values), and partials merge in span order, whoever computed them and whichever queries shared
//! the work. Each score is one chain of fused multiply-adds over dimensions, each weighted value
//! one over positions. Positions that a query must not see are left out before any product.
//! Source: Kwon et al. 2023, arXiv:2309.06180; online softmax: Milakov and Gimelshein 2018,
//! arXiv:1805.02867.
#![expect(unsafe_code, reason = "units write disjoint parts of one output")]

mod partial;
mod span;
#[cfg(test)]
mod tests;
mod tiles;

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::isa::{Isa, Kernel};
use super::kv::{Kv, KvFormat, Tile};
use super::pool::{Pool, PoolError};
use super::shared::SharedSlice;
use super::simd::Simd;
use partial::Partial;
use span::{Queries, SPAN, attend_span};
pub use tiles::AttentionTiles;
use tiles::QueryTile;

/// Heads of an attention layer and how far it sees.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    /// Query heads; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Heads of keys and values; query head h reads head `h / (num_heads / num_kv_heads)`.
    pub num_kv_heads: usize,
    /// Numbers per head.
    pub head_dim: usize,
    /// How many positions a query sees, its own included; None: all before it.
    pub window: Option<usize>,
}

impl AttentionShape {
    fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    fn visible(&self, position: usize) -> Range<usize> {
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        start..position + 1
    }
}

/// What one KV head of one row has stored in one layer.
#[derive(Clone, Copy)]
struct Context<'a, F: KvFormat> {
    kv: &'a Kv<F>,
    layer: usize,
    head: usize,
    blocks: &'a [i32],
}

impl<'a, F: KvFormat> Context<'a, F> {
    #[inline(always)]
    fn tile(&self, index: usize) -> Tile<'a, F::Value> {
        self.kv.tile(self.layer, self.blocks[index] as usize, self.head)
    }
}

/// What a worker needs beside its unit's inputs; nothing in it outlives a unit.
#[derive(Debug, Default)]
struct Workspace {
    queries: Vec<f32>,
    visible: Vec<Range<usize>>,
    scores: Vec<f32>,
    span: Partial,
    total: Partial,
}

/// Memory of attention, kept between steps.
#[derive(Debug, Default)]
pub struct AttentionScratch {
    workers: Vec<Mutex<Workspace>>,
    /// Of the units of a step that is split by span.
    partials: Vec<Mutex<Partial>>,
}

/// One layer's attention for a step.
pub struct Attention<'a, F: KvFormat> {
    /// Heads.
    pub shape: AttentionShape,
    /// Keys and values, those of the step's own tokens included.
    pub kv: &'a Kv<F>,
    /// Layer of the model.
    pub layer: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// The step's rows, cut into tiles.
    pub tiles: &'a AttentionTiles,
    /// `[num_rows, table_width]`: the block of each 16 positions of each row.
    pub block_tables: &'a [i32],
    /// Entries of a row of `block_tables`.
    pub table_width: usize,
    /// `[num_tokens, num_heads * head_dim]`, rotated.
    pub queries: &'a [f32],
}

impl<F: KvFormat> Attention<'_, F> {
    /// Write each query's answer to `out`, `[num_tokens, num_heads * head_dim]`.
    pub fn run(
        &self,
        isa: Isa,
        pool: &Pool,
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        assert_eq!(out.len(), self.queries.len());
        scratch.workers.resize_with(pool.num_threads(), Mutex::default);
        let out = SharedSlice::new(out);
        let workers = &scratch.workers;
        if !self.tiles.by_span {
            return pool.run(self.tiles.num_units(), |unit, worker| {
                let (tile, head) = self.tiles.unit(unit);
                let workspace = &mut *lock(&workers[worker]);
                isa.dispatch(WholeUnit { attention: self, tile, head, workspace, out: &out });
            });
        }
        let num_units = self.tiles.num_span_units();
        if scratch.partials.len() < num_units {
            scratch.partials.resize_with(num_units, Mutex::default);
        }
        let partials = &scratch.partials;
        pool.run(num_units, |unit, worker| {
            let (tile, head, span) = self.tiles.span_unit(unit);
            let workspace = &mut *lock(&workers[worker]);
            let partial = &mut *lock(&partials[unit]);
            isa.dispatch(SpanUnit { attention: self, tile, head, span, workspace, partial });
        })?;
        pool.run(self.tiles.num_units(), |unit, worker| {
            let (tile, head) = self.tiles.unit(unit);
            let partials = &partials[tile.span_units(head)];
            let workspace = &mut *lock(&workers[worker]);
            isa.dispatch(MergeUnit { attention: self, tile, head, partials, workspace, out: &out });
        })
    }

    fn dim(&self) -> usize {
        self.kv.shape().dim()
    }

    fn context(&self, tile: &QueryTile, head: usize) -> Context<'_, F> {
        let blocks = &self.block_tables[tile.row * self.table_width..][..self.table_width];
        Context { kv: self.kv, layer: self.layer, head, blocks }
    }

    /// Copy a tile's queries of the heads that share a KV head, scaled and padded, token by token.
    #[inline(always)]
    fn gather(&self, tile: &QueryTile, head: usize, workspace: &mut Workspace) {
        let (group, head_dim, dim) = (self.shape.group(), self.shape.head_dim, self.dim());
        let width = self.shape.num_heads * head_dim;
        let num_queries = tile.num_tokens * group;
        workspace.queries.resize(num_queries * dim, 0.0);
        workspace.scores.resize(num_queries * SPAN, 0.0);
        workspace.span.resize(num_queries, dim);
        workspace.total.resize(num_queries, dim);
        workspace.visible.clear();
        for (query, into) in workspace.queries.chunks_exact_mut(dim).enumerate() {
            let token = query / group;
            let start = (tile.first_token + token) * width + (head * group + query % group) * head_dim;
            for (into, value) in into.iter_mut().zip(&self.queries[start..start + head_dim]) {
                *into = value * self.scale;
            }
            into[head_dim..].fill(0.0);
            workspace.visible.push(self.shape.visible(tile.first_position + token));
        }
    }

    /// Divide by the sums and write to the tile's places.
    #[inline(always)]
    fn scatter(&self, tile: &QueryTile, head: usize, total: &Partial, out: &SharedSlice<'_, f32>) {
        let (group, head_dim) = (self.shape.group(), self.shape.head_dim);
        let width = self.shape.num_heads * head_dim;
        for (query, values) in total.values.chunks_exact(self.dim()).enumerate() {
            let start =
                (tile.first_token + query / group) * width + (head * group + query % group) * head_dim;
            let inverse = 1.0 / total.sum[query];
            // SAFETY: every query belongs to one tile and head, thus to one unit.
            let out = unsafe { out.part(start..start + head_dim) };
            for (out, value) in out.iter_mut().zip(values) {
                *out = value * inverse;
            }
        }
    }
}

/// All spans of a tile and KV head.
struct WholeUnit<'a, F: KvFormat> {
    attention: &'a Attention<'a, F>,
    tile: &'a QueryTile,
    head: usize,
    workspace: &'a mut Workspace,
    out: &'a SharedSlice<'a, f32>,
}

impl<F: KvFormat> Kernel for WholeUnit<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { attention, tile, head, workspace, out } = self;
        attention.gather(tile, head, workspace);
        let Workspace { queries, visible, scores, span: partial, total } = workspace;
        let queries = Queries { values: queries, visible, dim: attention.dim() };
        let context = attention.context(tile, head);
        total.clear();
        for span in tile.first_span..tile.first_span + tile.num_spans {
            attend_span(simd, context, &queries, span * SPAN, scores, partial);
            total.merge(simd, partial);
        }
        attention.scatter(tile, head, total, out);
    }
}

/// One span of a tile and KV head.
struct SpanUnit<'a, F: KvFormat> {
    attention: &'a Attention<'a, F>,
    tile: &'a QueryTile,
    head: usize,
    span: usize,
    workspace: &'a mut Workspace,
    partial: &'a mut Partial,
}

impl<F: KvFormat> Kernel for SpanUnit<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { attention, tile, head, span, workspace, partial } = self;
        attention.gather(tile, head, workspace);
        let Workspace { queries, visible, scores, .. } = workspace;
        partial.resize(visible.len(), attention.dim());
        let queries = Queries { values: queries, visible, dim: attention.dim() };
        attend_span(simd, attention.context(tile, head), &queries, span * SPAN, scores, partial);
    }
}

/// The spans of a tile and KV head, computed before.
struct MergeUnit<'a, F: KvFormat> {
    attention: &'a Attention<'a, F>,
    tile: &'a QueryTile,
    head: usize,
    partials: &'a [Mutex<Partial>],
    workspace: &'a mut Workspace,
    out: &'a SharedSlice<'a, f32>,
}

impl<F: KvFormat> Kernel for MergeUnit<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { attention, tile, head, partials, workspace, out } = self;
        let total = &mut workspace.total;
        total.resize(tile.num_tokens * attention.shape.group(), attention.dim());
        total.clear();
        for partial in partials {
            total.merge(simd, &lock(partial));
        }
        attention.scatter(tile, head, total, out);
    }
}

/// A panic in a unit fails the whole step, and what a unit leaves behind is never read.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
