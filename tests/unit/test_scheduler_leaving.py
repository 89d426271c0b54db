"""How requests leave their rows before their end: aborts and preemption."""

from __future__ import annotations

import numpy as np

from rung.request import FinishReason
from rung.scheduler.batch import LogprobRow
from tests.scheduling import (
    CARELESS,
    Answers,
    alone,
    lens,
    make_request,
    make_runner,
    make_scheduler,
    output,
    run_all,
    step,
)

# Aborts


def test_abort_of_a_waiting_request_ends_it_without_started():
    scheduler = make_scheduler()
    scheduler.add(make_request(1))
    scheduler.abort(1)
    events = scheduler.take_events()
    assert [done.reason for done in events.finished] == [FinishReason.CANCELLED]
    assert events.started == ()
    assert scheduler.schedule() is None
    assert scheduler.take_events().finished == ()


def test_abort_of_a_running_request_frees_its_blocks_at_once():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(make_request(1))
    step(scheduler, runner)
    scheduler.abort(1)
    assert scheduler.stats().num_blocks_used == 0
    finished = scheduler.take_events().finished[0]
    assert (finished.reason, finished.num_output_tokens) == (FinishReason.CANCELLED, 1)


def test_abort_halfway_through_the_prompt_still_says_started():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 40))
    step(scheduler, runner, elapsed_s=3.0)
    scheduler.abort(1)
    events = scheduler.take_events()
    assert [(started.request_id, started.prefill_s) for started in events.started] == [(1, 3.0)]


def test_abort_in_flight_keeps_the_blocks_until_the_plan_lands():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    survivor = make_request(2, max_tokens=6)
    answers = Answers()
    scheduler.add(make_request(1), survivor)
    answers.take(step(scheduler, runner)[1])
    plan = scheduler.schedule()
    used = scheduler.stats().num_blocks_used
    scheduler.abort(1)
    scheduler.abort(1)
    assert scheduler.stats().num_blocks_used == used
    runner.forward(plan)
    events = scheduler.commit(plan, runner.sample(plan), 1.0)
    assert events.request_ids.tolist() == [2]
    assert [(done.request_id, done.reason) for done in events.finished] == [(1, FinishReason.CANCELLED)]
    assert scheduler.stats().num_blocks_used < used
    answers.take(events)
    while scheduler.has_work:
        answers.take(step(scheduler, runner)[1])
    assert answers.tokens[2] == alone(survivor)


def test_abort_in_flight_renumbers_the_logprobs_of_the_others():
    scheduler = make_scheduler()
    scheduler.add(*(make_request(request_id, 2, top_logprobs=0) for request_id in (1, 2, 3)))
    plan = scheduler.schedule()
    scheduler.abort(2)
    none = np.empty(0, dtype=np.int32)
    rows = {index: LogprobRow(-float(index + 1), none, none.astype(np.float32)) for index in range(3)}
    events = scheduler.commit(plan, output(plan, logprobs=rows), 1.0)
    assert events.request_ids.tolist() == [1, 3]
    assert {index: row.chosen for index, row in events.logprobs.items()} == {0: -1.0, 1: -3.0}


def test_abort_of_unknown_and_ended_ids_is_ignored():
    scheduler = make_scheduler()
    scheduler.add(make_request(1, max_tokens=1))
    scheduler.abort(99)
    run_all(scheduler, make_runner(scheduler))
    scheduler.abort(1)
    assert scheduler.take_events().finished == ()


def test_id_may_come_again_after_its_end():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    for _ in range(2):
        request = make_request(1)
        scheduler.add(request)
        assert run_all(scheduler, runner).tokens[1] == alone(request)


# Preemption


def preempting(**changes):
    """Two requests in a pool that holds both prompts and only one full answer."""
    scheduler = make_scheduler(num_blocks=6, policies=CARELESS, **changes)
    old, young = make_request(1, 4, max_tokens=16), make_request(2, 4, max_tokens=16)
    scheduler.add(old, young)
    return scheduler, make_runner(scheduler), old, young


def test_youngest_gives_way_and_both_answers_stand():
    scheduler, runner, old, young = preempting()
    answers = run_all(scheduler, runner)
    assert scheduler.stats().preemptions_total >= 1
    assert answers.tokens == {1: alone(old), 2: alone(young)}
    assert list(answers.finished) == [1, 2]


def test_preempted_request_keeps_its_answer_and_its_place():
    scheduler, runner, _, young = preempting()
    scheduler.add(make_request(3, 1, max_tokens=1))
    tokens = []
    while not scheduler.stats().preemptions_total:
        plan, events = step(scheduler, runner)
        tokens += events.token_ids[events.request_ids == 2].tolist()
    # Request 3 came and went before the pool ran out.
    assert lens(plan).keys() == {1}
    assert young.row == -1
    assert young.token_ids.tolist() == young.prompt_ids.tolist() + tokens
    scheduler.add(make_request(4, 1, max_tokens=1))
    later = []
    while scheduler.has_work:
        later += [finished.request_id for finished in step(scheduler, runner)[1].finished]
    assert later.index(1) < later.index(2)
    assert later.index(4) > later.index(1)


def test_preempted_request_resumes_at_the_front_and_computes_everything_again():
    scheduler, runner, _, young = preempting(prefix_cache=False)
    while not scheduler.stats().preemptions_total:
        step(scheduler, runner)
    known = len(young.token_ids)
    scheduler.add(make_request(3, 2))
    while young.row == -1:
        plan, _ = step(scheduler, runner)
    assert plan.num_computed[plan.request_ids == 2].tolist() == [0]
    assert lens(plan)[2] == min(known, scheduler.config.max_num_batched_tokens)
    # Its last token had been chosen and had no KV yet.
    assert scheduler.stats().recomputed_tokens_total == known - 1


def test_nothing_is_admitted_in_a_step_that_preempted():
    scheduler, runner, _, _ = preempting()
    while True:
        before = scheduler.stats()
        scheduler.abort(50)
        if not scheduler.stats().num_waiting:
            scheduler.add(make_request(50, 1, max_tokens=1))
        plan, events = step(scheduler, runner)
        if scheduler.stats().preemptions_total > before.preemptions_total:
            break
        assert not any(done.request_id == 1 for done in events.finished)
    assert 50 not in lens(plan)


def test_started_is_said_once_across_a_preemption():
    scheduler, runner, _, _ = preempting()
    assert run_all(scheduler, runner).started.keys() == {1, 2}


def test_request_is_not_let_in_to_be_thrown_out_at_the_next_block_edge():
    scheduler = make_scheduler(num_blocks=6)
    runner = make_runner(scheduler)
    answers = Answers()
    scheduler.add(make_request(1, 15, max_tokens=8), make_request(2, 5, max_tokens=8))
    plan, events = step(scheduler, runner)
    answers.take(events)
    # Four blocks and two fill the pool, and the first request needs a fifth two tokens later.
    assert lens(plan) == {1: 15}
    run_all(scheduler, runner, answers)
    assert scheduler.stats().preemptions_total == 0


def test_crowd_in_a_small_pool_ends_with_every_answer_right():
    scheduler = make_scheduler(num_blocks=12, max_num_seqs=6, policies=CARELESS)
    requests = [make_request(i, 1 + i % 9, max_tokens=30 - i, temperature=i % 2, seed=i) for i in range(24)]
    scheduler.add(*requests)
    answers = run_all(scheduler, make_runner(scheduler))
    assert scheduler.stats().preemptions_total > 5
    assert answers.tokens == {request.request_id: alone(request) for request in requests}
    assert scheduler.stats().num_blocks_used == 0
