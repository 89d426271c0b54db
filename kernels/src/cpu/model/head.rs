//! The output head: logits of the rows that sample or are scored, and what is wanted of them.
#![expect(unsafe_code, reason = "units write disjoint rows of one buffer")]

use std::ops::{Not, Range};
use std::time::Instant;

use super::forward::HEAD;
use super::rows::{Norm, NormRow};
use super::score::{Choice, ScoreRow, Scores, Wanted};
use super::{Context, Model, ModelError, matrix, vector};
use crate::cpu::linear::{Input, Output, Projection, project};
use crate::cpu::pool::PoolError;
use crate::cpu::quantize::QuantizedRows;
use crate::cpu::shared::SharedSlice;

/// Rows whose logits exist at once, so that many rows of a large vocabulary take little memory.
const TILE_ROWS: usize = 64;

/// The head's input of the rows that sample, then of the tokens that are scored.
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
    /// Keep the rows of `x` that get logits, after the norm if there is one.
    pub(super) fn keep_head_rows(&mut self, x: usize, norm: Option<(usize, f32)>, weight: usize) {
        let width = matrix(&self.weights, weight).num_inputs();
        let x = self.buffers[x].float();
        self.head.matrix = Some(weight);
        for &token in self.tokens.last_tokens.iter().chain(&self.tokens.scored_tokens) {
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
    /// of the rows whose ids the host chooses are appended to `all_logits`, `[vocab_size]` each.
    pub fn sample(
        &mut self,
        wanted: &[Wanted],
        all_logits: &mut Vec<f32>,
    ) -> Result<Vec<Scores>, ModelError> {
        let sampling = 0..self.tokens.last_tokens.len();
        self.time_head(sampling, wanted, all_logits)
    }

    /// Run the head for the scored tokens of the last `forward`: how likely each of `target_ids`
    /// is there, its rank, and the `num_top` likeliest.
    pub fn score_targets(
        &mut self,
        target_ids: &[i32],
        num_top: &[usize],
    ) -> Result<Vec<Scores>, ModelError> {
        let outside = target_ids
            .iter()
            .find(|&&id| usize::try_from(id).is_ok_and(|id| id < self.settings.vocab_size).not());
        if let Some(id) = outside {
            return Err(ModelError::Settings(format!("target id {id} is outside the vocabulary")));
        }
        let wanted: Vec<Wanted> = target_ids
            .iter()
            .zip(num_top)
            .map(|(&id, &count)| Wanted { choice: Choice::Given(id), num_top: Some(count) })
            .collect();
        let first = self.tokens.last_tokens.len();
        let scored = first..first + self.tokens.scored_tokens.len();
        self.time_head(scored, &wanted, &mut Vec::new())
    }

    fn time_head(
        &mut self,
        rows: Range<usize>,
        wanted: &[Wanted],
        all_logits: &mut Vec<f32>,
    ) -> Result<Vec<Scores>, ModelError> {
        let start = Instant::now();
        let mut head = std::mem::take(&mut self.head);
        let result = self.run_head(&mut head, rows, wanted, all_logits);
        self.head = head;
        self.times[HEAD] += start.elapsed().as_nanos() as u64;
        result
    }

    fn run_head(
        &self,
        head: &mut Head,
        range: Range<usize>,
        wanted: &[Wanted],
        all_logits: &mut Vec<f32>,
    ) -> Result<Vec<Scores>, ModelError> {
        // A step that failed has kept fewer rows than it was to.
        if wanted.len() != range.len() || head.finite.len() < range.end {
            return Err(ModelError::Settings(format!(
                "{} rows to sample and {} in the last step",
                wanted.len(),
                range.len().min(head.finite.len())
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
            let rows = &head.rows[(range.start + tile.start) * width..(range.start + tile.end) * width];
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
                scores[row].is_finite &= head.finite[range.start + row];
                if wanted[row].choice == Choice::Host {
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
