"""Choose one token per row from its logits. A choice is a pure function of the row's logits,
parameters, seed, sample index and position: neighbours in the batch never matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rung.errors import ErrorCode, RequestError, non_finite
from rung.sampling.edits import edited_logits
from rung.sampling.filters import nucleus, pick, ranked_head, scaled_weights, typical
from rung.sampling.logprobs import logprob_row
from rung.sampling.random import uniform

if TYPE_CHECKING:
    from rung.scheduler.batch import I32, LogprobRow, SamplingColumns

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One choice per row of the logits.

    token_ids [S] i32; logprobs and failed by index in 0..S; a failed row's id is 0.
    """

    token_ids: I32
    logprobs: dict[int, LogprobRow]
    failed: dict[int, RequestError]


def sample(logits: F32, columns: SamplingColumns) -> SampledTokens:
    """Choose a token for each row of `logits` [S, vocab_size] float32.

    Order: rules on single ids, then greedy or temperature, top-k, top-p, min-p, typical-p, draw;
    each filter sees what the one before has left. Ties go to the lowest id.
    """
    num_rows = len(logits)
    token_ids = np.zeros(num_rows, dtype=np.int32)
    failed = _non_finite_rows(logits)
    edited_rows, edited = edited_logits(logits, columns)
    _fail_forbidden(edited_rows, edited, failed)
    allowed = dict(zip(edited_rows.tolist(), edited, strict=True))
    greedy = columns.temperature == 0
    drawn = np.flatnonzero(~greedy)
    uniforms = uniform(columns.seed[drawn], columns.sample_index[drawn], columns.position[drawn])
    for index in np.flatnonzero(greedy).tolist():
        if index not in failed:
            token_ids[index] = allowed.get(index, logits[index]).argmax()
    for index, number in zip(drawn.tolist(), uniforms, strict=True):
        if index not in failed:
            # What rules or a grammar forbid need not be weighed: often that is nearly everything.
            ids = np.flatnonzero(allowed[index] > -np.inf) if index in allowed else None
            choice = _draw(
                logits[index] if ids is None else allowed[index][ids],
                temperature=float(columns.temperature[index]),
                top_k=int(columns.top_k[index]),
                top_p=float(columns.top_p[index]),
                min_p=float(columns.min_p[index]),
                typical_p=float(columns.typical_p[index]),
                number=float(number),
            )
            token_ids[index] = choice if ids is None else ids[choice]
    logprobs = {
        int(index): logprob_row(logits[index], int(token_ids[index]), int(columns.top_logprobs[index]))
        for index in np.flatnonzero(columns.top_logprobs >= 0)
        if index not in failed
    }
    return SampledTokens(token_ids=token_ids, logprobs=logprobs, failed=failed)


def _draw(
    logits: F32,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    number: float,
) -> int:
    peak = float(logits.max())
    # Ids that may be drawn; None: all, in id order.
    ids = ranked_head(logits, top_k) if 0 < top_k < len(logits) else None
    kept = logits if ids is None else logits[ids]
    weights = scaled_weights(kept, temperature, peak)
    if top_p < 1:
        inside = nucleus(kept, weights, top_p)
        ids, kept, weights = _narrow(inside, ids, kept, weights)
    if min_p > 0:
        # The likeliest id weighs 1. Source: Nguyen et al. 2024, arXiv:2407.01082.
        ids, kept, weights = _narrow(np.flatnonzero(weights >= min_p), ids, kept, weights)
    if typical_p < 1:
        inside = typical(kept, weights, temperature, typical_p)
        ids, kept, weights = _narrow(inside, ids, kept, weights)
    choice = pick(weights, number)
    return choice if ids is None else int(ids[choice])


def _narrow(inside: I64, ids: I64 | None, kept: F32, weights: F64) -> tuple[I64, F32, F64]:
    return (inside if ids is None else ids[inside]), kept[inside], weights[inside]


def _fail_forbidden(rows: I64, edited: F32, failed: dict[int, RequestError]) -> None:
    """Rows of which nothing may be chosen any more fail."""
    if not len(rows):
        return
    for row in rows[edited.max(axis=1) == -np.inf].tolist():
        failed.setdefault(
            row,
            RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"All {edited.shape[1]} tokens of the vocabulary are forbidden at this position; "
                "allow at least one.",
            ),
        )


def _non_finite_rows(logits: F32) -> dict[int, RequestError]:
    finite = np.isfinite(logits).all(axis=1)
    return {int(index): non_finite() for index in np.flatnonzero(~finite)}
