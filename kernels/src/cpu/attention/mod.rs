//! Causal attention of a step's queries over paged keys and values.
//!
//! A query's answer depends on its position and on what is stored for its row, and on nothing else:
//! spans of 256 positions are counted from position 0, each gives a partial (maximum, sum, weighted
//! values), and partials merge in span order, whoever computed them and whichever queries shared
//! the work. Each score is one chain of fused multiply-adds over dimensions, each weighted value
//! one over positions. Positions that a query must not see are left out before any product.
//! Source: Kwon et al. 2023, arXiv:2309.06180; online softmax: Milakov and Gimelshein 2018,
//! arXiv:1805.02867.

mod span;
mod tiles;

use std::ops::Range;
use std::sync::Mutex;

use super::isa::Isa;
use super::kv::{Kv, KvFormat, Tile};
use super::math;
use super::pool::Pool;
use super::shared::SharedSlice;
use super::simd::Simd;
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
struct Context<'a, F: KvFormat> {
    kv: &'a Kv<F>,
    layer: usize,
    head: usize,
    blocks: &'a [i32],
}

impl<F: KvFormat> Clone for Context<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: KvFormat> Copy for Context<'_, F> {}

impl<'a, F: KvFormat> Context<'a, F> {
    #[inline(always)]
    fn tile(&self, index: usize) -> Tile<'a, F::Value> {
        self.kv.tile(self.layer, self.blocks[index] as usize, self.head)
    }
}

/// Attention of some queries to some positions: their largest score, the sum of the weights
/// relative to it, and the values weighted so, `[num_queries, dim]`.
#[derive(Debug, Default)]
struct Partial {
    max: Vec<f32>,
    sum: Vec<f32>,
    values: Vec<f32>,
}

impl Partial {
    fn resize(&mut self, num_queries: usize, dim: usize) {
        self.max.resize(num_queries, 0.0);
        self.sum.resize(num_queries, 0.0);
        self.values.resize(num_queries * dim, 0.0);
    }

    fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.values.fill(0.0);
    }

    /// Merge the partial of the next span into this one.
    #[inline(always)]
    fn merge<S: Simd>(&mut self, simd: S, next: &Self) {
        let dim = self.values.len() / self.max.len();
        for query in 0..self.max.len() {
            if next.max[query] == f32::NEG_INFINITY {
                continue;
            }
            let values = query * dim..(query + 1) * dim;
            if self.max[query] == f32::NEG_INFINITY {
                self.max[query] = next.max[query];
                self.sum[query] = next.sum[query];
                self.values[values.clone()].copy_from_slice(&next.values[values]);
                continue;
            }
            // Not `f32::max`, which would drop a NaN.
            let max = if self.max[query] > next.max[query] { self.max[query] } else { next.max[query] };
            let ours = math::exp(simd, simd.splat(self.max[query] - max));
            let theirs = math::exp(simd, simd.splat(next.max[query] - max));
            let blend = |ours_value: S::F32, theirs_value: S::F32| {
                simd.fma(theirs_value, theirs, simd.mul(ours_value, ours))
            };
            self.max[query] = max;
            self.sum[query] = first(simd, blend(simd.splat(self.sum[query]), simd.splat(next.sum[query])));
            let (into, _) = self.values[values.clone()].as_chunks_mut();
            let (from, _) = next.values[values].as_chunks();
            for (into, from) in into.iter_mut().zip(from) {
                simd.store(blend(simd.load(into), simd.load(from)), into);
            }
        }
    }
}

/// The first lane.
#[inline(always)]
fn first<S: Simd>(simd: S, vector: S::F32) -> f32 {
    let mut lanes = [0.0; 16];
    simd.store(vector, &mut lanes);
    lanes[0]
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
