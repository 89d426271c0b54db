"""Which ids a row may still choose, exactly: ranking, top-k and top-p over one row of logits.

Ties always go to the lower id. Nothing is cut off beforehand to save time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

# A nucleus is looked for among this many likeliest ids first, then among 8 times more, and so on.
_FIRST_HEAD = 128
_HEAD_GROWTH = 8


def ranked_head(logits: F32, count: int) -> I64:
    """The `count` ids with the largest logits [vocab], largest first, ties to the lower id."""
    vocab_size = len(logits)
    if count >= vocab_size:
        candidates = np.arange(vocab_size)
    else:
        cut = np.partition(logits, vocab_size - count)[vocab_size - count]
        candidates = np.flatnonzero(logits >= cut)
    # A stable sort of ids that ascend keeps the lower id first among equals.
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order[:count]]


def scaled_weights(logits: F32, temperature: float, peak: float) -> F64:
    """exp((logits - peak) / temperature) in float64, with `peak` the row's largest logit.

    The difference is taken first: no exponent is positive, so no temperature overflows.
    """
    with np.errstate(under="ignore"):
        weights: F64 = np.exp((logits.astype(np.float64) - peak) / temperature)
    return weights


def nucleus(logits: F32, weights: F64, top_p: float) -> I64:
    """Ids of the smallest set whose share of all weights reaches `top_p`, likeliest first.

    logits, weights: [n]; weights rise with logits. Source: Holtzman et al. 2019,
    arXiv:1904.09751.
    """
    wanted = top_p * float(weights.sum())
    head = _FIRST_HEAD
    while True:
        ids = ranked_head(logits, head)
        reached = np.cumsum(weights[ids])
        if reached[-1] >= wanted or len(ids) == len(logits):
            # The first prefix that reaches it; all ids, should rounding leave the last one short.
            return ids[: int(np.searchsorted(reached, wanted, side="left")) + 1]
        head *= _HEAD_GROWTH


def pick(weights: F64, uniform: float) -> int:
    """Index drawn in proportion to weights [n]: where `uniform` in [0, 1) falls in their running sum."""
    running = np.cumsum(weights)
    total = running[-1]
    index = int(np.searchsorted(running, uniform * total, side="right"))
    # The product may round up to the total: then the last index that has any weight is meant.
    return min(index, int(np.searchsorted(running, total, side="left")))
