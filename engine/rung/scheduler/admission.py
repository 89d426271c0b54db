"""How much KV memory a request is taken to need in all, before it is let in."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rung.request import Request

# Answers remembered, and the length taken for an answer before any has ended.
NUM_REMEMBERED = 256
PRIOR_OUTPUT_TOKENS = 256
PRIOR_COUNT = 4


class AdmissionPolicy(Protocol):
    """Plans the room of a request; the scheduler lets in whatever fits beside the plans of those that run.

    over_commit: plans may together exceed the memory by this factor.
    headroom:    tokens that a row which has outgrown its plan is taken to need next.
    """

    @property
    def over_commit(self) -> float: ...

    @property
    def headroom(self) -> int: ...

    def planned_tokens(self, request: Request, first_chunk: int) -> int:
        """Tokens, prompt included, for which the request is to have room. `first_chunk`: of it, now."""
        ...

    def observe(self, num_output_tokens: int) -> None:
        """An answer ended by itself at this length."""
        ...


class FirstChunkAdmission:
    """Whatever has room for its first chunk."""

    over_commit = 1.0
    headroom = 0

    def planned_tokens(self, request: Request, first_chunk: int) -> int:
        """See `AdmissionPolicy`."""
        del request
        return first_chunk

    def observe(self, num_output_tokens: int) -> None:
        """See `AdmissionPolicy`."""


class ReserveAllAdmission:
    """Room for the longest answer that a request may give, so that nothing is ever preempted."""

    over_commit = 1.0
    headroom = 0

    def planned_tokens(self, request: Request, first_chunk: int) -> int:
        """See `AdmissionPolicy`."""
        del first_chunk
        return request.max_total_tokens

    def observe(self, num_output_tokens: int) -> None:
        """See `AdmissionPolicy`."""


class ForecastAdmission:
    """The whole prompt and an answer as long as a quantile of those that have ended lately.

    A row that outgrows its forecast is taken to need one block more at a time.
    """

    def __init__(self, *, quantile: float, over_commit: float, block_size: int) -> None:
        self._quantile = quantile
        self._over_commit = over_commit
        self._headroom = block_size
        self._lengths: deque[int] = deque([PRIOR_OUTPUT_TOKENS] * PRIOR_COUNT, NUM_REMEMBERED)
        self._forecast: int | None = None

    @property
    def over_commit(self) -> float:
        """See `AdmissionPolicy`."""
        return self._over_commit

    @property
    def headroom(self) -> int:
        """See `AdmissionPolicy`."""
        return self._headroom

    def planned_tokens(self, request: Request, first_chunk: int) -> int:
        """See `AdmissionPolicy`."""
        del first_chunk
        if self._forecast is None:
            self._forecast = sorted(self._lengths)[int(self._quantile * (len(self._lengths) - 1))]
        answer = min(self._forecast, request.stopping.max_tokens)
        known = len(request.token_ids) + self._headroom
        return min(max(request.num_prompt_tokens + answer, known), request.max_total_tokens)

    def observe(self, num_output_tokens: int) -> None:
        """See `AdmissionPolicy`."""
        self._lengths.append(num_output_tokens)
        self._forecast = None
