"""Philox against its published answers and a plain-integer twin; uniforms as pure functions."""

from __future__ import annotations

import numpy as np
import pytest

from rung.sampling.random import philox_4x32, uniform

# Known answers of Random123 for philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ([0x00000000] * 4, [0x00000000] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The algorithm on Python integers, word by word."""
    c, k = list(counter), list(key)
    for _ in range(10):
        product0, product1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (product1 >> 32) ^ c[1] ^ k[0],
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c[3] ^ k[1],
            product0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniforms(seeds: list[int], samples: list[int], positions: list[int]) -> np.ndarray:
    return uniform(
        np.array(seeds, dtype=np.uint64),
        np.array(samples, dtype=np.int32),
        np.array(positions, dtype=np.int64),
    )


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    got = philox_4x32(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))
    assert got.tolist() == [answer]
    assert plain_philox(counter, key) == answer


def test_philox_of_many_rows_is_philox_of_each() -> None:
    generator = np.random.default_rng(1)
    counters = generator.integers(0, 2**32, (200, 4), dtype=np.uint32)
    keys = generator.integers(0, 2**32, (200, 2), dtype=np.uint32)
    expected = [plain_philox(c, k) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert philox_4x32(counters, keys).tolist() == expected


def test_uniform_uses_all_64_bits_of_the_seed_and_the_position() -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1]
    numbers = uniforms(seeds + [7] * 4, [0] * 5 + [0, 1, 0, 0], [0] * 5 + [0, 0, 1, 2**33])
    assert len(set(numbers.tolist())) == len(numbers)


def test_uniform_is_in_range_and_evenly_spread() -> None:
    num = 64_000
    numbers = uniforms([123] * num, [0] * num, list(range(num)))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    chi_square = ((counts - num / 64) ** 2 / (num / 64)).sum()
    # 99.9th percentile of chi-square with 63 degrees of freedom; the seed is fixed.
    assert chi_square < 103.4


def test_uniform_of_a_row_does_not_depend_on_its_neighbours() -> None:
    seeds, samples, positions = [5, 9, 2**60], [0, 3, 1], [11, 0, 2**40]
    together = uniforms(seeds, samples, positions)
    alone = [uniforms([a], [b], [c])[0] for a, b, c in zip(seeds, samples, positions, strict=True)]
    assert together.tolist() == alone
