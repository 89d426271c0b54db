"""Which ids a row may still choose, exactly: ranking and filters over one row of logits.

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


def ranked_head(logits: F32 | F64, count: int) -> I64:
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


def nucleus(logits: F32 | F64, weights: F64, top_p: float) -> I64:
    """Ids of the smallest set whose share of all weights reaches `top_p`, largest logit first.

    logits, weights: [n]. Source: Holtzman et al. 2019, arXiv:1904.09751.
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


def typical(logits: F32, weights: F64, temperature: float, typical_p: float) -> I64:
    """Ids whose information is nearest the entropy, until their share of all weights reaches `typical_p`.

    logits, weights: [n], weights being exp((logits - largest) / temperature). Nearest first; ties to
    the lower id. Source: Meister et al. 2022, arXiv:2202.00666.
    """
    total = float(weights.sum())
    shares = weights / total
    # From the logits, as the logarithm of a weight that has rounded to 0 says nothing.
    information = np.log(total) - (logits.astype(np.float64) - float(logits.max())) / temperature
    has_weight = weights > 0
    entropy = float((shares[has_weight] * information[has_weight]).sum())
    return nucleus(-np.abs(information - entropy), weights, typical_p)


def pick(weights: F64, uniform: float) -> int:
    """Index drawn in proportion to weights [n]: where `uniform` in [0, 1) falls in their running sum."""
    running = np.cumsum(weights)
    total = running[-1]
    index = int(np.searchsorted(running, uniform * total, side="right"))
    # The product may round up to the total: then the last index that has any weight is meant.
    return min(index, int(np.searchsorted(running, total, side="left")))
