"""What the sampler chooses, what it reports, and that neighbours never matter."""

from __future__ import annotations

import numpy as np
import pytest

from rung.errors import ErrorCode
from rung.sampling.rules import TokenRules
from rung.sampling.sampler import sample
from rung.scheduler.batch import RuledRow, SamplingColumns

VOCAB_SIZE = 1000


def columns(
    num_rows: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    sample_index: int = 0,
    positions: np.ndarray | None = None,
    top_logprobs: int = -1,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    banned_ids: tuple[tuple[int, list[int]], ...] = (),
) -> SamplingColumns:
    """The same parameters for every row; positions count up from 0 unless given."""
    return SamplingColumns(
        temperature=np.full(num_rows, temperature, dtype=np.float32),
        top_k=np.full(num_rows, top_k, dtype=np.int32),
        top_p=np.full(num_rows, top_p, dtype=np.float32),
        seed=np.full(num_rows, seed, dtype=np.uint64),
        sample_index=np.full(num_rows, sample_index, dtype=np.int32),
        position=np.arange(num_rows) if positions is None else positions,
        top_logprobs=np.full(num_rows, top_logprobs, dtype=np.int32),
        min_p=np.full(num_rows, min_p, dtype=np.float32),
        typical_p=np.full(num_rows, typical_p, dtype=np.float32),
        banned_ids=tuple((index, np.array(ids, dtype=np.int32)) for index, ids in banned_ids),
    )


def random_logits(num_rows: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((num_rows, VOCAB_SIZE)) * 3).astype(np.float32)


def draws(row: np.ndarray, num: int, **parameters: float) -> np.ndarray:
    """Tokens of one row of logits at positions 0..num."""
    return sample(np.tile(row, (num, 1)), columns(num, **parameters)).token_ids  # type: ignore[arg-type]


def test_greedy_takes_the_largest_and_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros((3, 10), dtype=np.float32)
    logits[0, 7] = 1
    logits[1, [8, 3]] = 2
    sampled = sample(logits, columns(3))
    assert sampled.token_ids.tolist() == [7, 3, 0]
    assert sampled.token_ids.dtype == np.int32
    assert sampled.logprobs == {}
    assert sampled.failed == {}


def test_no_rows_is_an_empty_answer() -> None:
    sampled = sample(np.empty((0, 10), dtype=np.float32), columns(0))
    assert len(sampled.token_ids) == 0


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_a_very_small_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = random_logits(20)
    logits[:, 500] = 60
    logits[:, 501] = -3e38
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        sampled = sample(logits, columns(20, temperature=temperature, top_p=0.9))
    assert sampled.token_ids.tolist() == [500] * 20


def test_a_very_large_temperature_is_uniform_over_the_kept_ids() -> None:
    row = np.arange(8, dtype=np.float32)
    counts = np.bincount(draws(row, 8000, temperature=1e6), minlength=8)
    assert counts.min() > 900


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.7},
        {"temperature": 1.2, "min_p": 0.2},
        {"temperature": 1.0, "typical_p": 0.6},
        {"temperature": 0.8, "top_k": 10, "top_p": 0.95, "min_p": 0.1, "typical_p": 0.8},
    ],
)
def test_sampled_frequencies_are_the_exact_probabilities(parameters: dict[str, float]) -> None:
    row = np.array([1.5, -0.5, 2.0, 0.0, 0.7, -2.0, 1.1, 0.3, -1.0, 0.9, 1.8, -0.2], dtype=np.float32)
    # The distribution again, in the plainest words.
    scaled = np.exp(row.astype(np.float64) / np.float32(parameters["temperature"]))
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    ranked = ranked[: int(parameters.get("top_k", 0)) or len(row)]
    shares = scaled[ranked] / scaled[ranked].sum()
    num_kept = int((np.cumsum(shares) < parameters.get("top_p", 1.0) - 1e-12).sum()) + 1
    kept = ranked[: min(num_kept, len(ranked))]
    kept = [token for token in kept if scaled[token] / scaled.max() >= parameters.get("min_p", 0.0)]
    shares = scaled[kept] / scaled[kept].sum()
    surprise = np.abs(-np.log(shares) + (shares * np.log(shares)).sum())
    order = np.argsort(surprise)
    num_typical = int((np.cumsum(shares[order]) < parameters.get("typical_p", 1.0) - 1e-12).sum()) + 1
    kept = [kept[place] for place in order[:num_typical]]
    expected = scaled[kept] / scaled[kept].sum()

    num = 20_000
    counts = np.bincount(draws(row, num, seed=42, **parameters), minlength=len(row))
    assert counts.sum() == counts[kept].sum() == num
    chi_square = ((counts[kept] - num * expected) ** 2 / (num * expected)).sum()
    # Mean plus 4 standard deviations of chi-square; the seed is fixed.
    freedom = len(kept) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_top_k_keeps_the_lowest_ids_among_ties_at_the_cut() -> None:
    row = np.array([0, 1, 1, 5, 1, 1], dtype=np.float32)
    assert set(draws(row, 400, temperature=5.0, top_k=3).tolist()) == {1, 2, 3}


def test_top_p_keeps_the_lowest_ids_among_ties_at_the_cut() -> None:
    row = np.zeros(10, dtype=np.float32)
    # Three of ten equal ids reach 0.25; two reach only 0.2.
    assert set(draws(row, 400, temperature=1.0, top_p=0.25).tolist()) == {0, 1, 2}


def test_top_p_that_one_id_reaches_leaves_that_id_alone() -> None:
    row = np.array([0, 4, 4, 0], dtype=np.float32)
    assert set(draws(row, 100, temperature=1.0, top_p=1e-6).tolist()) == {1}


def test_top_p_shares_are_of_what_top_k_kept() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    # Of the first two ids, the first has 4/7 = 0.571: it alone reaches 0.55, which it does not of all.
    assert set(draws(row, 400, temperature=1.0, top_k=2, top_p=0.55).tolist()) == {0}
    assert set(draws(row, 400, temperature=1.0, top_p=0.55).tolist()) == {0, 1}


def test_a_nucleus_of_nearly_all_ids_is_exact() -> None:
    row = np.zeros(5000, dtype=np.float32)
    tokens = draws(row, 20_000, temperature=1.0, top_p=0.5)
    assert tokens.max() == 2499
    assert len(set(tokens.tolist())) > 2400


def test_banned_ids_are_never_chosen_and_their_logprobs_stay_raw() -> None:
    row = np.array([1, 9, 8, 7], dtype=np.float32)
    logits = np.tile(row, (100, 1))
    bans = tuple((index, [1, 2]) for index in range(100))
    for temperature, top_k in ((0.0, 0), (1.0, 0), (3.0, 3)):
        sampled = sample(
            logits, columns(100, temperature=temperature, top_k=top_k, banned_ids=bans, top_logprobs=1)
        )
        assert set(sampled.token_ids.tolist()) <= {0, 3}
        assert sampled.logprobs[0].top_ids.tolist() == [1]
    assert logits[0].tolist() == row.tolist()


def test_a_row_whose_ids_are_all_banned_fails_alone() -> None:
    sampled = sample(random_logits(2), columns(2, banned_ids=((0, list(range(VOCAB_SIZE))),)))
    assert list(sampled.failed) == [0]
    assert sampled.failed[0].code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(value: float, temperature: float) -> None:
    logits = random_logits(3)
    alone = sample(logits[[0, 2]], columns(2, temperature=temperature, positions=np.array([0, 2])))
    logits[1, 17] = value
    sampled = sample(
        logits, columns(3, temperature=temperature, top_p=0.9 if temperature else 1.0, top_logprobs=0)
    )
    assert list(sampled.failed) == [1]
    assert sampled.failed[1].code is ErrorCode.NON_FINITE
    assert sorted(sampled.logprobs) == [0, 2]
    if not temperature:
        assert sampled.token_ids[[0, 2]].tolist() == alone.token_ids.tolist()


def test_b46_a_row_alone_is_the_row_in_a_batch_bitwise() -> None:
    generator = np.random.default_rng(3)
    num = 60
    logits = random_logits(num)
    rules = TokenRules(1.5, 0.3, 0.2, np.array([5], np.int32), np.array([4], np.float32))
    batch = SamplingColumns(
        temperature=generator.choice([0, 0.3, 1, 2], num).astype(np.float32),
        top_k=generator.choice([0, 1, 7, 400], num).astype(np.int32),
        top_p=generator.choice([1, 0.95, 0.5], num).astype(np.float32),
        seed=generator.integers(0, 2**64, num, dtype=np.uint64),
        sample_index=generator.integers(0, 4, num, dtype=np.int32),
        position=generator.integers(0, 10_000, num),
        top_logprobs=generator.choice([-1, 0, 5], num).astype(np.int32),
        min_p=generator.choice([0, 0.01, 0.2], num).astype(np.float32),
        typical_p=generator.choice([1, 0.9, 0.3], num).astype(np.float32),
        banned_ids=((4, np.array([1, 2], dtype=np.int32)),),
        ruled=tuple(
            RuledRow(index, rules, np.arange(5, dtype=np.int32), np.array([index, 3, 3], dtype=np.int32))
            for index in range(0, num, 7)
        ),
    )
    together = sample(logits, batch)
    for index in range(num):
        alone = sample(logits[[index]], batch.take(np.array([index])))
        assert alone.token_ids[0] == together.token_ids[index]
        assert (0 in alone.logprobs) == (index in together.logprobs)
        if 0 in alone.logprobs:
            assert alone.logprobs[0].chosen == together.logprobs[index].chosen
            assert alone.logprobs[0].top_logprobs.tolist() == together.logprobs[index].top_logprobs.tolist()


def test_seed_sample_index_and_position_each_change_the_draw() -> None:
    row = random_logits(1)[0]
    base = draws(row, 100, temperature=2.0)
    assert draws(row, 100, temperature=2.0).tolist() == base.tolist()
    assert draws(row, 100, temperature=2.0, seed=1).tolist() != base.tolist()
    assert draws(row, 100, temperature=2.0, sample_index=1).tolist() != base.tolist()
    assert len(set(base.tolist())) > 10


def test_logprobs_are_the_log_softmax_before_temperature_and_filters() -> None:
    logits = random_logits(4)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    sampled = sample(logits, columns(4, temperature=5.0, top_k=300, seed=8, top_logprobs=20))
    for index, row in sampled.logprobs.items():
        assert row.chosen == pytest.approx(exact[index, sampled.token_ids[index]], abs=1e-9)
        assert row.top_ids.tolist() == np.argsort(-exact[index], kind="stable")[:20].tolist()
        assert row.top_logprobs == pytest.approx(exact[index, row.top_ids], abs=1e-5)
        assert row.top_ids.dtype == np.int32
        assert row.top_logprobs.dtype == np.float32


def test_top_logprobs_ties_go_to_the_lower_id_and_stop_at_the_vocabulary() -> None:
    logits = np.array([[2, 5, 2, 5]], dtype=np.float32)
    row = sample(logits, columns(1, top_logprobs=3)).logprobs[0]
    assert row.top_ids.tolist() == [1, 3, 0]
    everything = sample(logits, columns(1, top_logprobs=20)).logprobs[0]
    assert everything.top_ids.tolist() == [1, 3, 0, 2]
    assert len(sample(logits, columns(1, top_logprobs=0)).logprobs[0].top_ids) == 0


def test_b19_the_chosen_logprob_is_finite_at_the_edge_of_float32() -> None:
    logits = np.array([[3e38, -3e38]], dtype=np.float32)
    sampled = sample(logits, columns(1, banned_ids=((0, [0]),), top_logprobs=2))
    assert sampled.token_ids.tolist() == [1]
    assert np.isfinite(np.float32(sampled.logprobs[0].chosen))
    assert np.isfinite(sampled.logprobs[0].top_logprobs).all()
