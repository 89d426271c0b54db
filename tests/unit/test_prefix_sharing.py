"""KV that requests share: prefixes found again, prompts in the making, samples of one prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rung.errors import ErrorCode, RequestError
from rung.scheduler.batch import StepOutput
from tests.scheduling import (
    CARELESS,
    VOCAB_SIZE,
    Answers,
    alone,
    make_request,
    make_runner,
    make_scheduler,
    run_all,
    step,
)

PROMPT = [(position * 5 + 1) % VOCAB_SIZE for position in range(24)]


def computed(plan):
    """First computed position and number of tokens, by request."""
    ids = plan.request_ids.tolist()
    return dict(zip(ids, zip(plan.num_computed.tolist(), plan.query_lens.tolist(), strict=True), strict=True))


def run_one(scheduler, runner, request):
    """Run one request to its end; its answer and how much of its prompt was cached."""
    scheduler.add(request)
    answers = run_all(scheduler, runner)
    return answers.tokens[request.request_id], answers.started[request.request_id].num_cached_tokens


# Prefixes


@pytest.mark.parametrize(
    ("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12), (24, 20)]
)
def test_b42_hit_covers_full_blocks_before_the_last_token_and_changes_no_answer(length, cached):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    run_one(scheduler, runner, make_request(1, PROMPT))
    request = make_request(2, PROMPT[:length], max_tokens=6)
    assert run_one(scheduler, runner, request) == (alone(request), cached)
    again = make_request(3, PROMPT[:length], max_tokens=6)
    assert run_one(scheduler, runner, again) == (alone(again), cached)
    assert scheduler.stats().cached_tokens_total == 2 * cached


def test_b42_a_prefix_that_differs_in_a_token_is_another():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    run_one(scheduler, runner, make_request(1, PROMPT))
    changed = [*PROMPT[:6], (PROMPT[6] + 1) % VOCAB_SIZE, *PROMPT[7:]]
    request = make_request(2, changed)
    assert run_one(scheduler, runner, request) == (alone(request), 4)


def test_an_answer_is_a_prefix_of_the_next_turn():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    first, _ = run_one(scheduler, runner, make_request(1, PROMPT, max_tokens=9))
    # 33 tokens, of which the last was never computed.
    request = make_request(2, [*PROMPT, *first, 1, 2])
    assert run_one(scheduler, runner, request) == (alone(request), 32)


def test_b79_salts_share_nothing():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    run_one(scheduler, runner, make_request(1, PROMPT, salt=b"a"))
    for request_id, salt, cached in ((2, b"b", 0), (3, b"", 0), (4, b"a", 20), (5, b"b", 20)):
        request = make_request(request_id, PROMPT, salt=salt)
        assert run_one(scheduler, runner, request) == (alone(request), cached)


def test_switched_off_nothing_is_found():
    scheduler = make_scheduler(prefix_cache=False)
    runner = make_runner(scheduler)
    for request_id in (1, 2):
        request = make_request(request_id, PROMPT)
        assert run_one(scheduler, runner, request) == (alone(request), 0)


def test_b42_evicted_blocks_are_computed_again():
    scheduler = make_scheduler(num_blocks=8)
    runner = make_runner(scheduler)
    run_one(scheduler, runner, make_request(1, PROMPT))
    run_one(scheduler, runner, make_request(2, 20))
    request = make_request(3, PROMPT)
    answer, cached = run_one(scheduler, runner, request)
    # The second request needed six blocks and two were free: the end of the prefix went.
    assert (answer, cached) == (alone(request), 8)


def test_preempted_request_finds_its_own_blocks():
    def recomputed(prefix_cache):
        scheduler = make_scheduler(num_blocks=9, policies=CARELESS, prefix_cache=prefix_cache)
        requests = [make_request(request_id, 12, max_tokens=16) for request_id in (1, 2)]
        scheduler.add(*requests)
        answers = run_all(scheduler, make_runner(scheduler))
        assert answers.tokens == {request.request_id: alone(request) for request in requests}
        stats = scheduler.stats()
        assert stats.preemptions_total >= 1
        assert stats.cached_tokens_total == 0
        return stats.recomputed_tokens_total

    # The first needed room, so that the end was lost, and the beginning was not.
    assert 0 < recomputed(prefix_cache=True) < recomputed(prefix_cache=False)


def test_block_is_named_when_its_step_has_landed_and_not_before():
    scheduler = make_scheduler()
    scheduler.add(make_request(1, 8))
    plan = scheduler.schedule()
    assert scheduler._rows.kv.prefixes.num_idle == 0
    assert not scheduler._rows.kv.prefixes._block_of
    scheduler.commit(plan, StepOutput(np.array([1], dtype=np.int32), {}, {}), 1.0)
    assert len(scheduler._rows.kv.prefixes._block_of) == 2


def test_blocks_of_a_row_that_failed_are_not_found():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, PROMPT))
    step(scheduler, runner)
    plan = scheduler.schedule()
    error = RequestError(ErrorCode.NON_FINITE, "Not a number.")
    scheduler.commit(plan, StepOutput(np.empty(0, dtype=np.int32), {}, {0: error}), 1.0)
    scheduler.check_integrity()
    request = make_request(2, PROMPT)
    assert run_one(scheduler, runner, request) == (alone(request), 0)


def test_step_that_raised_leaves_nothing_to_be_found():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, PROMPT))
    step(scheduler, runner)
    scheduler.fail(scheduler.schedule(), RequestError(ErrorCode.INTERNAL, "Broken."))
    request = make_request(2, PROMPT)
    assert run_one(scheduler, runner, request) == (alone(request), 8)


# Prompts in the making


def test_second_of_two_identical_prompts_waits_for_the_first_and_uses_its_blocks():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    requests = [make_request(request_id, PROMPT, seed=request_id, temperature=1.0) for request_id in (1, 2)]
    scheduler.add(*requests)
    answers = Answers()
    seen = []
    while 2 not in answers.started:
        plan, events = step(scheduler, runner)
        answers.take(events)
        seen.append(computed(plan))
    assert seen[:3] == [{1: (0, 8)}, {1: (8, 8)}, {1: (16, 8)}]
    assert seen[3] == {1: (24, 1), 2: (20, 4)}
    answers = run_all(scheduler, runner, answers)
    assert answers.tokens == {request.request_id: alone(request) for request in requests}


def test_waiting_ends_where_the_prompts_part():
    scheduler = make_scheduler(max_num_batched_tokens=12)
    runner = make_runner(scheduler)
    other = make_request(2, [*PROMPT[:10], 1, 2, 3])
    scheduler.add(make_request(1, PROMPT), other)
    assert computed(step(scheduler, runner)[0]) == {1: (0, 12)}
    # Both lack their third block, and it is not the same.
    plan, events = step(scheduler, runner)
    assert computed(plan) == {1: (12, 12)}
    answers = Answers()
    answers.take(events)
    plan, events = step(scheduler, runner)
    assert computed(plan)[2] == (8, 5)
    answers.take(events)
    assert run_all(scheduler, runner, answers).tokens[2] == alone(other)


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_second_takes_over_when_the_first_is_gone(how):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    second, third = make_request(2, PROMPT), make_request(3, PROMPT)
    scheduler.add(make_request(1, PROMPT), second, third)
    step(scheduler, runner)
    if how == "aborted":
        scheduler.abort(1)
    else:
        scheduler.fail(scheduler.schedule(), RequestError(ErrorCode.INTERNAL, "Broken."))
    assert computed(step(scheduler, runner)[0]) == {2: (8, 8)}
    answers = run_all(scheduler, runner)
    assert (answers.tokens[2], answers.tokens[3]) == (alone(second), alone(third))
    assert answers.started[3].num_cached_tokens == 20


def test_those_behind_one_that_waits_for_a_prefix_do_not_wait():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, PROMPT[:13]), make_request(2, PROMPT[:13]), make_request(3, 3))
    assert computed(step(scheduler, runner)[0]).keys() == {1, 3}


def test_a_long_look_up_is_spread_over_steps(monkeypatch):
    monkeypatch.setattr("rung.scheduler.prefixes.MAX_NAMED_PER_STEP", 4)
    monkeypatch.setattr("rung.scheduler.prefixes._BATCH", 2)
    scheduler = make_scheduler(max_num_batched_tokens=32)
    runner = make_runner(scheduler)
    prompt = (PROMPT * 2)[:41]
    run_one(scheduler, runner, make_request(1, prompt))
    running = make_request(2, 3, max_tokens=12)
    scheduler.add(running)
    step(scheduler, runner)
    request = make_request(3, prompt)
    scheduler.add(request)
    named = []
    while request.row < 0:
        plan, _ = step(scheduler, runner)
        named.append(len(request.block_names))
    assert named == [4, 8, 10]
    assert computed(plan)[3] == (40, 1)


# Samples of one prompt


def siblings(*ids, length=11, **kwargs):
    return [
        make_request(
            request_id, PROMPT[:length], group=ids[0], sample_index=index, temperature=1.0, seed=5, **kwargs
        )
        for index, request_id in enumerate(ids)
    ]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [2, 4, 5, 8, 9, 11])
def test_b47_samples_share_their_prompt_and_differ(length, prefix_cache):
    scheduler = make_scheduler(prefix_cache=prefix_cache)
    runner = make_runner(scheduler)
    requests = siblings(1, 2, 3, length=length, max_tokens=9)
    scheduler.add(*requests)
    answers = Answers()
    first, events = step(scheduler, runner)
    answers.take(events)
    assert computed(first) == {1: (0, length)}
    second, events = step(scheduler, runner)
    answers.take(events)
    assert computed(second) == {1: (length, 1), 2: (length - 1, 1), 3: (length - 1, 1)}
    # The block in which the first goes on writing is copied for each of the others.
    assert len(second.block_copies) == (2 if (length - 1) % 4 else 0)
    shared = (length - 1) // 4
    tables = second.block_tables[:, :shared]
    assert (tables == tables[0]).all()
    answers = run_all(scheduler, runner, answers)
    assert answers.tokens == {request.request_id: alone(request) for request in requests}
    assert len({tuple(tokens) for tokens in answers.tokens.values()}) == 3
    assert [answers.started[request_id].num_cached_tokens for request_id in (1, 2, 3)] == [
        0,
        length - 1,
        length - 1,
    ]


def test_without_the_copy_a_sample_would_be_wrong():
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    requests = siblings(1, 2)
    scheduler.add(*requests)
    answers = Answers()
    answers.take(step(scheduler, runner)[1])
    plan = scheduler.schedule()
    runner.forward(replace(plan, block_copies=plan.block_copies[:0]))
    answers.take(scheduler.commit(plan, runner.sample(plan), 1.0))
    assert run_all(scheduler, runner, answers).tokens[2] != alone(requests[1])


@pytest.mark.parametrize("aborted", [1, 2, 3])
@pytest.mark.parametrize("after_steps", [0, 1, 2, 3, 4])
def test_aborting_a_sample_before_or_after_the_fork_leaves_the_others(aborted, after_steps):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(scheduler)
    requests = siblings(1, 2, 3, max_tokens=9)
    scheduler.add(*requests)
    answers = Answers()
    for _ in range(after_steps):
        answers.take(step(scheduler, runner)[1])
    scheduler.abort(aborted)
    answers = run_all(scheduler, runner, answers)
    for request in requests:
        if request.request_id != aborted:
            assert answers.tokens[request.request_id] == alone(request)
    assert scheduler.stats().num_blocks_used == 0


def test_samples_that_find_no_row_at_once_fork_later_or_start_from_the_cache():
    scheduler = make_scheduler(max_num_seqs=2)
    runner = make_runner(scheduler)
    requests = siblings(*range(1, 7), max_tokens=5)
    scheduler.add(*requests)
    answers = run_all(scheduler, runner)
    assert answers.tokens == {request.request_id: alone(request) for request in requests}
    cached = [answers.started[request.request_id].num_cached_tokens for request in requests]
    assert cached[:2] == [0, 10]
    assert all(count >= 8 for count in cached[1:])


def test_samples_survive_preemption():
    scheduler = make_scheduler(num_blocks=8, max_model_len=32, policies=CARELESS)
    runner = make_runner(scheduler)
    requests = siblings(1, 2, 3, 4, max_tokens=18)
    scheduler.add(*requests)
    answers = run_all(scheduler, runner)
    assert scheduler.stats().preemptions_total >= 1
    assert answers.tokens == {request.request_id: alone(request) for request in requests}


def test_b09_samples_that_fit_alone_and_not_together_take_turns():
    scheduler = make_scheduler(num_blocks=8, max_model_len=32)
    runner = make_runner(scheduler)
    requests = [make_request(index, 14, max_tokens=18, group=0) for index in range(4)]
    scheduler.add(*(make_request(index, PROMPT[:14], max_tokens=18, group=0) for index in range(4)))
    answers = run_all(scheduler, runner)
    assert len(answers.finished) == len(requests)
    scheduler.check_integrity()
