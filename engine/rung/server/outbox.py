"""What a session has still to be told: filled by the engine loop, emptied by the session's writer.

Columns in, columns out; steps that wait for a slow reader merge per row. No protobuf, no asyncio.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rung.engine import StepTiming
from rung.server.prompts import PromptBatch, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rung.errors import RequestError
    from rung.request import Finished, Started
    from rung.scheduler.batch import LogprobRow, PromptLogprobs, StepEvents

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

INITIAL_TOKENS = 512
HANDLE_BITS = 32
HANDLE_MASK = (1 << HANDLE_BITS) - 1
NO_STEP = StepTiming(0, 0, 0, 0, 0, 0)


def request_id(session_number: int, handle: int) -> int:
    """The engine's name for a session's row: no table is needed to find the way back."""
    return session_number << HANDLE_BITS | handle


@dataclass(frozen=True, slots=True)
class LogprobBatch:
    """Logprobs of the rows that asked; columns over their tokens, in the order of the rows.

    handles [A] u32; chosen [L] f32; top_counts [L] u32; top_ids, top_logprobs [sum(top_counts)].
    """

    handles: U32
    chosen: F32
    top_counts: U32
    top_ids: U32
    top_logprobs: F32


@dataclass(frozen=True, slots=True)
class Delivery:
    """Everything new since the last one. A handle stands in at most one row.

    handles, token_counts [R] u32; token_ids [sum(token_counts)] u32, row after row.
    prompts: to be told before the tokens, one after the other.
    """

    handles: U32
    token_counts: U32
    token_ids: U32
    logprobs: LogprobBatch | None
    started: tuple[Started, ...]
    finished: tuple[Finished, ...]
    rejected: tuple[Rejection, ...]
    prompts: tuple[PromptBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejection:
    """A Submit that was not accepted: all its handles."""

    handles: tuple[int, ...]
    error: RequestError


@dataclass(slots=True)
class _Pending:
    """Tokens in order of arrival; the columns are valid up to `size` and double when full."""

    handles: U32 = field(default_factory=lambda: np.empty(INITIAL_TOKENS, dtype=np.uint32))
    token_ids: U32 = field(default_factory=lambda: np.empty(INITIAL_TOKENS, dtype=np.uint32))
    size: int = 0
    num_steps: int = 0
    logprobs: list[tuple[int, LogprobRow]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    prompts: list[tuple[int, PromptLogprobs]] = field(default_factory=list)

    def append(self, handles: U32, token_ids: npt.NDArray[np.int32]) -> None:
        size = self.size + len(handles)
        if size > len(self.handles):
            capacity = max(size, 2 * len(self.handles))
            room: U32 = np.empty(capacity - self.size, dtype=np.uint32)
            self.handles = np.concatenate([self.handles[: self.size], room])
            self.token_ids = np.concatenate([self.token_ids[: self.size], room])
        self.handles[self.size : size] = handles
        self.token_ids[self.size : size] = token_ids
        self.size = size
        self.num_steps += 1


class Outbox:
    """One session's pending events. Bounded by what its open requests may generate.

    `wake` is called from the pushing thread, once for all pushes between two `take`s.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._pending = _Pending()
        self._signalled = False

    def push(
        self,
        handles: U32,
        token_ids: npt.NDArray[np.int32],
        logprobs: Sequence[tuple[int, LogprobRow]],
        started: Sequence[Started],
        finished: Sequence[Finished],
        prompts: Sequence[tuple[int, PromptLogprobs]] = (),
    ) -> None:
        """Adds what one step did for this session: at most one token per row.

        handles, token_ids: [K]; logprobs: (index in 0..K, row), ascending; prompts: (handle, part).
        """
        with self._lock:
            pending = self._pending
            if logprobs:
                pending.logprobs.extend((pending.size + index, row) for index, row in logprobs)
            if len(handles):
                pending.append(handles, token_ids)
            pending.started.extend(started)
            pending.finished.extend(finished)
            pending.prompts.extend(prompts)
            wake = not self._signalled
            self._signalled = True
        if wake:
            self._wake()

    def reject(self, rejection: Rejection) -> None:
        """Adds the answer to a Submit that was not accepted."""
        with self._lock:
            self._pending.rejected.append(rejection)
            wake = not self._signalled
            self._signalled = True
        if wake:
            self._wake()

    def nudge(self) -> None:
        """Wakes the writer without news: the engine's state has changed."""
        with self._lock:
            wake = not self._signalled
            self._signalled = True
        if wake:
            self._wake()

    @property
    def num_rejected(self) -> int:
        """Rejections that wait to be taken."""
        return len(self._pending.rejected)

    def take(self) -> Delivery:
        """Everything pushed since the last call, merged per row; empty when nothing was."""
        with self._lock:
            pending = self._pending
            self._pending = _Pending()
            self._signalled = False
        return _merge(pending)


def _merge(pending: _Pending) -> Delivery:
    handles = pending.handles[: pending.size]
    token_ids = pending.token_ids[: pending.size]
    counts = np.ones(pending.size, dtype=np.uint32)
    order: npt.NDArray[np.intp] | None = None
    rows = handles
    if pending.num_steps > 1:
        order = np.argsort(handles, kind="stable")
        handles = handles[order]
        token_ids = token_ids[order]
        edges = np.flatnonzero(np.concatenate(([True], handles[1:] != handles[:-1], [True])))
        rows = handles[edges[:-1]]
        counts = np.diff(edges).astype(np.uint32)
    return Delivery(
        handles=rows,
        token_counts=counts,
        token_ids=token_ids,
        logprobs=_merge_logprobs(pending, order) if pending.logprobs else None,
        started=tuple(pending.started),
        finished=tuple(pending.finished),
        rejected=tuple(pending.rejected),
        prompts=batches(pending.prompts),
    )


def _merge_logprobs(pending: _Pending, order: npt.NDArray[np.intp] | None) -> LogprobBatch:
    entries = pending.logprobs
    if order is not None:
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        entries = sorted(entries, key=lambda entry: rank[entry[0]])
    token_handles = pending.handles[np.fromiter((position for position, _ in entries), np.intp, len(entries))]
    first = np.concatenate(([True], token_handles[1:] != token_handles[:-1]))
    rows = [row for _, row in entries]
    return LogprobBatch(
        handles=token_handles[first],
        chosen=np.array([row.chosen for row in rows], dtype=np.float32),
        top_counts=np.array([len(row.top_ids) for row in rows], dtype=np.uint32),
        top_ids=np.concatenate([row.top_ids for row in rows]).astype(np.uint32),
        top_logprobs=np.concatenate([row.top_logprobs for row in rows]).astype(np.float32),
    )


class Publisher:
    """Splits the loop's events by session. Events of sessions that are gone are counted, not kept.

    timing: of the last step published.
    """

    def __init__(self) -> None:
        self._outboxes: dict[int, Outbox] = {}
        self.num_dropped_rows = 0
        self.timing = NO_STEP

    def add(self, session_number: int, outbox: Outbox) -> None:
        """Starts delivering to a session."""
        self._outboxes[session_number] = outbox

    def remove(self, session_number: int) -> None:
        """Stops; events that come later are dropped."""
        self._outboxes.pop(session_number, None)

    def publish(self, events: StepEvents, timing: StepTiming) -> None:
        """Hands each session its part of a step. Called on the loop thread."""
        self.timing = timing
        for session_number, part in _split(events):
            outbox = self._outboxes.get(session_number)
            if outbox is None:
                self.num_dropped_rows += len(part.handles) + len(part.finished)
                continue
            outbox.push(
                part.handles, part.token_ids, part.logprobs, part.started, part.finished, part.prompts
            )
        if events.finished:
            # Perhaps the engine is idle now; the other sessions learn that at once too.
            for outbox in tuple(self._outboxes.values()):
                outbox.nudge()

    def reject(self, request_ids: Sequence[int], error: RequestError) -> None:
        """Answers a Submit that the scheduler did not accept."""
        outbox = self._outboxes.get(request_ids[0] >> HANDLE_BITS)
        if outbox is None:
            self.num_dropped_rows += len(request_ids)
            return
        outbox.reject(Rejection(tuple(request_id & HANDLE_MASK for request_id in request_ids), error))


@dataclass(slots=True)
class _Part:
    handles: U32
    token_ids: npt.NDArray[np.int32]
    logprobs: Sequence[tuple[int, LogprobRow]] = ()
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    prompts: list[tuple[int, PromptLogprobs]] = field(default_factory=list)


_NO_HANDLES: U32 = np.empty(0, dtype=np.uint32)
_NO_TOKENS: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)


def _split(events: StepEvents) -> Iterator[tuple[int, _Part]]:
    parts = _split_columns(events)
    for started in events.started:
        _part_of(parts, started.request_id).started.append(started)
    for row_id, logprobs in events.prompts:
        _part_of(parts, row_id).prompts.append((row_id & HANDLE_MASK, logprobs))
    for finished in events.finished:
        _part_of(parts, finished.request_id).finished.append(finished)
    return iter(parts.items())


def _part_of(parts: dict[int, _Part], row_id: int) -> _Part:
    session_number = row_id >> HANDLE_BITS
    part = parts.get(session_number)
    if part is None:
        part = parts[session_number] = _Part(_NO_HANDLES, _NO_TOKENS)
    return part


def _split_columns(events: StepEvents) -> dict[int, _Part]:
    if not len(events.request_ids):
        return {}
    handles = (events.request_ids & HANDLE_MASK).astype(np.uint32)
    sessions = events.request_ids >> HANDLE_BITS
    first = int(sessions[0])
    if (sessions == first).all():
        # One frontend is the common case: the columns go through whole.
        return {first: _Part(handles, events.token_ids, sorted(events.logprobs.items(), key=_index))}
    parts = {}
    for session_number in np.unique(sessions):
        mine = np.flatnonzero(sessions == session_number)
        logprobs = (
            [
                (index, events.logprobs[position])
                for index, position in enumerate(mine.tolist())
                if position in events.logprobs
            ]
            if events.logprobs
            else []
        )
        parts[int(session_number)] = _Part(handles[mine], events.token_ids[mine], logprobs)
    return parts


def _index(entry: tuple[int, LogprobRow]) -> int:
    return entry[0]
