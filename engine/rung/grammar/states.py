"""Where each running request stands in its grammar, and the tokens that this allows next.

A state is found again by request id, so it outlives preemption, and siblings of one prompt have one
each. Tokens are fed to a matcher when its next mask is wanted, on the thread that computes masks.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from rung.errors import ErrorCode, RequestError
from rung.grammar.compiler import plain
from rung.scheduler.batch import TokenMasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llguidance import LLMatcher

    from rung.engine import StepTiming
    from rung.grammar.compiler import CompiledGrammar
    from rung.request import Request
    from rung.scheduler.batch import StepEvents, StepPlan

MAX_THREADS = 4


@dataclass(slots=True)
class _State:
    """matcher: has been fed `answer_ids[:num_fed]`; None before its first use."""

    grammar: CompiledGrammar
    num_prompt_tokens: int
    answer_ids: list[int] = field(default_factory=list)
    matcher: LLMatcher | None = None
    num_fed: int = 0


@dataclass(frozen=True, slots=True)
class StepMasks:
    """What grammars say of one plan.

    failed: {index in 0..S: error} for rows whose grammar cannot go on
    """

    masks: TokenMasks | None
    failed: dict[int, RequestError]
    elapsed_ns: int


NO_MASKS = StepMasks(None, {}, 0)


class GrammarStates:
    """States of the requests that have a grammar, from `add` until `forget`. Any thread may call."""

    def __init__(self, vocab_size: int) -> None:
        self._width = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._states: dict[int, _State] = {}
        self._executor = LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 1)))

    def __len__(self) -> int:
        return len(self._states)

    def add(self, requests: Iterable[Request], grammar: CompiledGrammar) -> None:
        """These requests follow `grammar` from now on."""
        with self._lock:
            for request in requests:
                self._states[request.request_id] = _State(grammar, request.num_prompt_tokens)

    def forget(self, request_ids: Iterable[int]) -> None:
        """These requests have ended, or never came to run; unknown ids are ignored."""
        with self._lock:
            for request_id in request_ids:
                self._states.pop(request_id, None)

    def forgetting_ended(
        self, on_events: Callable[[StepEvents, StepTiming], None]
    ) -> Callable[[StepEvents, StepTiming], None]:
        """`on_events` for an engine, after which what has ended is forgotten."""

        def publish(events: StepEvents, timing: StepTiming) -> None:
            on_events(events, timing)
            if events.finished:
                self.forget(finished.request_id for finished in events.finished)

        return publish

    def forgetting_rejected(
        self, on_rejected: Callable[[Sequence[int], RequestError], None]
    ) -> Callable[[Sequence[int], RequestError], None]:
        """`on_rejected` for an engine, likewise."""

        def reject(request_ids: Sequence[int], error: RequestError) -> None:
            self.forget(request_ids)
            on_rejected(request_ids, error)

        return reject

    def has_rows(self, plan: StepPlan) -> bool:
        """Whether a sampling row of the plan follows a grammar."""
        return bool(self._states) and bool(self._rows(plan))

    def masks(self, plan: StepPlan) -> StepMasks:
        """Which tokens each sampling row may choose next, by its grammar."""
        rows = self._rows(plan)
        if not rows:
            return NO_MASKS
        start_ns = time.perf_counter_ns()
        bits = np.full((len(rows), self._width), -1, dtype=np.int32)
        failed: dict[int, RequestError] = {}
        ready: list[tuple[LLMatcher, int]] = []
        for place, (index, state) in enumerate(rows):
            num_answered = int(plan.sampling.position[index]) - state.num_prompt_tokens
            try:
                ready.append((_advanced(state, num_answered), place))
            except RequestError as error:
                failed[index] = error
        if ready:
            fill_next_token_bitmask_par(self._executor, ready, bits)
        for matcher, place in ready:
            if matcher.is_error():
                failed[rows[place][0]] = _failure(matcher)
        masks = TokenMasks(np.array([index for index, _ in rows], dtype=np.int64), bits.view(np.uint32))
        return StepMasks(masks, failed, time.perf_counter_ns() - start_ns)

    def take_tokens(self, plan: StepPlan, token_ids: Sequence[int]) -> None:
        """Note what was chosen for the plan's sampling rows: [S]."""
        for index, state in self._rows(plan):
            num_answered = int(plan.sampling.position[index]) - state.num_prompt_tokens
            del state.answer_ids[num_answered:]
            state.answer_ids.append(int(token_ids[index]))

    def _rows(self, plan: StepPlan) -> list[tuple[int, _State]]:
        """Sampling rows with a grammar, by rising index."""
        if not self._states:
            return []
        with self._lock:
            found = map(self._states.get, plan.request_ids[plan.sample_rows].tolist())
            return [(index, state) for index, state in enumerate(found) if state is not None]


def _advanced(state: _State, num_answered: int) -> LLMatcher:
    """The state's matcher after the first `num_answered` tokens of the answer."""
    if num_answered > len(state.answer_ids):
        raise RequestError(
            ErrorCode.INTERNAL,
            f"The engine lost {num_answered - len(state.answer_ids)} tokens of this answer, so its grammar "
            "cannot be followed; try again.",
        )
    matcher = state.matcher
    if matcher is None or state.num_fed > num_answered:
        # New, or the answer was taken back: from the beginning is always right.
        matcher = state.matcher = state.grammar.start()
        state.num_fed = 0
    fresh = state.answer_ids[state.num_fed : num_answered]
    if fresh and not matcher.consume_tokens(fresh):
        raise _failure(matcher)
    state.num_fed = num_answered
    return matcher


def _failure(matcher: LLMatcher) -> RequestError:
    return RequestError(
        ErrorCode.INVALID_ARGUMENT,
        f"The answer cannot go on by its grammar: {plain(matcher.get_error())}; use a simpler grammar.",
    )
