"""How long a step will take, learnt from steps that have landed. Durations are given; it reads no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

# How much of what was learnt is left after each further step.
MEMORY = 0.97
# Weight of what was known before as against one observed step.
PRIOR_WEIGHT = 0.02
SWEEPS = 8
# After so many steps the coefficients are brought up to date with every so many further ones only.
NUM_FIRST_STEPS = 16
STEPS_PER_FIT = 8
# A step that took longer than predicted makes the predictions longer by as much at once; they come
# back by this part of the difference per step.
RELAX = 0.15
# Tokens from which on each further one may cost more than before: as long as a step is bound by
# reading the weights, they are nearly free.
KNEES = (64, 192)
# Scales that make the model's columns of one order.
PER_TOKEN, PER_WORK = 1 / 256, 1 / (1 << 20)
# Halvings in the search for the longest chunk, whose last is shorter than a block of any size.
MAX_CHUNK, HALVINGS = 1 << 16, 13
MAX_SLOWDOWN = 16.0


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a step decides how long it takes.

    num_tokens:     tokens computed.
    num_samples:    rows that get a token.
    decode_context: positions read by rows with one token, all together.
    prefill_work:   query times key positions of all other rows.
    """

    num_tokens: int = 0
    num_samples: int = 0
    decode_context: int = 0
    prefill_work: float = 0.0

    def columns(self) -> tuple[float, ...]:
        """The factors of the model's coefficients, scaled to be of one order."""
        return (
            1.0,
            self.num_tokens * PER_TOKEN,
            *[max(0, self.num_tokens - knee) * PER_TOKEN for knee in KNEES],
            self.num_samples / 64,
            self.decode_context / 65_536,
            self.prefill_work * PER_WORK,
        )


NUM_COEFFICIENTS = len(StepShape().columns())


class StepTimePredictor:
    """Seconds as a constant plus non-negative multiples of what a step holds, convex in its tokens.

    Least squares with exponential forgetting over the observed steps, kept non-negative by
    coordinate descent, drawn towards the last coefficients where the data say nothing. A machine
    that turns slower is believed at once (see RELAX), one that turns faster by and by.
    """

    def __init__(self) -> None:
        self._gram = np.zeros((NUM_COEFFICIENTS, NUM_COEFFICIENTS))
        self._moment = np.zeros(NUM_COEFFICIENTS)
        self._coefficients = [0.0] * NUM_COEFFICIENTS
        self._slowdown = 1.0
        self.num_observed = 0

    def observe(self, shape: StepShape, elapsed_s: float) -> None:
        """A step of this shape took so long. What is not longer than nothing is no measurement."""
        if not 0.0 < elapsed_s < float("inf"):
            return
        if self.num_observed:
            ratio = min(elapsed_s / max(self._fit(shape), 1e-9), MAX_SLOWDOWN)
            if ratio > self._slowdown:
                self._slowdown = ratio
            else:
                self._slowdown += RELAX * (max(ratio, 1.0) - self._slowdown)
        # Relative errors count: a long step must not outweigh ten short ones.
        columns = np.array(shape.columns()) / elapsed_s
        self._gram *= MEMORY
        self._gram += columns[:, None] * columns
        self._moment *= MEMORY
        self._moment += columns
        self.num_observed += 1
        if self.num_observed <= NUM_FIRST_STEPS or self.num_observed % STEPS_PER_FIT == 0:
            self._solve()

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape should take; 0 while nothing is known."""
        return self._slowdown * self._fit(shape)

    def most_tokens(self, base: StepShape, context: int, limit_s: float) -> int:
        """Tokens of a prompt, from position `context` on, that fit beside `base` into `limit_s`."""
        # `predict` of base and a chunk, with what does not depend on the chunk taken out of the search.
        constant = self._fit(replace(base, num_tokens=0))
        per_token, *per_token_beyond = self._coefficients[1 : 2 + len(KNEES)]
        per_work = self._coefficients[-1] * PER_WORK
        limit = limit_s / self._slowdown - constant
        low, high = 0, MAX_CHUNK
        for _ in range(HALVINGS):
            chunk = (low + high) // 2
            tokens = base.num_tokens + chunk
            seconds = per_token * tokens * PER_TOKEN + per_work * chunk * (context + chunk / 2)
            for coefficient, knee in zip(per_token_beyond, KNEES, strict=True):
                if tokens > knee:
                    seconds += coefficient * (tokens - knee) * PER_TOKEN
            if seconds <= limit:
                low = chunk
            else:
                high = chunk
        return low

    def _fit(self, shape: StepShape) -> float:
        return sum(c * x for c, x in zip(self._coefficients, shape.columns(), strict=True))

    def _solve(self) -> None:
        gram, moment, coefficients = self._gram.tolist(), self._moment.tolist(), self._coefficients
        before = list(coefficients)
        for _ in range(SWEEPS):
            for index, row in enumerate(gram):
                pull = PRIOR_WEIGHT * max(row[index], 1e-12) if self.num_observed > 1 else 0.0
                others = (
                    sum(a * c for a, c in zip(row, coefficients, strict=True))
                    - row[index] * coefficients[index]
                )
                scale = row[index] + pull
                if scale > 0:
                    coefficients[index] = max(0.0, (moment[index] - others + pull * before[index]) / scale)
