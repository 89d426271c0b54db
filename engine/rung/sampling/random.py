"""Counter-based random numbers: each is a pure function of its key and counter. No state here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox_4x32(counter: U32, key: U32) -> U32:
    """Philox-4x32-10 of each row.

    counter: [N, 4] uint32; key: [N, 2] uint32. Returns [N, 4] uint32.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", with the
    constants of Random123.
    """
    c0, c1, c2, c3 = (counter[:, word].astype(np.uint32) for word in range(4))
    k0, k1 = (key[:, word].astype(np.uint32) for word in range(2))
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        # Arrays wrap around silently, as the algorithm wants.
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform(seed: U64, sample_index: npt.NDArray[np.int32], position: npt.NDArray[np.int64]) -> F64:
    """One number in [0, 1) with 53 random bits for each (seed, sample index, position).

    All [N]. The key is the seed; the counter is (position low, position high, sample index, 0).
    """
    place = position.astype(np.uint64)
    counter = np.stack(
        (_low(place), _high(place), sample_index.astype(np.uint32), np.zeros(len(seed), np.uint32)), axis=1
    )
    words = philox_4x32(counter, np.stack((_low(seed), _high(seed)), axis=1)).astype(np.uint64)
    bits = (words[:, 1] << _WORD) | words[:, 0]
    numbers: F64 = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _multiply(a: U32, b: np.uint64) -> tuple[U32, U32]:
    product = a.astype(np.uint64) * b
    return _high(product), _low(product)


def _low(x: U64) -> U32:
    low: U32 = (x & _LOW_WORD).astype(np.uint32)
    return low


def _high(x: U64) -> U32:
    high: U32 = (x >> _WORD).astype(np.uint32)
    return high
