"""The fake runner agrees with its oracle, and every kind of damage to a plan changes an answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rung.errors import ErrorCode
from rung.runner.fake import POISON, FakeRunner, expected_tokens, mix, mix_columns, next_allowed
from rung.scheduler.batch import SamplingColumns, StepPlan

VOCAB_SIZE = 50_000
PROMPT = [11, 12, 13, 14, 15, 16]


def make_plan(
    tokens: list[list[int]],
    computed: list[int],
    tables: list[list[int]],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    sample_index: int = 0,
    top_logprobs: int = -1,
    banned: tuple[int, ...] = (),
    freed: tuple[int, ...] = (),
) -> StepPlan:
    """A plan in which every row samples."""
    num_rows = len(tokens)
    lens = [len(row) for row in tokens]
    return StepPlan(
        step_id=1,
        rows=np.arange(num_rows, dtype=np.int32),
        request_ids=np.arange(num_rows, dtype=np.int64),
        query_start=np.cumsum([0, *lens], dtype=np.int32),
        token_ids=np.array([token for row in tokens for token in row], dtype=np.int32),
        num_computed=np.array(computed, dtype=np.int32),
        block_tables=np.array(tables, dtype=np.int32),
        sample_rows=np.arange(num_rows, dtype=np.int32),
        sampling=SamplingColumns(
            temperature=np.full(num_rows, temperature, dtype=np.float32),
            top_k=np.zeros(num_rows, dtype=np.int32),
            top_p=np.ones(num_rows, dtype=np.float32),
            seed=np.full(num_rows, seed, dtype=np.uint64),
            sample_index=np.full(num_rows, sample_index, dtype=np.int32),
            position=np.array(computed, dtype=np.int64) + np.array(lens),
            top_logprobs=np.full(num_rows, top_logprobs, dtype=np.int32),
            min_p=np.zeros(num_rows, dtype=np.float32),
            typical_p=np.ones(num_rows, dtype=np.float32),
            banned_ids=tuple((row, np.array(banned, dtype=np.int32)) for row in range(num_rows) if banned),
        ),
        freed_blocks=np.array(freed, dtype=np.int32),
    )


def run(runner: FakeRunner, plan: StepPlan) -> list[int]:
    runner.forward(plan)
    return runner.sample(plan).token_ids.tolist()


def first_token(prompt: list[int] = PROMPT, **sampling: float) -> int:
    return expected_tokens(prompt, 1, vocab_size=VOCAB_SIZE, **sampling)[0]


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(num_blocks=8, block_size=4, vocab_size=VOCAB_SIZE)


def test_mix_of_columns_is_the_mix_of_integers():
    columns = [np.array([0, 1, 2**64 - 1, 12345], dtype=np.uint64) * np.uint64(k) for k in (1, 3, 5)]
    expected = [mix(*(int(column[row]) for column in columns)) for row in range(4)]
    assert mix_columns(*columns).tolist() == expected


def test_whole_prompt_then_single_tokens_give_the_expected_answer(runner):
    tokens, expected = list(PROMPT), expected_tokens(PROMPT, 8, vocab_size=VOCAB_SIZE)
    table = [[5, 2, 7, 0]]
    tokens += run(runner, make_plan([tokens], [0], table))
    while len(tokens) < len(PROMPT) + 8:
        tokens += run(runner, make_plan([tokens[-1:]], [len(tokens) - 1], table))
    assert tokens[len(PROMPT) :] == expected


@pytest.mark.parametrize("cut", range(1, len(PROMPT)))
def test_chunks_do_not_change_the_answer(runner, cut):
    table = [[3, 1]]
    run(runner, make_plan([PROMPT[:cut]], [0], table))
    assert run(runner, make_plan([PROMPT[cut:]], [cut], table)) == [first_token()]


def test_neighbours_do_not_change_the_answer(runner):
    other = [9, 8, 7]
    plan = make_plan([PROMPT, other, [4]], [0, 0, 0], [[3, 1], [0, -1], [6, -1]])
    assert run(runner, plan) == [first_token(), first_token(other), first_token([4])]


def test_greedy_ignores_seed_and_sample_index_and_random_does_not():
    assert first_token(seed=1, sample_index=1) == first_token()
    random = {
        first_token(temperature=1.0, seed=seed, sample_index=index) for seed in (1, 2) for index in (0, 1)
    }
    assert len(random) == 4


def test_random_rows_follow_the_oracle(runner):
    plan = make_plan([PROMPT], [0], [[3, 1]], temperature=0.7, seed=2**64 - 1, sample_index=2)
    assert run(runner, plan) == [first_token(temperature=0.7, seed=2**64 - 1, sample_index=2)]


def test_wrong_block_changes_the_answer(runner):
    run(runner, make_plan([PROMPT[:5]], [0], [[3, 1]]))
    assert run(runner, make_plan([PROMPT[5:]], [5], [[3, 2]])) != [first_token()]


def test_swapped_blocks_change_the_answer(runner):
    prompt = list(range(1, 9))
    run(runner, make_plan([prompt], [0], [[3, 1, 0]]))
    swapped = run(runner, make_plan([[9]], [8], [[1, 3, 0]]))
    assert swapped != [first_token([*prompt, 9])]


def test_block_freed_too_early_changes_the_answer(runner):
    run(runner, make_plan([PROMPT[:5]], [0], [[3, 1]]))
    assert run(runner, make_plan([PROMPT[5:]], [5], [[3, 1]], freed=(3,))) != [first_token()]


def test_two_rows_in_one_block_change_an_answer_in_the_same_step(runner):
    other = [9, 8, 7, 6, 5, 4]
    answers = run(runner, make_plan([PROMPT, other], [0, 0], [[3, 1], [0, 1]]))
    assert answers != [first_token(), first_token(other)]


def test_lost_token_changes_the_answer(runner):
    run(runner, make_plan([PROMPT[:4]], [0], [[3, 1]]))
    assert run(runner, make_plan([[0], PROMPT[5:]][1:], [5], [[3, 1]])) != [first_token()]


def test_wrong_position_changes_the_answer(runner):
    plan = make_plan([PROMPT], [0], [[3, 1]])
    moved = replace(plan, sampling=replace(plan.sampling, position=plan.sampling.position + 1))
    assert run(runner, moved) != [first_token()]


def test_freed_blocks_are_poisoned_before_the_step_stores(runner):
    run(runner, make_plan([PROMPT], [0], [[3, 1]]))
    assert run(runner, make_plan([PROMPT], [0], [[1, 3]], freed=(3, 1))) == [first_token()]
    run(runner, make_plan([[1]], [0], [[0]], freed=(3, 1)))
    assert set(runner._kv[[3, 1]].ravel().tolist()) == {POISON}


@pytest.mark.parametrize("table", [[3, -1], [3, 8]])
def test_table_that_does_not_cover_the_tokens_is_refused(runner, table):
    with pytest.raises(ValueError, match="do not cover"):
        runner.forward(make_plan([PROMPT], [0], [table]))


def test_banned_ids_are_never_chosen(runner):
    wanted = first_token()
    banned = (wanted, wanted + 1)
    assert run(runner, make_plan([PROMPT], [0], [[3, 1]], banned=banned)) == [wanted + 2]


def test_a_row_whose_every_id_is_banned_fails_alone():
    runner = FakeRunner(num_blocks=8, block_size=4, vocab_size=3)
    plan = make_plan([PROMPT, [1]], [0, 0], [[3, 1], [0, -1]], banned=(0, 1, 2))
    plan = replace(plan, sampling=replace(plan.sampling, banned_ids=plan.sampling.banned_ids[:1]))
    runner.forward(plan)
    output = runner.sample(plan)
    assert {row: error.code for row, error in output.failed.items()} == {0: ErrorCode.INVALID_ARGUMENT}
    assert output.token_ids[1] == expected_tokens([1], 1, vocab_size=3)[0]


def test_next_allowed_wraps():
    assert next_allowed(4, {4, 0}, 5) == 1
    assert next_allowed(4, set(range(5)), 5) is None


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_finite_sorted_and_agree_with_the_choice(runner, count):
    plan = make_plan([PROMPT], [0], [[3, 1]], top_logprobs=count)
    runner.forward(plan)
    output = runner.sample(plan)
    row = output.logprobs[0]
    assert len(row.top_ids) == len(row.top_logprobs) == count
    assert len(set(row.top_ids.tolist())) == count
    assert np.isfinite(row.chosen)
    assert row.chosen <= 0
    assert (np.diff(row.top_logprobs) < 0).all()
    if count:
        assert (row.top_ids[0], row.top_logprobs[0]) == (output.token_ids[0], row.chosen)


def test_no_logprobs_unless_asked(runner):
    plan = make_plan([PROMPT], [0], [[3, 1]])
    runner.forward(plan)
    assert runner.sample(plan).logprobs == {}


def test_step_without_a_sampling_row(runner):
    plan = make_plan([PROMPT[:2]], [0], [[3, 1]])
    none = np.empty(0, dtype=np.int32)
    plan = replace(plan, sample_rows=none, sampling=plan.sampling.take(none))
    runner.forward(plan)
    output = runner.sample(plan)
    assert (output.token_ids.tolist(), output.logprobs, output.failed) == ([], {}, {})


def test_oracle_stops_at_a_stop_id_and_bans_it_before_min_tokens():
    free = expected_tokens(PROMPT, 6, vocab_size=VOCAB_SIZE)
    assert expected_tokens(PROMPT, 6, vocab_size=VOCAB_SIZE, stop_token_ids={free[2]}) == free[:3]
    later = expected_tokens(PROMPT, 6, vocab_size=VOCAB_SIZE, stop_token_ids={free[2]}, min_tokens=3)
    assert later[:3] == [free[0], free[1], (free[2] + 1) % VOCAB_SIZE]
    assert len(later) == 6


def test_info_tells_the_memory_of_a_block(runner):
    assert runner.info.kv_bytes_per_block == 4 * 8
    assert runner.info.batch_invariant
