"""Ranking, top-k, top-p and the draw against a brute force over Python lists and fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rung.sampling.filters import nucleus, pick, ranked_head, scaled_weights

# Few distinct values, so that ties are common; some rows longer than the first head of a nucleus.
LOGITS = st.one_of(
    st.lists(st.integers(-4, 4), min_size=1, max_size=40),
    st.lists(st.integers(-300, 300), min_size=200, max_size=1500),
).map(lambda values: np.array(values, dtype=np.float32) / 8)

EXACT_WEIGHTS = st.one_of(
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
    st.lists(st.integers(1, 9), min_size=150, max_size=300),
).filter(any)


def ranked(logits: np.ndarray) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


@given(LOGITS, st.integers(1, 1600))
def test_ranked_head_is_the_head_of_a_full_sort(logits: np.ndarray, count: int) -> None:
    assert ranked_head(logits, count).tolist() == ranked(logits)[:count]


@given(EXACT_WEIGHTS, st.integers(1, 256))
def test_nucleus_is_the_smallest_prefix_that_reaches_its_share(weights: list[int], numerator: int) -> None:
    # Integer weights and a dyadic share: nothing is rounded, so the cut has to be exact.
    top_p = Fraction(numerator, 256)
    order = ranked(np.array(weights))
    kept, reached = [], 0
    for token in order:
        kept.append(token)
        reached += weights[token]
        if reached >= top_p * sum(weights):
            break
    got = nucleus(np.array(weights, dtype=np.float32), np.array(weights, dtype=np.float64), float(top_p))
    assert got.tolist() == kept


@given(LOGITS, st.floats(0.01, 100), st.floats(1e-6, 1, exclude_max=True))
def test_nucleus_of_real_weights_reaches_its_share_and_no_smaller_set_does(
    logits: np.ndarray, temperature: float, top_p: float
) -> None:
    weights = scaled_weights(logits, temperature, float(logits.max()))
    kept = nucleus(logits, weights, top_p)
    assert kept.tolist() == ranked(logits)[: len(kept)]
    total = sum(Fraction(weight) for weight in weights.tolist())
    inside = sum(Fraction(weight) for weight in weights[kept].tolist())
    rounding = Fraction(1, 10**12)
    assert inside / total >= Fraction(top_p) - rounding
    assert (inside - Fraction(weights[kept[-1]])) / total < Fraction(top_p) + rounding


@given(EXACT_WEIGHTS, st.integers(0, 2**20 - 1))
def test_pick_is_where_the_number_falls_in_the_running_sum(weights: list[int], numerator: int) -> None:
    number = Fraction(numerator, 2**20)
    reached, expected = 0, -1
    for index, weight in enumerate(weights):
        reached += weight
        if reached > number * sum(weights):
            expected = index
            break
    assert pick(np.array(weights, dtype=np.float64), float(number)) == expected


@given(EXACT_WEIGHTS, st.floats(0, 1, exclude_max=True))
def test_pick_never_takes_an_id_without_weight(weights: list[int], number: float) -> None:
    scaled = np.array(weights, dtype=np.float64) / 3
    assert scaled[pick(scaled, number)] > 0
    assert scaled[pick(scaled, float(np.nextafter(1, 0)))] > 0


@given(LOGITS, st.floats(1e-300, 1e30))
def test_weights_are_between_zero_and_one_for_every_temperature(
    logits: np.ndarray, temperature: float
) -> None:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        weights = scaled_weights(logits, temperature, float(logits.max()))
    assert weights.max() == 1
    assert weights.min() >= 0
