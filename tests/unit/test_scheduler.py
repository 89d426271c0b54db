"""Each rule of the scheduler on its own."""

from __future__ import annotations

import numpy as np
import pytest

from rung.errors import ConfigError, ErrorCode, RequestError
from rung.kv.integrity import IntegrityError
from rung.request import FinishReason
from rung.scheduler.batch import StepOutput
from rung.scheduler.waiting import WaitingQueue
from tests.scheduling import (
    CARELESS,
    VOCAB_SIZE,
    Answers,
    alone,
    assert_same,
    lens,
    make_request,
    make_runner,
    make_scheduler,
    output,
    run_all,
    sampled,
    step,
)

BOOM = RequestError(ErrorCode.INTERNAL, "The step failed.")


# Configuration and admission to the queue


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_num_seqs", "max_waiting", "max_model_len"])
def test_limits_must_be_positive(name):
    with pytest.raises(ConfigError, match=f"{name} is 0; it must be at least 1"):
        make_scheduler(**{name: 0})


def test_budget_must_cover_a_token_for_each_sequence():
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 7 and max_num_seqs is 8"):
        make_scheduler(max_num_batched_tokens=7)


@pytest.mark.parametrize(("prompt", "fits"), [(11, True), (12, True), (13, False)])
def test_request_that_can_never_fit_is_refused_with_both_numbers(prompt, fits):
    scheduler = make_scheduler(num_blocks=4)
    request = make_request(1, prompt, max_tokens=4)
    if fits:
        scheduler.add(request)
        assert run_all(scheduler, make_runner(scheduler)).tokens[1] == alone(request)
        return
    with pytest.raises(RequestError, match=r"need 5 KV blocks of 4 tokens, and the engine has 4") as caught:
        scheduler.add(request)
    assert caught.value.code is ErrorCode.CAPACITY
    assert not scheduler.has_work


def test_request_longer_than_the_context_is_refused():
    scheduler = make_scheduler(max_model_len=16)
    with pytest.raises(RequestError, match="make 17 tokens and the context holds 16") as caught:
        scheduler.add(make_request(1, 13, max_tokens=4))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 4), (4, 0)])
def test_nothing_to_read_or_to_say_is_refused(prompt, max_tokens):
    with pytest.raises(RequestError, match="both must be at least 1") as caught:
        make_scheduler().add(make_request(1, prompt, max_tokens=max_tokens))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_id_in_use_is_refused_and_leaves_its_owner_alone():
    scheduler = make_scheduler()
    first = make_request(1, 5)
    scheduler.add(first)
    with pytest.raises(RequestError, match="id 1 is already in use"):
        scheduler.add(make_request(1, 3))
    assert run_all(scheduler, make_runner(scheduler)).tokens[1] == alone(first)


def test_siblings_of_one_id_are_refused():
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="id 1 is already in use"):
        scheduler.add(make_request(1), make_request(1))
    assert not scheduler.has_work


def test_full_queue_is_overloaded_and_names_the_limit():
    scheduler = make_scheduler(max_waiting=2)
    scheduler.add(make_request(1), make_request(2))
    with pytest.raises(RequestError, match="2 requests wait and the limit is 2") as caught:
        scheduler.add(make_request(3))
    assert caught.value.code is ErrorCode.OVERLOADED
    scheduler.schedule()
    scheduler.add(make_request(3))


def test_siblings_are_accepted_together_or_not_at_all():
    scheduler = make_scheduler(max_waiting=3)
    scheduler.add(make_request(1))
    with pytest.raises(RequestError):
        scheduler.add(make_request(2), make_request(3), make_request(4))
    with pytest.raises(RequestError):
        scheduler.add(make_request(2), make_request(3, 500))
    assert scheduler.stats().num_waiting == 1
    with pytest.raises(RequestError, match="asks for 4 samples and at most 3 can wait") as caught:
        scheduler.add(*(make_request(request_id) for request_id in range(2, 6)))
    assert not caught.value.code.retryable


# What a step holds


def test_nothing_to_do_is_no_plan():
    assert make_scheduler().schedule() is None


def test_prompt_is_cut_into_chunks_of_the_budget_and_samples_at_its_end():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    request = make_request(1, 20)
    scheduler.add(request)
    plans = [step(scheduler, runner)[0] for _ in range(4)]
    assert [(plan.num_computed.tolist(), plan.num_tokens, sampled(plan)) for plan in plans] == [
        ([0], 8, []),
        ([8], 8, []),
        ([16], 4, [1]),
        ([20], 1, [1]),
    ]
    np.testing.assert_array_equal(np.concatenate([plan.token_ids for plan in plans[:3]]), request.prompt_ids)


def test_decodes_come_before_chunks_and_chunks_before_new_requests():
    scheduler = make_scheduler(max_num_batched_tokens=8, policies=CARELESS)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 2), make_request(2, 14), make_request(3, 3), make_request(4, 3))
    # A chunk that does not end its prompt ends at a block's edge; what it leaves is the next one's.
    assert lens(step(scheduler, runner)[0]) == {1: 2, 2: 4, 3: 2}
    assert lens(step(scheduler, runner)[0]) == {1: 1, 2: 4, 3: 1, 4: 2}
    assert lens(step(scheduler, runner)[0]) == {1: 1, 2: 4, 3: 1, 4: 1}


def test_a_prompt_of_one_token_is_a_row_like_any_other():
    scheduler = make_scheduler()
    request = make_request(1, 1)
    scheduler.add(request)
    assert run_all(scheduler, make_runner(scheduler)).tokens[1] == alone(request)


def test_first_come_first_served():
    scheduler = make_scheduler(max_num_seqs=2)
    runner = make_runner(scheduler)
    for request_id in (5, 3, 9, 1):
        scheduler.add(make_request(request_id, max_tokens=3))
    assert run_all(scheduler, runner).started.keys() == dict.fromkeys([5, 3, 9, 1]).keys()
    order = []
    for request_id in (5, 3, 9, 1):
        scheduler.add(make_request(request_id, max_tokens=3))
    while scheduler.has_work:
        order += [started.request_id for started in step(scheduler, runner)[1].started]
    assert order == [5, 3, 9, 1]


def test_a_request_that_does_not_fit_now_is_not_overtaken():
    scheduler = make_scheduler(num_blocks=8)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 15, max_tokens=16), make_request(2, 20), make_request(3, 1, max_tokens=1))
    answers = Answers()
    plan, events = step(scheduler, runner)
    answers.take(events)
    assert lens(plan) == {1: 15}
    assert scheduler.stats().num_waiting == 2
    assert list(run_all(scheduler, runner, answers).finished) == [1, 3, 2]


def test_higher_priority_starts_first():
    scheduler = make_scheduler(max_num_seqs=1)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 3, max_tokens=1))
    scheduler.add(make_request(2, 3, max_tokens=1, priority=1))
    scheduler.add(make_request(3, 3, max_tokens=1, priority=5))
    scheduler.add(make_request(4, 3, max_tokens=1, priority=1))
    assert list(run_all(scheduler, runner).finished) == [3, 2, 4, 1]


def test_deadline_counts_the_way_into_the_engine_and_ends_with_the_first_step():
    scheduler = make_scheduler(max_num_seqs=2)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 3, max_tokens=9, deadline_s=2.0), make_request(2, 3, max_tokens=9))
    scheduler.add(make_request(3, 3, deadline_s=3.0), waited_s=2.0)
    answers = Answers()
    answers.take(step(scheduler, runner)[1])
    answers.take(step(scheduler, runner)[1])
    # The third had waited 2 s when it came; the first runs, so its deadline is met.
    assert answers.finished.keys() == {3}
    assert run_all(scheduler, runner, answers).finished[1].reason is FinishReason.LENGTH


def test_rows_stay_put_while_others_come_and_go():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, max_tokens=2), make_request(2, max_tokens=9))
    rows = []
    for request_id in range(3, 12):
        scheduler.add(make_request(request_id, 1, max_tokens=2))
        plan, _ = step(scheduler, runner)
        rows += plan.rows[plan.request_ids == 2].tolist()
    assert rows == [1] * 9


def test_blocks_are_given_as_they_are_needed():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request(1, 20))
    runner = make_runner(scheduler)
    used = []
    for _ in range(3):
        step(scheduler, runner)
        used.append(scheduler.stats().num_blocks_used)
    assert used == [2, 4, 5]


def test_only_rows_that_cross_a_block_edge_get_a_block():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 3, max_tokens=7))
    used = []
    while scheduler.has_work:
        step(scheduler, runner)
        used.append(scheduler.stats().num_blocks_used)
    assert used == [1, 1, 2, 2, 2, 2, 0]


def test_plan_is_a_snapshot():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 3), make_request(2, 4))
    step(scheduler, runner)
    plan = scheduler.schedule()
    columns = (plan.num_computed, plan.block_tables, plan.token_ids, plan.rows)
    before = [column.copy() for column in columns]
    scheduler.abort(1)
    runner.forward(plan)
    scheduler.commit(plan, runner.sample(plan), 1.0)
    step(scheduler, runner)
    for then, now in zip(
        before, (plan.num_computed, plan.block_tables, plan.token_ids, plan.rows), strict=True
    ):
        np.testing.assert_array_equal(then, now)


def test_sampling_columns_follow_their_rows():
    scheduler = make_scheduler()
    scheduler.add(
        make_request(
            1, 3, temperature=0.5, top_k=7, top_p=0.25, seed=2**64 - 1, sample_index=2, top_logprobs=3
        ),
        make_request(2, 4),
    )
    sampling = scheduler.schedule().sampling
    assert sampling.temperature.tolist() == [0.5, 0.0]
    assert sampling.top_k.tolist() == [7, 0]
    assert sampling.top_p.tolist() == [0.25, 1.0]
    assert sampling.seed.tolist() == [2**64 - 1, 0]
    assert sampling.sample_index.tolist() == [2, 0]
    assert sampling.top_logprobs.tolist() == [3, -1]
    assert sampling.position.tolist() == [3, 4]


# How a request ends


def test_length_ends_a_row():
    scheduler = make_scheduler()
    request = make_request(1, max_tokens=3)
    scheduler.add(request)
    answers = run_all(scheduler, make_runner(scheduler))
    finished = answers.finished[1]
    assert (finished.reason, finished.stop_token_id) == (FinishReason.LENGTH, None)
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (5, 3)
    assert answers.tokens[1] == alone(request)


@pytest.mark.parametrize("extra", [0, 40])
def test_stop_id_ends_a_row_and_counts(extra):
    free = alone(make_request(1, max_tokens=8))
    others = [token for token in range(VOCAB_SIZE) if token not in free][:extra]
    scheduler = make_scheduler()
    scheduler.add(make_request(1, max_tokens=8, stop=[free[3], *others]))
    answers = run_all(scheduler, make_runner(scheduler))
    assert answers.tokens[1] == free[:4]
    finished = answers.finished[1]
    assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, free[3])
    assert finished.num_output_tokens == 4


def test_stop_is_looked_at_before_length():
    free = alone(make_request(1, max_tokens=3))
    scheduler = make_scheduler()
    scheduler.add(make_request(1, max_tokens=3, stop=[free[2]]))
    assert run_all(scheduler, make_runner(scheduler)).finished[1].reason is FinishReason.STOP


def test_stop_ids_are_banned_until_min_tokens_exist():
    free = alone(make_request(1, max_tokens=4))
    request = make_request(1, max_tokens=12, min_tokens=2, stop=[free[1]])
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(request)
    banned = []
    answers = Answers()
    while scheduler.has_work:
        plan, events = step(scheduler, runner)
        answers.take(events)
        banned.append([(index, ids.tolist()) for index, ids in plan.sampling.banned_ids])
    assert banned[:2] == [[(0, [free[1]])]] * 2
    assert banned[2:] == [[]] * (len(banned) - 2)
    assert answers.tokens[1] == alone(request)
    assert answers.tokens[1][1] != free[1]


def test_min_tokens_beyond_any_number_is_min_tokens_until_the_end():
    request = make_request(1, max_tokens=6, min_tokens=2**32 - 1, stop=range(1, VOCAB_SIZE))
    scheduler = make_scheduler()
    scheduler.add(request)
    assert run_all(scheduler, make_runner(scheduler)).tokens[1] == [0] * 6


def test_failed_row_ends_alone():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(make_request(1), make_request(2))
    step(scheduler, runner)
    plan = scheduler.schedule()
    runner.forward(plan)
    error = RequestError(ErrorCode.NON_FINITE, "Not a number.")
    good = runner.sample(plan)
    events = scheduler.commit(plan, StepOutput(good.token_ids, {}, {0: error}), 1.0)
    assert [(done.request_id, done.reason, done.error) for done in events.finished] == [
        (1, FinishReason.ERROR, error)
    ]
    assert events.request_ids.tolist() == [2]
    assert scheduler.stats().num_running == 1


def test_step_that_raised_ends_its_rows_and_no_others():
    scheduler = make_scheduler(max_num_seqs=2)
    runner = make_runner(scheduler)
    waiting = make_request(3)
    scheduler.add(make_request(1), make_request(2), waiting)
    step(scheduler, runner)
    plan = scheduler.schedule()
    events = scheduler.fail(plan, BOOM)
    assert [(done.request_id, done.reason, done.error) for done in events.finished] == [
        (1, FinishReason.ERROR, BOOM),
        (2, FinishReason.ERROR, BOOM),
    ]
    assert scheduler.stats().num_blocks_used == 0
    scheduler.check_integrity()
    assert run_all(scheduler, runner).tokens[3] == alone(waiting)


def test_blocks_of_a_failed_step_are_freed_with_those_it_was_to_wipe():
    scheduler = make_scheduler(prefix_cache=False)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 4, max_tokens=1), make_request(2, 4))
    step(scheduler, runner)
    plan = scheduler.schedule()
    assert plan.freed_blocks.tolist() == [0]
    scheduler.fail(plan, BOOM)
    scheduler.add(make_request(3))
    assert scheduler.schedule().freed_blocks.tolist() == [0, 1, 2]


def test_everything_can_be_failed_at_once_even_with_a_plan_in_flight():
    scheduler = make_scheduler(max_num_seqs=2)
    runner = make_runner(scheduler)
    for request_id in (1, 2, 3, 4):
        scheduler.add(make_request(request_id))
    step(scheduler, runner)
    scheduler.schedule()
    scheduler.abort(2)
    events = scheduler.fail_all(BOOM)
    assert {done.request_id: done.reason for done in events.finished} == {
        1: FinishReason.ERROR,
        2: FinishReason.CANCELLED,
        3: FinishReason.ERROR,
        4: FinishReason.ERROR,
    }
    assert not scheduler.has_work
    scheduler.check_integrity()


# Bookkeeping


def test_queue_and_prefill_times_come_from_commits():
    scheduler = make_scheduler(max_num_seqs=1, max_num_batched_tokens=4)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 6, max_tokens=2))
    scheduler.add(make_request(2, 3, max_tokens=1), waited_s=0.5)
    answers = Answers()
    for elapsed_s in (1.0, 2.0, 4.0, 8.0):
        answers.take(step(scheduler, runner, elapsed_s)[1])
    first, second = answers.started[1], answers.started[2]
    assert (first.queue_s, first.prefill_s) == (0.0, 3.0)
    assert (second.queue_s, second.prefill_s) == (7.5, 8.0)
    assert (second.num_prompt_tokens, second.num_cached_tokens) == (3, 0)


def test_freed_blocks_are_told_once_by_the_next_plan():
    scheduler = make_scheduler(prefix_cache=False)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 6, max_tokens=1))
    assert step(scheduler, runner)[0].freed_blocks.tolist() == []
    assert scheduler.schedule() is None
    scheduler.add(make_request(2))
    assert step(scheduler, runner)[0].freed_blocks.tolist() == [0, 1]
    assert step(scheduler, runner)[0].freed_blocks.tolist() == []


def test_stats_count():
    scheduler = make_scheduler(max_num_seqs=2)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 5), make_request(2, 3), make_request(3, 2))
    answers = Answers()
    answers.take(step(scheduler, runner)[1])
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.num_blocks_used, stats.num_blocks_total) == (3, 32)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (8, 2)
    run_all(scheduler, runner, answers)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (10, 12)


def test_same_inputs_make_the_same_plans():
    def plans():
        scheduler = make_scheduler(num_blocks=9)
        runner = make_runner(scheduler)
        scheduler.add(*(make_request(i, 3 + i, max_tokens=9) for i in range(7)))
        scheduler.abort(3)
        made = []
        while scheduler.has_work:
            made.append(step(scheduler, runner)[0])
        return tuple(made)

    assert_same(plans(), plans())


def test_plans_take_turns():
    scheduler = make_scheduler()
    scheduler.add(make_request(1))
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match="plan 1 is in flight"):
        scheduler.schedule()
    scheduler.commit(plan, output(plan), 1.0)
    with pytest.raises(RuntimeError, match="plan 1 is not in flight"):
        scheduler.commit(plan, output(plan), 1.0)


def test_description_tells_what_runs_and_what_waits():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(4, 6), make_request(5, 3, priority=-1))
    scheduler.schedule()
    assert scheduler.describe().splitlines() == [
        "1 running, 1 waiting, 2 of 32 blocks in use, plans in flight: [1]",
        "  running 4: 6 of 6 tokens computed, at most 10, 2 blocks",
        "  waiting 5: 3 tokens, priority -1, for 0.0 s",
    ]


def test_integrity_check_sees_a_leaked_block():
    scheduler = make_scheduler()
    scheduler._rows.kv.allocate(1)
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()


def test_integrity_check_sees_a_lost_row_and_a_lost_request():
    scheduler = make_scheduler()
    scheduler._rows._empty.pop()
    with pytest.raises(IntegrityError, match="state rows"):
        scheduler.check_integrity()
    scheduler = make_scheduler()
    scheduler.add(make_request(1))
    scheduler._waiting = WaitingQueue()
    with pytest.raises(IntegrityError, match="live requests"):
        scheduler.check_integrity()
