"""The engine loop on its own thread: delivery, rejection, failure, death, stopping and idling."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from rung.engine import Engine, Heartbeat, StepTiming
from rung.errors import ErrorCode, RequestError
from rung.kv.integrity import IntegrityError
from rung.request import FinishReason
from tests.scheduling import CARELESS, Answers, alone, make_request, make_runner, make_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rung.request import Request
    from rung.runner.protocol import PendingOutput
    from rung.scheduler import Scheduler
    from rung.scheduler.batch import StepEvents, StepPlan

# How long a test waits for another thread before it calls the engine stuck.
PATIENCE_S = 30.0


class ScriptedRunner:
    """A fake runner that can be held inside `forward` and told to fail."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._inner = make_runner(scheduler)
        self.info = self._inner.info
        self.failures: list[Exception] = []
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def hold(self) -> None:
        """Make the next `forward` wait for `go_on`."""
        self.entered.clear()
        self.go_on.clear()

    def forward(self, plan: StepPlan) -> None:
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)
        if self.failures:
            raise self.failures.pop(0)
        self._inner.forward(plan)

    def sample(self, plan: StepPlan) -> PendingOutput:
        return self._inner.sample(plan)

    def close(self) -> None:
        self._inner.close()


class Harness:
    """An engine, its thread, and all that it said."""

    def __init__(self, scheduler: Scheduler, *, check_integrity: bool = True) -> None:
        self.scheduler = scheduler
        self.runner = ScriptedRunner(scheduler)
        self.answers = Answers()
        self.timings: list[StepTiming] = []
        self.heartbeats: list[Heartbeat] = []
        self.rejected: list[tuple[list[int], RequestError]] = []
        self.deaths: list[Exception] = []
        self._said_something = threading.Condition()
        self.engine = Engine(
            scheduler,
            self.runner,
            self._on_events,
            on_rejected=self._on_rejected,
            on_dead=self._on_dead,
            check_integrity=check_integrity,
        )
        self.thread = threading.Thread(target=self.engine.run)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until something that the engine said makes the condition true."""
        with self._said_something:
            assert self._said_something.wait_for(condition, PATIENCE_S)

    def join(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def _on_events(self, events: StepEvents, timing: StepTiming) -> None:
        with self._said_something:
            self.answers.take(events)
            self.timings.append(timing)
            self.heartbeats.append(self.engine.heartbeat())
            self._said_something.notify_all()

    def _on_rejected(self, request_ids: list[int], error: RequestError) -> None:
        with self._said_something:
            self.rejected.append((list(request_ids), error))
            self._said_something.notify_all()

    def _on_dead(self, error: Exception) -> None:
        with self._said_something:
            self.deaths.append(error)
            self._said_something.notify_all()


@contextmanager
def running(**limits: Any) -> Iterator[Harness]:
    """A started engine that is stopped at the end."""
    harness = Harness(make_scheduler(**limits))
    harness.thread.start()
    try:
        yield harness
    finally:
        harness.runner.go_on.set()
        harness.engine.stop()
        harness.join()


def submit_and_wait(harness: Harness, *requests: Request) -> None:
    harness.engine.submit(requests)
    harness.wait_for(lambda: harness.answers.finished.keys() >= {request.request_id for request in requests})


def reasons(harness: Harness) -> dict[int, FinishReason]:
    return {request_id: done.reason for request_id, done in harness.answers.finished.items()}


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_those_of_each_request_alone(depth):
    requests = [make_request(i, 1 + i % 20, max_tokens=1 + i, temperature=i % 2, seed=i) for i in range(24)]
    with running(num_blocks=16, depth=depth, policies=CARELESS) as harness:
        for request in requests:
            harness.engine.submit([request])
        harness.wait_for(lambda: len(harness.answers.finished) == len(requests))
    assert harness.answers.tokens == {request.request_id: alone(request) for request in requests}
    assert harness.deaths == []


def test_engine_sleeps_between_requests_and_wakes_for_each():
    with running() as harness:
        for request_id in range(3):
            turns = harness.engine.heartbeat().loop_seq
            submit_and_wait(harness, make_request(request_id, 3, max_tokens=2))
            assert harness.engine.heartbeat().loop_seq == turns + 2


def test_next_step_is_launched_before_the_last_one_has_landed():
    order = []
    with running(depth=2) as harness:
        inner = harness.runner._inner
        forward, wait = inner.forward, inner.wait
        inner.forward = lambda plan: (order.append(("forward", plan.step_id)), forward(plan))
        inner.wait = lambda plan: (order.append(("wait", plan.step_id)), wait(plan))[1]
        request = make_request(1, 3, max_tokens=4, stop=[alone(make_request(1, 3, max_tokens=4))[2]])
        submit_and_wait(harness, request)
        submit_and_wait(harness, make_request(2, 3, max_tokens=1))
    assert harness.answers.tokens[1] == alone(request)
    # The third token ends the answer, and the fourth step has been launched by then.
    assert order[:7] == [
        ("forward", 1), ("forward", 2), ("wait", 1), ("forward", 3), ("wait", 2), ("forward", 4), ("wait", 3),
    ]  # fmt: skip


def test_no_step_is_launched_for_rows_whose_last_token_is_in_flight():
    with running(depth=2) as harness:
        submit_and_wait(harness, make_request(1, 3, max_tokens=2))
        submit_and_wait(harness, make_request(2, 3, max_tokens=1))
    assert [timing.rows for timing in harness.timings if timing.rows] == [1, 1, 1]


def test_abort_and_preemption_with_steps_in_flight():
    with running(depth=2, num_blocks=8, policies=CARELESS) as harness:
        requests = [make_request(i, 6, max_tokens=20) for i in range(5)]
        for request in requests:
            harness.engine.submit([request])
        harness.wait_for(lambda: len(harness.answers.tokens.get(1, ())) > 3)
        harness.engine.abort([1])
        harness.wait_for(lambda: len(harness.answers.finished) == 5)
        assert harness.engine.heartbeat().stats.preemptions_total > 0
    for request in requests:
        if request.request_id != 1:
            assert harness.answers.tokens[request.request_id] == alone(request)


def test_many_threads_may_submit():
    with running(max_waiting=500) as harness:
        threads = [
            threading.Thread(
                target=lambda base=base: [
                    harness.engine.submit([make_request(base + i, 2, max_tokens=3)]) for i in range(40)
                ]
            )
            for base in range(0, 400, 100)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        harness.wait_for(lambda: len(harness.answers.finished) == 160)
    assert harness.rejected == []


def test_refused_siblings_are_rejected_together():
    with running(max_waiting=2) as harness:
        harness.engine.submit([make_request(1), make_request(2), make_request(3)])
        harness.wait_for(lambda: harness.rejected)
        submit_and_wait(harness, make_request(4), make_request(5))
    assert [ids for ids, _ in harness.rejected] == [[1, 2, 3]]
    assert harness.answers.finished.keys() == {4, 5}


def test_everything_received_during_a_step_is_taken_in_after_it():
    with running() as harness:
        harness.runner.hold()
        harness.engine.submit([make_request(1, max_tokens=20)])
        assert harness.runner.entered.wait(PATIENCE_S)
        harness.engine.submit([make_request(2, max_tokens=20)])
        harness.engine.submit([make_request(3, max_tokens=2)])
        harness.engine.abort([2, 99])
        harness.runner.go_on.set()
        harness.wait_for(lambda: len(harness.answers.finished) == 3)
    assert reasons(harness) == {1: FinishReason.LENGTH, 2: FinishReason.CANCELLED, 3: FinishReason.LENGTH}
    assert harness.timings[1].rows == 2


def test_flood_within_one_step_is_bounded():
    with running(max_waiting=3) as harness:
        harness.runner.hold()
        harness.engine.submit([make_request(0)])
        assert harness.runner.entered.wait(PATIENCE_S)
        for request_id in range(1, 20):
            harness.engine.submit([make_request(request_id)])
        harness.runner.go_on.set()
        harness.wait_for(lambda: len(harness.answers.finished) + len(harness.rejected) == 20)
    assert harness.answers.finished.keys() == {0, 1, 2, 3}
    assert {error.code for _, error in harness.rejected} == {ErrorCode.OVERLOADED}


def test_abort_within_a_step_cancels_and_frees():
    with running() as harness:
        submit_and_wait(harness, make_request(9, max_tokens=1))
        harness.runner.hold()
        harness.engine.submit([make_request(1, max_tokens=50)])
        assert harness.runner.entered.wait(PATIENCE_S)
        harness.engine.abort([1])
        harness.runner.go_on.set()
        harness.wait_for(lambda: 1 in harness.answers.finished)
        assert harness.engine.heartbeat().stats.num_blocks_used == 0
    assert reasons(harness)[1] is FinishReason.CANCELLED


@pytest.mark.parametrize("depth", [1, 2])
def test_step_that_raises_costs_its_own_rows_and_is_logged_once(caplog, depth):
    with running(depth=depth) as harness:
        harness.runner.failures = [ValueError("broken step")]
        with caplog.at_level(logging.ERROR, logger="rung.engine"):
            submit_and_wait(harness, make_request(1), make_request(2))
        later = make_request(3)
        submit_and_wait(harness, later)
        assert harness.answers.tokens[3] == alone(later)
    assert reasons(harness) == {1: FinishReason.ERROR, 2: FinishReason.ERROR, 3: FinishReason.LENGTH}
    assert harness.answers.finished[1].error.code is ErrorCode.INTERNAL
    assert len(caplog.records) == 1
    assert "step 1, 2 rows, 10 tokens, 2 sampled, requests [1, 2]" in caplog.text
    assert "broken step" in caplog.text
    assert harness.deaths == []


def test_failures_that_are_not_in_a_row_are_survived():
    with running() as harness:
        for request_id in range(0, 8, 2):
            harness.runner.failures = [ValueError("broken step")]
            submit_and_wait(harness, make_request(request_id))
            submit_and_wait(harness, make_request(request_id + 1))
        assert harness.deaths == []
    assert list(reasons(harness).values()) == [FinishReason.ERROR, FinishReason.LENGTH] * 4


def test_second_failure_in_a_row_kills_the_engine_and_ends_every_request():
    harness = Harness(make_scheduler(max_num_seqs=1))
    harness.runner.failures = [ValueError("first"), ValueError("second")]
    for request_id in (1, 2, 3):
        harness.engine.submit([make_request(request_id)])
    harness.thread.start()
    harness.join()
    assert reasons(harness) == dict.fromkeys([1, 2, 3], FinishReason.ERROR)
    assert [str(error) for error in harness.deaths] == ["second"]
    assert harness.heartbeats[-1].step_age_ms == 0
    harness.engine.submit([make_request(4), make_request(5)])
    assert harness.rejected[-1][0] == [4, 5]
    assert harness.rejected[-1][1].code is ErrorCode.INTERNAL


def test_wrong_number_of_tokens_from_the_runner_is_a_failed_step(caplog):
    with running() as harness:
        sample = harness.runner._inner.sample
        harness.runner._inner.sample = lambda plan: type(sample(plan))(sample(plan).token_ids[:-1], {}, {})
        submit_and_wait(harness, make_request(1))
        harness.runner._inner.sample = sample
        submit_and_wait(harness, make_request(2))
    assert reasons(harness) == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert "the runner chose 0 tokens for 1 rows" in caplog.text


def test_broken_books_kill_an_idle_engine():
    harness = Harness(make_scheduler())
    harness.scheduler._rows.kv.allocate(1)
    harness.thread.start()
    harness.join()
    assert [type(error) for error in harness.deaths] == [IntegrityError]


def test_books_are_checked_only_when_asked():
    harness = Harness(make_scheduler(), check_integrity=False)
    harness.scheduler._rows.kv.allocate(1)
    harness.thread.start()
    submit_and_wait(harness, make_request(1))
    harness.engine.stop()
    harness.join()
    assert harness.deaths == []


def test_stop_ends_what_is_left_as_draining():
    with running(max_num_seqs=1) as harness:
        harness.runner.hold()
        harness.engine.submit([make_request(1, max_tokens=50)])
        harness.engine.submit([make_request(2)])
        assert harness.runner.entered.wait(PATIENCE_S)
        harness.engine.submit([make_request(3)])
        harness.engine.stop()
        harness.runner.go_on.set()
        harness.join()
    codes = {request_id: done.error.code for request_id, done in harness.answers.finished.items()}
    assert codes == dict.fromkeys([1, 2, 3], ErrorCode.DRAINING)
    harness.engine.submit([make_request(4)])
    assert (harness.rejected[-1][0], harness.rejected[-1][1].code) == ([4], ErrorCode.DRAINING)


def test_stop_wakes_an_idle_engine():
    with running() as harness:
        pass
    assert harness.answers.finished == {}


def test_each_turn_tells_what_it_ran():
    with running(max_num_batched_tokens=8) as harness:
        submit_and_wait(harness, make_request(1, 10, max_tokens=2))
    assert [(timing.loop_seq, timing.rows, timing.tokens) for timing in harness.timings[:3]] == [
        (1, 1, 8),
        (2, 1, 2),
        (3, 1, 1),
    ]
    assert all(timing.step_device_ns > 0 and timing.step_host_ns > 0 for timing in harness.timings[:3])
    assert harness.timings[0].predicted_step_ms == 0


def test_heartbeat_looks_into_a_running_step():
    with running() as harness:
        idle = harness.engine.heartbeat()
        assert (idle.loop_seq, idle.step_age_ms, idle.stats.num_blocks_total) == (0, 0, 32)
        harness.runner.hold()
        harness.engine.submit([make_request(1, 9)])
        assert harness.runner.entered.wait(PATIENCE_S)
        assert harness.engine.heartbeat().loop_seq == 1
        harness.runner.go_on.set()
        harness.wait_for(lambda: 1 in harness.answers.finished)
        # When events are out the step is over and the counts are those after it.
        assert [beat.step_age_ms for beat in harness.heartbeats] == [0] * len(harness.heartbeats)
        assert harness.heartbeats[0].stats.num_blocks_used == 3
        assert harness.heartbeats[-1].stats.num_blocks_used == 0


def test_time_between_submission_and_the_next_turn_counts_as_queueing():
    with running() as harness:
        harness.runner.hold()
        harness.engine.submit([make_request(1, max_tokens=2)])
        assert harness.runner.entered.wait(PATIENCE_S)
        harness.engine.submit([make_request(2, max_tokens=1)])
        harness.runner.go_on.set()
        harness.wait_for(lambda: 2 in harness.answers.finished)
    # It was admitted in the turn that took it in: the scheduler alone would say 0.
    assert harness.answers.started[2].queue_s > 0


def test_time_before_the_loop_ran_and_while_it_was_idle_is_not_counted(monkeypatch):
    class Clock:
        """Far from 0 at the start, and a millisecond later at each look."""

        now_ns = 10**18

        def monotonic_ns(self) -> int:
            self.now_ns += 10**6
            return self.now_ns

    clock = Clock()
    monkeypatch.setattr("rung.engine.time", clock)
    harness = Harness(make_scheduler())
    harness.engine.submit([make_request(1, max_tokens=1)])
    harness.thread.start()
    harness.wait_for(lambda: 1 in harness.answers.finished)
    clock.now_ns += 10**18
    submit_and_wait(harness, make_request(2, max_tokens=1))
    harness.engine.stop()
    harness.join()
    assert [started.prefill_s < 1 for started in harness.answers.started.values()] == [True, True]
