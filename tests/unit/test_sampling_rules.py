"""Rules on single ids: what they do to logits, alone, together, and in mixed batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.errors import ErrorCode
from rung.sampling.edits import edited_logits
from rung.sampling.rules import BadWords, TokenRules
from rung.sampling.sampler import sample
from rung.scheduler.batch import RuledRow, SamplingColumns
from tests.sampling_oracle import PlainRules, distribution, edit

VOCAB_SIZE = 24
IDS = st.integers(0, VOCAB_SIZE - 1)
PLAIN_RULES = st.builds(
    PlainRules,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -1.5, 0.25, 2.0]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.0]),
    bias=st.dictionaries(IDS, st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=4),
    allowed_ids=st.none() | st.lists(IDS, min_size=1, max_size=12).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
)


def columns(
    num_rows: int, *, temperature: float = 0.0, min_p: float = 0.0, typical_p: float = 1.0
) -> SamplingColumns:
    """Rows without rules, at positions 0, 1, ..."""
    return SamplingColumns(
        temperature=np.full(num_rows, temperature, dtype=np.float32),
        top_k=np.zeros(num_rows, dtype=np.int32),
        top_p=np.ones(num_rows, dtype=np.float32),
        seed=np.full(num_rows, 7, dtype=np.uint64),
        sample_index=np.zeros(num_rows, dtype=np.int32),
        position=np.arange(num_rows),
        top_logprobs=np.full(num_rows, -1, dtype=np.int32),
        min_p=np.full(num_rows, min_p, dtype=np.float32),
        typical_p=np.full(num_rows, typical_p, dtype=np.float32),
    )


def ruled(index: int, rules: PlainRules, prompt: list[int], answer: list[int]) -> RuledRow:
    """A row as the scheduler would describe it."""
    built = rules.built()
    return RuledRow(
        index,
        built,
        np.unique(np.array(prompt if built.reads_prompt else [], dtype=np.int32)),
        np.array(answer if built.reads_answer else [], dtype=np.int32),
    )


ROWS = st.lists(
    st.tuples(
        st.none() | PLAIN_RULES,
        st.lists(IDS, min_size=1, max_size=8),
        st.lists(st.integers(0, 5), max_size=8),
        st.none() | st.lists(IDS, max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150)
@given(ROWS, st.integers(0, 2**32))
def test_a_mixed_batch_is_edited_as_each_row_alone_by_the_oracle(
    rows: list[tuple[PlainRules | None, list[int], list[int], list[int] | None]], seed: int
) -> None:
    logits = (np.random.default_rng(seed).standard_normal((len(rows), VOCAB_SIZE)) * 4).astype(np.float32)
    before = logits.copy()
    batch = replace(
        columns(len(rows)),
        ruled=tuple(
            ruled(index, rules, prompt, answer)
            for index, (rules, prompt, answer, _) in enumerate(rows)
            if rules is not None
        ),
        banned_ids=tuple(
            (index, np.array(banned, dtype=np.int32))
            for index, (*_, banned) in enumerate(rows)
            if banned is not None
        ),
    )
    edited_rows, edited = edited_logits(logits, batch)
    assert np.array_equal(logits, before), "raw logits are needed for logprobs"
    wanted = [i for i, (rules, *_, banned) in enumerate(rows) if rules is not None or banned is not None]
    assert edited_rows.tolist() == wanted
    for index, got in zip(wanted, edited, strict=True):
        rules, prompt, answer, banned = rows[index]
        expected = edit(logits[index].tolist(), rules or PlainRules(), prompt, answer, banned or ())
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_rows_without_rules_are_not_copied() -> None:
    logits = np.zeros((3, VOCAB_SIZE), dtype=np.float32)
    rows, edited = edited_logits(logits, columns(3))
    assert len(rows) == 0
    assert edited.size == 0
    assert not columns(3, temperature=1.0).special_rows().any()
    assert columns(3, temperature=1.0, min_p=0.1).special_rows().all()
    assert not columns(3, temperature=0.0, min_p=0.1, typical_p=0.5).special_rows().any()


@pytest.mark.parametrize(
    "rules",
    [
        PlainRules(repetition_penalty=1.3, bias={3: 0.7}),
        PlainRules(frequency_penalty=0.4, presence_penalty=-0.6),
        PlainRules(allowed_ids=(1, 2, 4, 7, 9), bad_words=((5, 1), (2,))),
    ],
)
@pytest.mark.parametrize("filters", [{}, {"min_p": 0.15}, {"typical_p": 0.7}])
def test_draws_under_rules_have_the_exact_probabilities(rules: PlainRules, filters: dict[str, float]) -> None:
    row = np.random.default_rng(5).standard_normal(12).astype(np.float32)
    prompt, answer = [0, 3, 3], [4, 7, 4, 5]
    expected = distribution(edit(row.tolist(), rules, prompt, answer), temperature=0.9, **filters)
    num = 6_000
    batch = replace(
        columns(num, temperature=0.9, **filters),
        ruled=tuple(ruled(index, rules, prompt, answer) for index in range(num)),
    )
    counts = np.bincount(sample(np.tile(row, (num, 1)), batch).token_ids, minlength=len(row))
    assert counts[list(expected)].sum() == num
    wanted = num * np.array(list(expected.values()))
    chi_square = ((counts[list(expected)] - wanted) ** 2 / wanted).sum()
    # Mean plus 4 standard deviations of chi-square; the seed is fixed.
    freedom = max(len(expected) - 1, 1)
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_a_bad_word_is_forbidden_only_where_it_would_be_completed() -> None:
    words = BadWords([np.array(word, dtype=np.int32) for word in ([9], [1, 2], [1, 1, 3], [4, 5, 6, 7])])

    def banned(*answer: int) -> set[int]:
        return set(words.banned(np.array(answer, dtype=np.int32)).tolist())

    assert banned() == {9}
    assert banned(1) == {9, 2}
    assert banned(1, 1) == {9, 2, 3}
    assert banned(4, 5, 6) == {9, 7}
    assert banned(5, 6) == {9}
    assert banned(1, 1, 8) == {9}


def test_a_row_whose_rules_leave_nothing_fails_alone() -> None:
    rules = PlainRules(allowed_ids=(3,), bad_words=((3,),))
    batch = replace(columns(2), ruled=(ruled(1, rules, [1], []),))
    sampled = sample(np.zeros((2, VOCAB_SIZE), dtype=np.float32), batch)
    assert list(sampled.failed) == [1]
    assert sampled.failed[1].code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_at_the_edge_of_float32_stay_finite(temperature: float) -> None:
    rules = PlainRules(repetition_penalty=1e-6, frequency_penalty=-2.0, bias={0: 100.0, 1: -100.0})
    logits = np.array([[3e38, -3e38, 3.4e38, 0]], dtype=np.float32)
    batch = replace(columns(1, temperature=temperature), ruled=(ruled(0, rules, [0, 1, 2], [0, 1] * 50),))
    edited = edited_logits(logits, batch)[1]
    assert np.isfinite(edited).all()
    sampled = sample(logits, batch)
    assert not sampled.failed
    assert sampled.token_ids[0] in (0, 2)


def test_a_row_that_is_not_finite_fails_with_its_rules_and_warns_of_nothing() -> None:
    logits = np.array([[np.nan, np.inf, -np.inf, 0]], dtype=np.float32)
    rules = PlainRules(repetition_penalty=1.5, presence_penalty=1.0, bias={1: -1.0})
    batch = replace(columns(1), ruled=(ruled(0, rules, [0, 1, 2], [0, 1, 2]),))
    with np.errstate(all="raise"):
        sampled = sample(logits, batch)
    assert sampled.failed[0].code is ErrorCode.NON_FINITE


def test_rules_that_change_nothing_say_so() -> None:
    assert TokenRules().changes_nothing
    for rules in (
        PlainRules(repetition_penalty=1.1),
        PlainRules(frequency_penalty=0.1),
        PlainRules(presence_penalty=-0.1),
        PlainRules(bias={1: 0.0}),
        PlainRules(allowed_ids=(1,)),
        PlainRules(bad_words=((1,),)),
    ):
        assert not rules.built().changes_nothing
