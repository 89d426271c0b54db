"""How long a step will take, learnt from steps that have landed. Durations are given; it reads no clock."""

from __future__ import annotations

from dataclasses import dataclass

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
            self.num_tokens / 256,
            self.num_samples / 64,
            self.decode_context / 65_536,
            self.prefill_work / 1_048_576,
        )


NUM_COEFFICIENTS = len(StepShape().columns())


class StepTimePredictor:
    """Seconds as a constant plus non-negative multiples of what a step holds.

    Least squares with exponential forgetting over the observed steps, kept non-negative by
    coordinate descent, drawn towards the last coefficients where the data say nothing. A machine
    that turns slower is believed at once (see RELAX), one that turns faster by and by.
    """

    def __init__(self) -> None:
        n = NUM_COEFFICIENTS
        self._gram = [[0.0] * n for _ in range(n)]
        self._moment = [0.0] * n
        self._coefficients = [0.0] * n
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
        columns = shape.columns()
        # Relative errors count: a long step must not outweigh ten short ones.
        weight = 1.0 / elapsed_s**2
        for row, left in zip(self._gram, columns, strict=True):
            for index, right in enumerate(columns):
                row[index] = MEMORY * row[index] + weight * left * right
        for index, left in enumerate(columns):
            self._moment[index] = MEMORY * self._moment[index] + weight * left * elapsed_s
        self.num_observed += 1
        if self.num_observed <= NUM_FIRST_STEPS or self.num_observed % STEPS_PER_FIT == 0:
            self._solve()

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape should take; 0 while nothing is known."""
        return self._slowdown * self._fit(shape)

    def most_tokens(self, base: StepShape, context: int, limit_s: float) -> int:
        """Tokens of a prompt, from position `context` on, that fit beside `base` into `limit_s`."""
        left_s = limit_s - self.predict(base)
        if left_s <= 0:
            return 0
        one = StepShape(num_tokens=1, prefill_work=context)
        square = StepShape(prefill_work=1)
        constant_s = self._fit(StepShape())
        per_token_s = self._slowdown * (self._fit(one) - constant_s)
        per_square_s = self._slowdown * (self._fit(square) - constant_s) / 2
        if per_square_s <= 0:
            return int(left_s / per_token_s) if per_token_s > 0 else 1 << 30
        root = (per_token_s**2 + 4 * per_square_s * left_s) ** 0.5
        return int((root - per_token_s) / (2 * per_square_s))

    def _fit(self, shape: StepShape) -> float:
        return sum(c * x for c, x in zip(self._coefficients, shape.columns(), strict=True))

    def _solve(self) -> None:
        gram, moment, coefficients = self._gram, self._moment, self._coefficients
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
