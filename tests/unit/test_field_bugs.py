"""Failures that users of other servers have met, each a kind of fault; ids name the kind.

What only the engine can get wrong is here; B42, B44, B47, B79 are beside what they are about.
"""

from __future__ import annotations

import numpy as np
import pytest

from rung.errors import ErrorCode, RequestError
from rung.request import FinishReason
from rung.scheduler.policies import PolicyConfig
from tests.scheduling import (
    CARELESS,
    Answers,
    alone,
    make_request,
    make_runner,
    make_scheduler,
    run_all,
    step,
)


@pytest.mark.parametrize("state", ["waiting", "reading", "answering", "preempted", "in flight"])
def test_b02_abort_stops_a_request_in_every_state_and_leaks_nothing(state):
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=8, policies=CARELESS)
    runner = make_runner(scheduler)
    neighbour = make_request(1, 4, max_tokens=24)
    request = make_request(2, 16, max_tokens=12)
    answers = Answers()
    scheduler.add(neighbour)
    answers.take(step(scheduler, runner)[1])
    scheduler.add(request)
    plan = None
    if state in ("reading", "answering", "preempted"):
        answers.take(step(scheduler, runner)[1])
    while state == "answering" and 2 not in answers.tokens:
        answers.take(step(scheduler, runner)[1])
    while state == "preempted" and scheduler.stats().preemptions_total == 0:
        answers.take(step(scheduler, runner)[1])
    if state == "in flight":
        plan = scheduler.schedule()
        runner.forward(plan)
    scheduler.abort(2)
    if plan is not None:
        answers.take(scheduler.commit(plan, runner.sample(plan), 1.0))
    answers.take(scheduler.take_events())
    assert answers.finished[2].reason is FinishReason.CANCELLED
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    run_all(scheduler, runner, answers)
    assert answers.tokens[1] == alone(neighbour)
    assert scheduler.stats().num_blocks_used == 0


def test_b02_hundreds_of_aborts_leave_every_row_and_block():
    scheduler = make_scheduler(policies=CARELESS)
    runner = make_runner(scheduler)
    rng = np.random.default_rng(0)
    for request_id in range(300):
        scheduler.add(make_request(request_id, int(rng.integers(1, 20)), max_tokens=40))
        if rng.random() < 0.5:
            step(scheduler, runner)
        scheduler.abort(int(rng.integers(max(0, request_id - 5), request_id + 1)))
        for old in range(request_id - 8):
            scheduler.abort(old)
    for request_id in range(300):
        scheduler.abort(request_id)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    scheduler.check_integrity()


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_b09_request_around_the_size_of_the_pool_runs_or_is_refused_and_holds_nobody_up(extra):
    scheduler = make_scheduler(num_blocks=8, max_model_len=64)
    runner = make_runner(scheduler)
    warm = make_request(0, 9, max_tokens=2)
    scheduler.add(warm)
    answers = run_all(scheduler, runner)
    big = make_request(1, 28 + extra, max_tokens=4)
    shorts = [make_request(2 + index, 3, max_tokens=2) for index in range(10)]
    if extra > 0:
        with pytest.raises(RequestError, match="need 9 KV blocks of 4 tokens, and the engine has 8"):
            scheduler.add(big)
    else:
        scheduler.add(big)
    scheduler.add(*shorts)
    run_all(scheduler, runner, answers)
    expected = {request.request_id: alone(request) for request in [warm, *shorts]}
    if extra <= 0:
        expected[1] = alone(big)
    assert answers.tokens == expected


def test_b09_many_large_requests_at_once_get_through_one_after_the_other():
    scheduler = make_scheduler(num_blocks=10, policies=PolicyConfig(over_commit=4.0))
    runner = make_runner(scheduler)
    requests = [make_request(index, 24, max_tokens=16) for index in range(5)]
    scheduler.add(*requests)
    assert run_all(scheduler, runner).tokens == {r.request_id: alone(r) for r in requests}


def test_b12_empty_prompt_is_refused_and_the_loop_goes_on():
    scheduler = make_scheduler()
    with pytest.raises(RequestError) as caught:
        scheduler.add(make_request(1, []))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    after = make_request(1, 3)
    scheduler.add(after)
    assert run_all(scheduler, make_runner(scheduler)).tokens[1] == alone(after)


def test_b46_seeded_answer_does_not_depend_on_its_neighbours():
    def answer(*neighbours, **limits):
        scheduler = make_scheduler(**limits)
        scheduler.add(*neighbours, make_request(99, [7, 8, 9], temperature=1.0, seed=42, max_tokens=8))
        return run_all(scheduler, make_runner(scheduler)).tokens[99]

    solo = answer()
    for seed in (1, 42):
        others = [
            make_request(index, [7, 8, 9], temperature=1.0, seed=seed, max_tokens=8) for index in range(5)
        ]
        assert answer(*others) == solo
        crowd = [make_request(index, 9, temperature=1.0, seed=seed, max_tokens=30) for index in range(9)]
        assert answer(*crowd, num_blocks=12, max_num_seqs=10, policies=CARELESS) == solo


def test_b51_same_handle_of_two_frontends_is_two_requests():
    scheduler = make_scheduler()
    one, other = make_request(1 << 32 | 5, [1, 2, 3]), make_request(2 << 32 | 5, [4, 5, 6])
    scheduler.add(one)
    scheduler.add(other)
    runner = make_runner(scheduler)
    answers = Answers()
    answers.take(step(scheduler, runner)[1])
    scheduler.abort(one.request_id)
    run_all(scheduler, runner, answers)
    assert answers.tokens[other.request_id] == alone(other)
    assert answers.finished[other.request_id].reason is FinishReason.LENGTH


def test_b72_counts_are_right_after_a_mass_abort_without_another_step():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(*(make_request(index, 9, max_tokens=30) for index in range(20)))
    for _ in range(6):
        step(scheduler, runner)
    assert scheduler.stats().num_blocks_used > 8
    for index in range(20):
        scheduler.abort(index)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    assert len(scheduler.take_events().finished) == 20


def test_b74_queue_is_bounded_and_what_waits_too_long_ends():
    scheduler = make_scheduler(max_num_seqs=1, max_waiting=4)
    runner = make_runner(scheduler)
    answers = Answers()
    scheduler.add(make_request(0, 3, max_tokens=20))
    answers.take(step(scheduler, runner)[1])
    for index in range(1, 5):
        scheduler.add(make_request(index, 3, deadline_s=5.0 if index % 2 else None, max_tokens=1))
    with pytest.raises(RequestError) as caught:
        scheduler.add(make_request(5))
    assert caught.value.code is ErrorCode.OVERLOADED
    assert caught.value.code.retryable
    for _ in range(6):
        answers.take(step(scheduler, runner)[1])
    assert {id_: done.error.code for id_, done in answers.finished.items()} == {
        1: ErrorCode.DEADLINE,
        3: ErrorCode.DEADLINE,
    }
    assert "its deadline is 5 s" in answers.finished[1].error.message
    run_all(scheduler, runner, answers)
    assert answers.finished[2].reason is answers.finished[4].reason is FinishReason.LENGTH
