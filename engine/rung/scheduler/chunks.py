"""How many tokens of prompts a step may hold besides the rows that get their next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rung.scheduler.predictor import StepShape, StepTimePredictor

MIN_CHUNK_TOKENS = 32
# Of the step's token budget, which prompts get however long the step is without them.
FLOOR_SHARE = 1 / 32
MAX_GROWTH = 1.25


class ChunkPolicy(Protocol):
    """Bounds the prompts' part of each step."""

    def limit(self, decodes: StepShape, context: int, room: int) -> int:
        """Tokens of prompts in the next step, at most `room`.

        decodes: the step without them. context: position of the first of them.
        """
        ...


@dataclass(slots=True)
class FixedChunks:
    """The same number in every step, the rows that get their next token included."""

    step_tokens: int

    def limit(self, decodes: StepShape, context: int, room: int) -> int:
        """See `ChunkPolicy`."""
        del context
        return max(0, min(room, self.step_tokens - decodes.num_tokens))


class LatencyChunks:
    """As many as keep the predicted step within the target for the time between two tokens.

    The chunk shrinks at once and grows slowly, so that one lucky step does not make the next one
    long; it is whole blocks and never less than a floor, so that prompts get on however slow the
    machine is. Without a row that waits for its next token there is nothing to keep.
    """

    def __init__(
        self, predictor: StepTimePredictor, *, target_s: float, block_size: int, step_tokens: int
    ) -> None:
        self._predictor = predictor
        self._target_s = target_s
        self._block_size = block_size
        floor = max(MIN_CHUNK_TOKENS, int(FLOOR_SHARE * step_tokens))
        self._floor = -(-floor // block_size) * block_size
        self._last: int | None = None

    def limit(self, decodes: StepShape, context: int, room: int) -> int:
        """See `ChunkPolicy`."""
        if decodes.num_tokens == 0:
            return room
        if self._predictor.num_observed == 0:
            self._last = self._floor
            return min(self._floor, room)
        most = self._predictor.most_tokens(decodes, context, self._target_s)
        if self._last is not None:
            most = min(most, max(int(MAX_GROWTH * self._last), self._last + self._block_size))
        self._last = max(most // self._block_size * self._block_size, self._floor)
        return min(self._last, room)
