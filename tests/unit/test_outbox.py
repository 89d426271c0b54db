"""Merging, splitting by session, and the bound of the outbox, against a plain per-token model."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import ErrorCode, RequestError
from rung.request import Finished, FinishReason, Started
from rung.scheduler.batch import LogprobRow, StepEvents
from rung.server.outbox import NO_STEP, Delivery, Outbox, Publisher, Rejection, request_id

if TYPE_CHECKING:
    from collections.abc import Sequence

# One step of one session: handle -> (token, alternatives or None).
Rows = dict[int, tuple[int, int | None]]


def logprob_row(token: int, count: int) -> LogprobRow:
    return LogprobRow(
        chosen=-float(token % 1000),
        top_ids=np.arange(token, token + count, dtype=np.int32),
        top_logprobs=-np.arange(count, dtype=np.float32),
    )


def step_events(rows: dict[int, tuple[int, int | None]], **terminal: Sequence[object]) -> StepEvents:
    ids = list(rows)
    return StepEvents(
        request_ids=np.array(ids, dtype=np.int64),
        token_ids=np.array([rows[i][0] for i in ids], dtype=np.int32),
        logprobs={
            index: logprob_row(rows[i][0], count)
            for index, i in enumerate(ids)
            if (count := rows[i][1]) is not None
        },
        started=tuple(terminal.get("started", ())),  # type: ignore[arg-type]
        finished=tuple(terminal.get("finished", ())),  # type: ignore[arg-type]
    )


def read(delivery: Delivery) -> dict[int, list[tuple[int, int | None]]]:
    """A delivery as lists of (token, alternatives) per handle; checks the columns on the way."""
    handles = delivery.handles.tolist()
    counts = delivery.token_counts.tolist()
    tokens = delivery.token_ids.tolist()
    assert len(set(handles)) == len(handles) == len(counts)
    assert all(count > 0 for count in counts)
    assert sum(counts) == len(tokens)
    rows: dict[int, list[tuple[int, int | None]]] = {}
    for handle, count in zip(handles, counts, strict=True):
        rows[handle] = [(token, None) for token in tokens[:count]]
        tokens = tokens[count:]
    if delivery.logprobs is not None:
        columns = delivery.logprobs
        top_counts = columns.top_counts.tolist()
        top_ids = columns.top_ids.tolist()
        chosen = columns.chosen.tolist()
        assert columns.handles.tolist() == [h for h in handles if h in set(columns.handles.tolist())]
        for handle in columns.handles.tolist():
            for index, (token, _) in enumerate(rows[handle]):
                count = top_counts.pop(0)
                assert chosen.pop(0) == -float(token % 1000)
                assert top_ids[:count] == list(range(token, token + count))
                top_ids = top_ids[count:]
                rows[handle][index] = (token, count)
        assert not top_counts
        assert not top_ids
        assert len(columns.top_logprobs) == columns.top_counts.sum()
    return rows


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Rows, bool]]:
    """Steps with at most one token per row, and whether the reader takes after each. Whether a
    row has logprobs is the row's own constant, as in a request."""
    top_n = draw(st.dictionaries(st.integers(0, 5), st.none() | st.integers(0, 3), max_size=6))
    step = st.dictionaries(st.sampled_from([*top_n, 0xFFFFFFFF]), st.integers(0, 2**31 - 4))
    history = draw(st.lists(st.tuples(step, st.booleans()), max_size=20))
    return [
        ({handle: (token, top_n.get(handle)) for handle, token in rows.items()}, take)
        for rows, take in history
    ]


@given(histories())
def test_taking_at_any_time_gives_every_token_once_and_in_order(history: list[tuple[Rows, bool]]) -> None:
    publisher = Publisher()
    outbox = Outbox(lambda: None)
    publisher.add(3, outbox)
    expected: dict[int, list[tuple[int, int | None]]] = defaultdict(list)
    got: dict[int, list[tuple[int, int | None]]] = defaultdict(list)
    for rows, take in [*history, ({}, True)]:
        publisher.publish(step_events({request_id(3, h): row for h, row in rows.items()}), NO_STEP)
        for handle, row in rows.items():
            expected[handle].append(row)
        if take:
            for handle, new in read(outbox.take()).items():
                got[handle] += new
    assert got == expected


@given(st.lists(st.dictionaries(st.tuples(st.integers(1, 3), st.integers(0, 9)), st.integers(0, 99))))
def test_each_session_gets_its_own_rows(steps: list[dict[tuple[int, int], int]]) -> None:
    publisher = Publisher()
    outboxes = {session: Outbox(lambda: None) for session in (1, 2)}
    for session, outbox in outboxes.items():
        publisher.add(session, outbox)
    expected: dict[int, dict[int, list[int]]] = {1: {}, 2: {}, 3: {}}
    for step in steps:
        rows = {request_id(*key): (token, key[1] if key[1] < 2 else None) for key, token in step.items()}
        publisher.publish(step_events(rows), NO_STEP)
        for (session, handle), token in step.items():
            expected[session].setdefault(handle, []).append(token)
    for session, outbox in outboxes.items():
        got = read(outbox.take())
        assert {handle: [token for token, _ in rows] for handle, rows in got.items()} == expected[session]
        assert all(
            (count == handle if handle < 2 else count is None) for handle in got for _, count in got[handle]
        )
    # Nobody listens to session 3.
    assert publisher.num_dropped_rows == sum(len(tokens) for tokens in expected[3].values())


def test_starts_and_ends_reach_their_session_with_their_tokens() -> None:
    publisher = Publisher()
    outboxes = {session: Outbox(lambda: None) for session in (1, 2)}
    for session, outbox in outboxes.items():
        publisher.add(session, outbox)
    started = [Started(request_id(session, 7), 3, 0, 0.1, 0.2) for session in (1, 2)]
    finished = [Finished(request_id(2, 7), FinishReason.LENGTH, 3, 1)]
    publisher.publish(step_events({request_id(2, 7): (5, None)}, started=started, finished=finished), NO_STEP)
    first, second = (outbox.take() for outbox in outboxes.values())
    assert (first.started, first.finished) == ((started[0],), ())
    assert (second.started, second.finished) == ((started[1],), (finished[0],))
    assert read(second) == {7: [(5, None)]}


def test_the_writer_is_woken_once_for_all_that_comes_before_it_takes() -> None:
    wakes = []
    outbox = Outbox(lambda: wakes.append(None))
    publisher = Publisher()
    publisher.add(1, outbox)
    for token in range(5):
        publisher.publish(step_events({request_id(1, 1): (token, None)}), NO_STEP)
    assert len(wakes) == 1
    outbox.take()
    outbox.reject(Rejection((2,), RequestError(ErrorCode.OVERLOADED, "Full.")))
    assert len(wakes) == 2


def test_another_sessions_end_wakes_everybody() -> None:
    wakes = []
    publisher = Publisher()
    publisher.add(1, Outbox(lambda: wakes.append(None)))
    publisher.publish(step_events({request_id(2, 1): (4, None)}), NO_STEP)
    assert not wakes
    finished = [Finished(request_id(2, 1), FinishReason.LENGTH, 3, 1)]
    publisher.publish(step_events({}, finished=finished), NO_STEP)
    assert len(wakes) == 1


def test_rejections_go_to_the_session_that_asked() -> None:
    publisher = Publisher()
    outbox = Outbox(lambda: None)
    publisher.add(9, outbox)
    error = RequestError(ErrorCode.CAPACITY, "Too large.")
    publisher.reject([request_id(9, 1), request_id(9, 0xFFFFFFFF)], error)
    publisher.reject([request_id(8, 1)], error)
    assert outbox.num_rejected == 1
    assert outbox.take().rejected == (Rejection((1, 0xFFFFFFFF), error),)
    assert outbox.num_rejected == 0
    assert publisher.num_dropped_rows == 1


def test_a_removed_session_is_not_told_anything() -> None:
    publisher = Publisher()
    outbox = Outbox(lambda: None)
    publisher.add(1, outbox)
    publisher.remove(1)
    publisher.publish(step_events({request_id(1, 1): (5, None)}), NO_STEP)
    assert read(outbox.take()) == {}
    assert publisher.num_dropped_rows == 1
