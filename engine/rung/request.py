"""A request as the scheduler knows it: one sample, token ids and numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rung.errors import RequestError
    from rung.sampling.rules import TokenRules


class FinishReason(Enum):
    """Why a row ended; mirrors `FinishReason` of the protocol."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Ranges are checked where a request enters the engine.

    temperature: 0 is greedy, else logits are divided by it.
    top_k:       0 keeps all ids.
    top_p:       1.0 keeps all ids.
    seed:        u64; with `sample_index` and the position it fixes every random number.
    top_logprobs: None: no logprobs; n >= 0: the chosen token's and n alternatives.
    min_p:       ids less likely than this share of the likeliest are dropped; 0 keeps all.
    typical_p:   1.0 keeps all ids.
    rules:       on single ids; None: none that would change anything.
    prompt_top_logprobs: None: no logprobs of the prompt; n >= 0: of its ids from the second on, and n
                 alternatives for each.
    grammar:     of llguidance, in its JSON form, that the answer follows; None: free text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sample_index: int = 0
    top_logprobs: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    rules: TokenRules | None = None
    prompt_top_logprobs: int | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a row ends. `stop_token_ids` already includes the model's end-of-text ids unless
    the request ignores them; `max_tokens` is already clamped to the room in the context."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Request:
    """One sample's life in the scheduler. Only the scheduler changes it after `add`.

    request_id:     unique in the process, never negative.
    prompt_ids:     [num_prompt_tokens] int32.
    token_ids:      [num_prompt_tokens + answer] int32, prompt and answer so far. While the request
                    is admitted its state row runs ahead of this; preemption brings it up to date.
    row:            state row while admitted, stable until it ends or is preempted; else -1.
    queued_at_s:    when it was added, on the scheduler's own clock.
    scheduled_at_s: when it was first admitted; None before.
    started:        whether its `Started` event exists.

    priority:       higher starts first and is preempted last.
    deadline_s:     how long it may wait for its first step; None: as long as it takes.
    cache_salt:     KV is shared only between requests of one salt.
    group_id:       samples of one prompt share this number, and the prompt's KV; -1: no siblings.
    arrival:        counts requests in the order of `add`.
    block_names:    names of its first blocks in the prefix cache, as many as were needed so far.
    num_found:      how many of them its last look-up found.
    num_cached:     prompt tokens whose KV it took over when it was first admitted.
    num_lost:       tokens whose KV it had when it was preempted.
    num_scored:     prompt ids whose logprobs have been delivered; they stay so when it is preempted.
    """

    request_id: int
    prompt_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    stopping: StoppingParams
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: bytes = b""
    group_id: int = -1
    token_ids: npt.NDArray[np.int32] = field(init=False)
    row: int = field(default=-1, init=False)
    queued_at_s: float = field(default=0.0, init=False)
    scheduled_at_s: float | None = field(default=None, init=False)
    started: bool = field(default=False, init=False)
    arrival: int = field(default=-1, init=False)
    block_names: list[bytes] = field(default_factory=list, init=False)
    num_found: int = field(default=0, init=False)
    num_cached: int = field(default=0, init=False)
    num_lost: int = field(default=0, init=False)
    num_scored: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.token_ids = self.prompt_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def reads_cache(self) -> bool:
        """Whether KV that others computed will do for its prompt: not while logprobs of it are due."""
        return self.sampling.prompt_top_logprobs is None or self.num_scored >= self.num_prompt_tokens - 1

    @property
    def max_total_tokens(self) -> int:
        """Prompt and longest answer together."""
        return len(self.prompt_ids) + self.stopping.max_tokens


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of an accepted request."""

    request_id: int
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    stop_token_id: int | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """Sent once, with a request's first token or before its terminal event if it was scheduled.
    Durations in seconds, as accumulated from `commit(elapsed)`."""

    request_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
