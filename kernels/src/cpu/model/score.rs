//! What is made of one row of logits: an id, log-probabilities, the likeliest ids.

use super::draw::Draw;
use crate::cpu::isa::Kernel;
use crate::cpu::math;
use crate::cpu::simd::{LANES, Simd};

/// Logits that are looked at together.
pub(super) const TILE: usize = 256;

/// What a sampling row needs of its logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wanted {
    /// How its id is chosen.
    pub choice: Choice,
    /// How many of the likeliest ids are wanted with log-probabilities; None: no log-probabilities.
    pub num_top: Option<usize>,
}

/// How an id is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Choice {
    /// The likeliest, the lowest on ties.
    Best,
    /// At random.
    Draw(Draw),
    /// It is known already.
    Given(i32),
    /// Elsewhere, from all logits.
    Host,
}

/// What became of a sampling row's logits.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Scores {
    /// Whether all numbers were finite; if not, nothing else here means anything.
    pub is_finite: bool,
    /// The chosen id; 0 if the host chooses.
    pub id: i32,
    /// Its logit.
    pub logit: f32,
    /// Of a given id, its place among all: 1 is the likeliest, ties go to the lower id.
    pub rank: u32,
    /// ln of the sum of exp(logit) over the vocabulary, if log-probabilities are wanted.
    pub logsumexp: f32,
    /// The likeliest ids with their logits, as many as wanted: likeliest first, ties to the lower id.
    pub top: Vec<(i32, f32)>,
}

/// One row of logits, looked through once.
#[derive(Clone, Copy)]
pub(super) struct Logits<'a> {
    pub(super) values: &'a [f32],
    /// The largest of each tile.
    pub(super) maxima: &'a [f32],
}

/// Scores one row.
pub(super) struct ScoreRow<'a> {
    pub(super) logits: &'a [f32],
    pub(super) wanted: Wanted,
}

impl Kernel for ScoreRow<'_> {
    type Output = Scores;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Scores {
        let mut maxima = Vec::with_capacity(self.logits.len().div_ceil(TILE));
        let mut is_finite = true;
        for tile in self.logits.chunks(TILE) {
            let (max, tile_is_finite) = tile_max(s, tile);
            maxima.push(max);
            is_finite &= tile_is_finite;
        }
        let logits = Logits { values: self.logits, maxima: &maxima };
        let best = logits.top(1);
        let (Some(&best), true) = (best.first(), is_finite) else {
            return Scores::default();
        };
        let mut rank = 0;
        let (id, logit) = match self.wanted.choice {
            Choice::Best => best,
            Choice::Draw(draw) => draw.run(s, logits, best.1),
            Choice::Given(id) => {
                rank = logits.rank(id);
                (id, self.logits[id as usize])
            }
            Choice::Host => return Scores { is_finite, ..Scores::default() },
        };
        let (logsumexp, top) = match self.wanted.num_top {
            Some(count) => (logsumexp(s, self.logits, best.1), logits.top(count)),
            None => (0.0, Vec::new()),
        };
        Scores { is_finite, id, logit, rank, logsumexp, top }
    }
}

impl Logits<'_> {
    /// The `count` largest with their places, the largest first, ties to the lower place.
    pub(super) fn top(&self, count: usize) -> Vec<(i32, f32)> {
        let mut top: Vec<(i32, f32)> = Vec::with_capacity(count.min(self.values.len()) + 1);
        let is_out = |top: &[(i32, f32)], logit: f32| {
            top.len() == count && top.last().is_none_or(|last| logit <= last.1)
        };
        for ((tile, &max), first) in self.values.chunks(TILE).zip(self.maxima).zip((0..).step_by(TILE)) {
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

    /// The place of an id in `ranked`, counted from 1.
    fn rank(&self, id: i32) -> u32 {
        let (before, from) = self.values.split_at(id as usize);
        let logit = from[0];
        let larger = from.iter().filter(|&&other| other > logit).count();
        (1 + before.iter().filter(|&&other| other >= logit).count() + larger) as u32
    }

    /// All with their places, the largest first, ties to the lower place.
    pub(super) fn ranked(&self) -> Vec<(i32, f32)> {
        let mut ranked: Vec<(i32, f32)> = (0..).zip(self.values.iter().copied()).collect();
        ranked.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        ranked
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

#[cfg(test)]
mod tests {
    #![expect(clippy::cast_possible_wrap, reason = "small numbers")]
    use super::*;
    use crate::cpu::isa::Isa;

    fn score(isa: Isa, logits: &[f32], num_top: usize) -> Scores {
        let wanted = Wanted { choice: Choice::Best, num_top: Some(num_top) };
        isa.dispatch(ScoreRow { logits, wanted })
    }

    #[test]
    fn scores_follow_the_definition_on_every_instruction_set() {
        for len in [1, 16, 50, 256, 1000] {
            let logits: Vec<f32> = (0..len).map(|i| ((i * 7919) % 101) as f32 * 0.25 - 9.0).collect();
            let mut order: Vec<usize> = (0..len).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            let portable = score(Isa::Portable, &logits, 5);
            for isa in Isa::available() {
                let scores = score(isa, &logits, 5);
                assert_eq!(scores, portable);
                assert!(scores.is_finite);
                assert_eq!(scores.id, order[0] as i32);
                assert_eq!(scores.logit.to_bits(), logits[order[0]].to_bits());
                assert!((f64::from(scores.logsumexp) - sum.ln()).abs() < 1e-5);
                let expected: Vec<_> = order.iter().take(5).map(|&id| (id as i32, logits[id])).collect();
                assert_eq!(scores.top, expected);
                assert!(score(isa, &logits, 0).top.is_empty());
                for (place, &id) in order.iter().enumerate().step_by(7) {
                    let wanted = Wanted { choice: Choice::Given(id as i32), num_top: Some(2) };
                    let given = isa.dispatch(ScoreRow { logits: &logits, wanted });
                    assert_eq!((given.id, given.rank), (id as i32, place as u32 + 1));
                    assert_eq!(given.logit.to_bits(), logits[id].to_bits());
                    assert_eq!(given.top, expected.iter().take(2).copied().collect::<Vec<_>>());
                }
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
                    assert!(!score(isa, &logits, 0).is_finite, "{isa} {bad} {place}");
                }
            }
        }
    }
}
