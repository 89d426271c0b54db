//! Drawing an id from a row of logits: temperature, top-k, top-p. Ties go to the lower id.
//!
//! A draw depends on its row and its number alone. Weights are exp((logit - largest) / temperature)
//! in f32; their sums run in f64 over tiles in order.

use super::score::{Logits, TILE};
use crate::cpu::math;
use crate::cpu::simd::{LANES, Simd};

/// A nucleus is looked for among this many likeliest ids first, then among all.
const NUCLEUS_HEAD: usize = 256;
/// Up to this many likeliest ids are found by insertion; for more, all are sorted.
const MAX_INSERTED: usize = 1024;

/// How an id is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// What logits are divided by; above zero.
    pub temperature: f32,
    /// How many of the likeliest ids are kept; 0: all.
    pub top_k: usize,
    /// The smallest set of likeliest ids with this share of the weights is kept; 1: all.
    pub top_p: f32,
    /// The random number, in [0, 1).
    pub number: f64,
}

impl Draw {
    /// The drawn id and its logit; `max` is the largest logit.
    #[inline(always)]
    pub(super) fn run<S: Simd>(&self, s: S, logits: Logits<'_>, max: f32) -> (i32, f32) {
        let weigh = Weigh { max, temperature: self.temperature };
        if 0 < self.top_k && self.top_k < logits.values.len() {
            let kept = likeliest(logits, self.top_k);
            let weights = weigh.all(s, &kept);
            let total = weights.iter().copied().map(f64::from).sum::<f64>();
            return self.pick_ranked(&kept, &weights, total);
        }
        let tiles: Vec<f64> = logits.values.chunks(TILE).map(|tile| weigh.sum(s, tile)).collect();
        let total = tiles.iter().sum::<f64>();
        if self.top_p >= 1.0 {
            return self.pick_from_all(s, logits, weigh, &tiles, total);
        }
        let head = likeliest(logits, NUCLEUS_HEAD.min(logits.values.len()));
        let weights = weigh.all(s, &head);
        if weights.iter().copied().map(f64::from).sum::<f64>() >= f64::from(self.top_p) * total {
            return self.pick_ranked(&head, &weights, total);
        }
        let ranked = logits.ranked();
        self.pick_ranked(&ranked, &weigh.all(s, &ranked), total)
    }

    /// Pick among ids that are sorted by likeliness, cut where they reach `top_p` of `total`.
    fn pick_ranked(&self, ranked: &[(i32, f32)], weights: &[f32], total: f64) -> (i32, f32) {
        let wanted = if self.top_p < 1.0 { f64::from(self.top_p) * total } else { f64::INFINITY };
        let mut running = Vec::with_capacity(weights.len());
        let mut sum = 0.0;
        for &weight in weights {
            sum += f64::from(weight);
            running.push(sum);
            if sum >= wanted {
                break;
            }
        }
        let place = running.partition_point(|&running| running <= self.number * sum);
        // The product may round up to the sum: then the last that has any weight is meant.
        ranked[place.min(running.partition_point(|&running| running < sum))]
    }

    /// Pick among all ids in their own order.
    #[inline(always)]
    fn pick_from_all<S: Simd>(
        &self,
        s: S,
        logits: Logits<'_>,
        weigh: Weigh,
        tiles: &[f64],
        total: f64,
    ) -> (i32, f32) {
        let target = self.number * total;
        let mut before = 0.0;
        let mut drawn = (0, f32::NEG_INFINITY);
        for ((tile, &sum), first) in logits.values.chunks(TILE).zip(tiles).zip((0..).step_by(TILE)) {
            if before + sum <= target {
                before += sum;
                continue;
            }
            let tile: Vec<(i32, f32)> = (first..).zip(tile.iter().copied()).collect();
            for (&candidate, weight) in tile.iter().zip(weigh.all(s, &tile)) {
                before += f64::from(weight);
                drawn = candidate;
                if before > target {
                    return drawn;
                }
            }
            // A tile's sum rounds in another order than its numbers one by one: its last id then.
            return drawn;
        }
        logits.top(1)[0]
    }
}

fn likeliest(logits: Logits<'_>, count: usize) -> Vec<(i32, f32)> {
    if count <= MAX_INSERTED {
        return logits.top(count);
    }
    let mut ranked = logits.ranked();
    ranked.truncate(count);
    ranked
}

/// exp((logit - max) / temperature).
#[derive(Clone, Copy)]
struct Weigh {
    max: f32,
    temperature: f32,
}

impl Weigh {
    #[inline(always)]
    fn vector<S: Simd>(self, s: S, logits: S::F32) -> S::F32 {
        let distance = s.sub(logits, s.splat(self.max));
        math::exp_nonpositive(s, s.div(distance, s.splat(self.temperature)))
    }

    /// Of each id.
    #[inline(always)]
    fn all<S: Simd>(self, s: S, ids: &[(i32, f32)]) -> Vec<f32> {
        let mut weights: Vec<f32> = ids.iter().map(|&(_, logit)| logit).collect();
        for chunk in weights.chunks_mut(LANES) {
            let logits = s.load_partial(chunk);
            s.store_partial(self.vector(s, logits), chunk);
        }
        weights
    }

    /// The sum over a tile.
    #[inline(always)]
    fn sum<S: Simd>(self, s: S, tile: &[f32]) -> f64 {
        let (chunks, rest) = tile.as_chunks::<LANES>();
        let mut sums = s.zero();
        for chunk in chunks {
            sums = s.add(sums, self.vector(s, s.load(chunk)));
        }
        let mut sum = f64::from(s.reduce_add(sums));
        if !rest.is_empty() {
            let weights = s.to_array(self.vector(s, s.load_partial(rest)));
            for &weight in &weights[..rest.len()] {
                sum += f64::from(weight);
            }
        }
        sum
    }
}
