//! The output head: logits of the rows that sample, and what is wanted of them.
#![expect(unsafe_code, reason = "units write disjoint rows of one buffer")]

use std::time::Instant;

use super::forward::HEAD;
use super::rows::{Norm, NormRow};
use super::{Context, Model, ModelError, matrix, vector};
use crate::cpu::isa::Kernel;
use crate::cpu::linear::{Input, Output, Projection, project};
use crate::cpu::math;
use crate::cpu::pool::PoolError;
use crate::cpu::quantize::QuantizedRows;
use crate::cpu::shared::SharedSlice;
use crate::cpu::simd::{LANES, Simd};

/// Rows whose logits exist at once, so that many rows of a large vocabulary take little memory.
const TILE_ROWS: usize = 64;

/// Logits that are looked at together when a row is scored.
const SCORE_TILE: usize = 256;

/// What a sampling row needs of its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The most likely id.
    Best,
    /// That, the logsumexp, and the n most likely ids.
    Top(usize),
    /// That, and all logits.
    All,
}

/// What became of a sampling row's logits.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Scores {
    /// Whether all numbers were finite; if not, nothing else here means anything.
    pub is_finite: bool,
    /// The most likely id, the lowest on ties.
    pub best_id: i32,
    /// Its logit.
    pub best_logit: f32,
    /// ln of the sum of exp(logit) over the vocabulary, if wanted.
    pub logsumexp: f32,
    /// The most likely ids with their logits, as many as wanted: most likely first, ties to the lower id.
    pub top: Vec<(i32, f32)>,
}

/// The head's input of the rows that sample.
#[derive(Debug, Default)]
pub(super) struct Head {
    /// `[num_rows, width]`.
    rows: Vec<f32>,
    /// `[num_rows]`: whether each row was finite before its norm.
    finite: Vec<bool>,
    matrix: Option<usize>,
    logits: Vec<f32>,
    quantized: Option<QuantizedRows>,
}

impl Head {
    pub(super) fn clear(&mut self) {
        self.finite.clear();
        self.rows.clear();
    }
}

impl Model {
    /// Keep the rows of `x` that sample, after the norm if there is one.
    pub(super) fn keep_head_rows(&mut self, x: usize, norm: Option<(usize, f32)>, weight: usize) {
        let width = matrix(&self.weights, weight).num_inputs();
        let x = self.buffers[x].float();
        self.head.matrix = Some(weight);
        for &token in &self.tokens.last_tokens {
            let row = &x[token * width..(token + 1) * width];
            let start = self.head.rows.len();
            self.head.rows.extend_from_slice(row);
            let mut finite = row.iter().all(|value| value.is_finite());
            if let Some((weight, eps)) = norm {
                let norm = Norm { weight: vector(&self.weights, weight), eps };
                let out = &mut self.head.rows[start..];
                finite &= self.settings.isa.dispatch(NormRow { norm, x: row, out });
            }
            self.head.finite.push(finite);
        }
    }

    /// Run the head for the rows that sampled in the last `forward`, `wanted` for each. The logits
    /// of the rows that want all are appended to `all_logits`, `[vocab_size]` each.
    pub fn sample(
        &mut self,
        wanted: &[Wanted],
        all_logits: &mut Vec<f32>,
    ) -> Result<Vec<Scores>, ModelError> {
        let start = Instant::now();
        let mut head = std::mem::take(&mut self.head);
        let result = self.run_head(&mut head, wanted, all_logits);
        self.head = head;
        self.times[HEAD] += start.elapsed().as_nanos() as u64;
        result
    }

    fn run_head(
        &self,
        head: &mut Head,
        wanted: &[Wanted],
        all_logits: &mut Vec<f32>,
    ) -> Result<Vec<Scores>, ModelError> {
        if wanted.len() != head.finite.len() {
            return Err(ModelError::Settings(format!(
                "{} rows to sample and {} in the last step",
                wanted.len(),
                head.finite.len()
            )));
        }
        let Some(weight) = head.matrix.filter(|_| !wanted.is_empty()) else {
            return Ok(Vec::new());
        };
        let weight = matrix(&self.weights, weight);
        let (width, vocab_size) = (weight.num_inputs(), weight.num_outputs());
        let mut scores = vec![Scores::default(); wanted.len()];
        for first in (0..wanted.len()).step_by(TILE_ROWS) {
            let tile = first..wanted.len().min(first + TILE_ROWS);
            let rows = &head.rows[tile.start * width..tile.end * width];
            if head.logits.len() < tile.len() * vocab_size {
                head.logits.resize(tile.len() * vocab_size, 0.0);
            }
            let logits = &mut head.logits[..tile.len() * vocab_size];
            let ctx = Context { pool: &self.pool, isa: self.settings.isa };
            let projection = Projection { weight, output: Output::Store(logits) };
            if self.settings.quantize_activations && weight.takes_quantized() {
                let quantized = head.quantized.get_or_insert_with(|| QuantizedRows::zeros(0, width));
                quantized.set_num_rows(tile.len());
                quantized.quantize(self.settings.isa, &self.pool, rows)?;
                project(ctx, Input::Quantized(quantized), tile.len(), &mut [projection])?;
            } else {
                project(ctx, Input::Float(rows), tile.len(), &mut [projection])?;
            }
            let logits = &head.logits[..tile.len() * vocab_size];
            self.score(logits, &wanted[tile.clone()], &mut scores[tile.clone()])?;
            for (row, row_logits) in tile.zip(logits.chunks_exact(vocab_size)) {
                scores[row].is_finite &= head.finite[row];
                if wanted[row] == Wanted::All {
                    all_logits.extend_from_slice(row_logits);
                }
            }
        }
        Ok(scores)
    }

    /// Score rows of logits `[num_rows, vocab_size]`, one unit each.
    fn score(&self, logits: &[f32], wanted: &[Wanted], scores: &mut [Scores]) -> Result<(), PoolError> {
        let vocab_size = self.settings.vocab_size;
        let shared = SharedSlice::new(scores);
        self.pool.run(wanted.len(), |row, _| {
            let logits = &logits[row * vocab_size..(row + 1) * vocab_size];
            let scored = self.settings.isa.dispatch(ScoreRow { logits, wanted: wanted[row] });
            // SAFETY: every unit has its own row.
            let score = unsafe { shared.part(row..row + 1) };
            score[0] = scored;
        })
    }
}

struct ScoreRow<'a> {
    logits: &'a [f32],
    wanted: Wanted,
}

impl Kernel for ScoreRow<'_> {
    type Output = Scores;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Scores {
        let mut maxima = Vec::with_capacity(self.logits.len().div_ceil(SCORE_TILE));
        let mut is_finite = true;
        for tile in self.logits.chunks(SCORE_TILE) {
            let (max, tile_is_finite) = tile_max(s, tile);
            maxima.push(max);
            is_finite &= tile_is_finite;
        }
        if !is_finite {
            return Scores::default();
        }
        let top_of = |count| top(self.logits, &maxima, count);
        let Some(&(best_id, best_logit)) = top_of(1).first() else {
            return Scores::default();
        };
        let (logsumexp, top) = match self.wanted {
            Wanted::Top(count) => (logsumexp(s, self.logits, best_logit), top_of(count)),
            Wanted::Best | Wanted::All => (0.0, Vec::new()),
        };
        Scores { is_finite, best_id, best_logit, logsumexp, top }
    }
}

/// The largest logit of a tile and whether all are finite.
#[inline(always)]
fn tile_max<S: Simd>(s: S, tile: &[f32]) -> (f32, bool) {
    let (chunks, rest) = tile.as_chunks::<LANES>();
    let mut max = s.splat(f32::NEG_INFINITY);
    // Zero times a number is zero only if the number is finite.
    let mut zeros = s.zero();
    for chunk in chunks {
        let chunk = s.load(chunk);
        max = s.max(max, chunk);
        zeros = s.fma(chunk, s.zero(), zeros);
    }
    let mut max = s.reduce_max(max);
    let mut is_finite = s.reduce_add(zeros) == 0.0;
    for &logit in rest {
        max = if logit > max { logit } else { max };
        is_finite &= logit.is_finite();
    }
    (max, is_finite)
}

/// ln of the sum of exp(logit), in 16 lanes and one fixed tree, `max` being the largest logit.
#[inline(always)]
fn logsumexp<S: Simd>(s: S, logits: &[f32], max: f32) -> f32 {
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let shift = s.splat(max);
    let mut sum = s.zero();
    for chunk in chunks {
        sum = s.add(sum, math::exp_nonpositive(s, s.sub(s.load(chunk), shift)));
    }
    let mut tail = [f32::NEG_INFINITY; LANES];
    tail[..rest.len()].copy_from_slice(rest);
    sum = s.add(sum, math::exp_nonpositive(s, s.sub(s.load(&tail), shift)));
    max + s.reduce_add(sum).ln()
}

/// The `count` largest with their places, the largest first, ties to the lower place. `maxima` are
/// the largest of each tile.
fn top(logits: &[f32], maxima: &[f32], count: usize) -> Vec<(i32, f32)> {
    let mut top: Vec<(i32, f32)> = Vec::with_capacity(count + 1);
    let is_out =
        |top: &[(i32, f32)], logit: f32| top.len() == count && top.last().is_none_or(|last| logit <= last.1);
    for ((tile, &max), first) in logits.chunks(SCORE_TILE).zip(maxima).zip((0..).step_by(SCORE_TILE)) {
        if is_out(&top, max) {
            continue;
        }
        for (id, &logit) in (first..).zip(tile) {
            if !is_out(&top, logit) {
                let place = top.partition_point(|other| other.1 >= logit);
                top.insert(place, (id, logit));
                top.truncate(count);
            }
        }
    }
    top
}

#[cfg(test)]
mod tests {
    #![expect(clippy::cast_possible_wrap, reason = "small numbers")]
    use super::*;
    use crate::cpu::isa::Isa;

    fn score(isa: Isa, logits: &[f32], wanted: Wanted) -> Scores {
        isa.dispatch(ScoreRow { logits, wanted })
    }

    #[test]
    fn scores_follow_the_definition_on_every_instruction_set() {
        for len in [1, 16, 50, 256, 1000] {
            let logits: Vec<f32> = (0..len).map(|i| ((i * 7919) % 101) as f32 * 0.25 - 9.0).collect();
            let mut order: Vec<usize> = (0..len).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            let portable = score(Isa::Portable, &logits, Wanted::Top(5));
            for isa in Isa::available() {
                let scores = score(isa, &logits, Wanted::Top(5));
                assert_eq!(scores, portable);
                assert!(scores.is_finite);
                assert_eq!(scores.best_id, order[0] as i32);
                assert_eq!(scores.best_logit.to_bits(), logits[order[0]].to_bits());
                assert!((f64::from(scores.logsumexp) - sum.ln()).abs() < 1e-5);
                let expected: Vec<_> = order.iter().take(5).map(|&id| (id as i32, logits[id])).collect();
                assert_eq!(scores.top, expected);
                assert!(score(isa, &logits, Wanted::Top(0)).top.is_empty());
            }
        }
    }

    #[test]
    fn one_number_that_is_not_finite_is_seen_anywhere() {
        for isa in Isa::available() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for place in [0, 15, 16, 36] {
                    let mut logits = [1.0; 37];
                    logits[place] = bad;
                    assert!(!score(isa, &logits, Wanted::Best).is_finite, "{isa} {bad} {place}");
                }
            }
        }
    }
}
