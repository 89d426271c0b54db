"""A session driven message by message, without gRPC: what reaches the engine and what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rung.engine import Heartbeat
from rung.request import Finished, FinishReason, Request
from rung.scheduler.batch import SchedulerStats
from rung.server.convert import FrameError
from rung.server.gen import engine_pb2, generation_pb2, step_pb2
from rung.server.outbox import NO_STEP, Publisher, request_id
from rung.server.session import Session
from tests.unit.engine_fixture import Fold, make_facts, make_submit, u32
from tests.unit.test_outbox import step_events

if TYPE_CHECKING:
    from collections.abc import Sequence


class RecordingEngine:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.submitted: list[list[int]] = []
        self.aborted: list[list[int]] = []
        self.beat = Heartbeat(0, 0, 0, SchedulerStats(0, 0, 0, 0, 0, 0, 0))

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted.append([request.request_id for request in requests])

    def abort(self, request_ids: Sequence[int]) -> None:
        self.aborted.append(sorted(request_ids))

    def heartbeat(self) -> Heartbeat:
        return self.beat


class Bench:
    """A session with everything around it."""

    def __init__(self, number: int = 7) -> None:
        self.number = number
        self.engine = RecordingEngine()
        self.publisher = Publisher()
        facts = make_facts(max_num_seqs=2, max_waiting=4)
        self.session = Session(number, self.engine, facts, self.publisher, lambda: None)
        self.fold = Fold()

    def submit(self, submit: generation_pb2.Submit) -> None:
        self.session.receive(engine_pb2.SessionRequest(submit=submit))

    def abort(self, *handles: int) -> None:
        self.session.receive(engine_pb2.SessionRequest(abort=engine_pb2.Abort(handles=u32(handles))))

    def finish(self, *handles: int) -> None:
        finished = [
            Finished(request_id(self.number, handle), FinishReason.CANCELLED, 3, 0) for handle in handles
        ]
        self.publisher.publish(step_events({}, finished=finished), NO_STEP)

    def write(self) -> list[engine_pb2.SessionResponse]:
        responses = self.session.responses()
        for response in responses:
            self.fold.take(response)
        return responses

    def ids(self, *handles: int) -> list[int]:
        return [request_id(self.number, handle) for handle in handles]


def test_an_abort_reaches_the_engine_once_per_live_row() -> None:
    bench = Bench()
    bench.submit(make_submit([1, 2]))
    bench.abort(1, 1, 9)
    bench.abort(1)
    bench.abort(2, 1)
    assert bench.engine.aborted == [bench.ids(1), bench.ids(2)]


def test_an_ended_row_is_not_aborted_and_its_handle_may_come_again_after_the_wrap() -> None:
    bench = Bench()
    bench.submit(make_submit([5]))
    bench.abort(5)
    bench.finish(5)
    bench.write()
    assert bench.session.num_open == 0
    bench.abort(5)
    assert bench.engine.aborted == [bench.ids(5)]
    for handle in (2**31, 2**32 - 1, 4):
        bench.submit(make_submit([handle]))
    bench.submit(make_submit([5]))
    bench.abort(5)
    assert bench.engine.aborted == [bench.ids(5), bench.ids(5)]


def test_a_handle_is_in_use_until_its_terminal_event_is_written() -> None:
    bench = Bench()
    bench.submit(make_submit([1]))
    bench.finish(1)
    for handle in (2**31, 2**32 - 1):
        bench.submit(make_submit([handle]))
    with pytest.raises(FrameError, match="has not ended"):
        bench.submit(make_submit([1]))


def test_unread_ends_count_against_the_rows_of_a_session() -> None:
    bench = Bench()
    for handle in range(6):
        bench.submit(make_submit([handle]))
    bench.finish(*range(6))
    bench.submit(make_submit([6]))
    bench.write()
    rejected = bench.fold.row(6).rejected
    assert rejected is not None
    assert rejected.code == step_pb2.ENGINE_ERROR_CODE_OVERLOADED
    bench.submit(make_submit([7]))
    bench.write()
    assert bench.fold.row(7).rejected is None
    assert bench.engine.submitted[-1] == bench.ids(7)


def test_a_rejected_request_never_reaches_the_engine() -> None:
    bench = Bench()
    bench.submit(make_submit([1], []))
    assert bench.session.num_rejected == 1
    assert bench.engine.submitted == []
    assert bench.session.num_open == 0


def test_closing_aborts_what_is_open_and_nothing_is_delivered_any_more() -> None:
    bench = Bench()
    bench.submit(make_submit([1, 2]))
    bench.submit(make_submit([3]))
    bench.finish(2)
    bench.write()
    bench.session.close()
    assert bench.engine.aborted == [bench.ids(1, 3)]
    bench.finish(1, 3)
    assert bench.publisher.num_dropped_rows == 2


def test_a_long_age_does_not_overflow_its_field() -> None:
    bench = Bench()
    bench.engine.beat = Heartbeat(2**40, 2**40, 2**40, SchedulerStats(1, 2, 3, 4, 5, 6, 7))
    (response,) = bench.write()
    assert response.step.step_age_ms == response.step.predicted_step_ms == 2**32 - 1
    assert response.step.loop_seq == 2**40
    assert response.step.stats.kv_blocks_used == 3
