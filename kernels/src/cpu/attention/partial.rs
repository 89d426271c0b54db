//! Attention to a part of the positions, and how parts merge.

use crate::cpu::math;
use crate::cpu::simd::Simd;

/// Attention of some queries to some positions: their largest score, the sum of the weights
/// relative to it, and the values weighted so, `[num_queries, dim]`.
#[derive(Debug, Default)]
pub(super) struct Partial {
    pub(super) max: Vec<f32>,
    pub(super) sum: Vec<f32>,
    pub(super) values: Vec<f32>,
}

impl Partial {
    pub(super) fn resize(&mut self, num_queries: usize, dim: usize) {
        self.max.resize(num_queries, 0.0);
        self.sum.resize(num_queries, 0.0);
        self.values.resize(num_queries * dim, 0.0);
    }

    pub(super) fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.values.fill(0.0);
    }

    /// Merge the partial of the next span into this one.
    #[inline(always)]
    pub(super) fn merge<S: Simd>(&mut self, simd: S, next: &Self) {
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
            let ours = math::exp_nonpositive(simd, simd.splat(self.max[query] - max));
            let theirs = math::exp_nonpositive(simd, simd.splat(next.max[query] - max));
            self.max[query] = max;
            let sum = simd.mul(simd.splat(self.sum[query]), ours);
            let sum = simd.fma(simd.splat(next.sum[query]), theirs, sum);
            self.sum[query] = simd.to_array(sum)[0];
            let (into, _) = self.values[values.clone()].as_chunks_mut();
            let (from, _) = next.values[values].as_chunks();
            for (into, from) in into.iter_mut().zip(from) {
                let kept = simd.mul(simd.load(into), ours);
                simd.store(simd.fma(simd.load(from), theirs, kept), into);
            }
        }
    }
}
