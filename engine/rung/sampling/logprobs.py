"""Log-probabilities of the model's own distribution: before temperature, filters and rules."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rung.errors import RequestError, non_finite
from rung.sampling.filters import ranked_head
from rung.scheduler.batch import LogprobRow, PromptColumns, PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

Bool = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

_NO_IDS: I32 = np.empty(0, dtype=np.int32)
_NO_VALUES: F32 = np.empty(0, dtype=np.float32)

_LOWEST = float(np.finfo(np.float32).min)


def logprob_row(logits: F32, token_id: int, num_top: int) -> LogprobRow:
    """Log-softmax of one row of finite logits [vocab] at the chosen id and the `num_top` likeliest.

    Accumulates in float64. Every value is finite, also where a logit lies so far below the
    largest that float32 could not hold the difference.
    """
    wide = logits.astype(np.float64)
    peak = wide.max()
    with np.errstate(under="ignore"):
        log_total = peak + np.log(np.exp(wide - peak).sum())
    top_ids = ranked_head(logits, num_top) if num_top > 0 else np.empty(0, dtype=np.int64)
    return LogprobRow(
        chosen=max(float(wide[token_id] - log_total), _LOWEST),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=np.maximum(wide[top_ids] - log_total, _LOWEST).astype(np.float32),
    )


# Rows of logits that exist at once: 2,048 of a vocabulary of 152k would be 1.2 GB.
TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class ScoredTargets:
    """How likely given ids were, one per row of logits; the alternatives of all rows one after the other.

    finite [Q] bool: whether the row's logits were; what is not has no alternatives, and means nothing.
    chosen [Q] f32; ranks [Q] i32; top_ids [sum] i32; top_logprobs [sum] f32.
    """

    finite: Bool
    chosen: F32
    ranks: I32
    top_ids: I32
    top_logprobs: F32


def score_targets(logits: F32, target_ids: I32, num_top: I32) -> ScoredTargets:
    """Log-softmax of each row of logits [Q, vocab_size] at its target id [Q] and its likeliest ids.

    num_top: [Q]. A rank is 1 for the likeliest id; ties go to the lower id.
    """
    finite = np.asarray(np.isfinite(logits).all(axis=1))
    rows = [
        logprob_row(logits[index], int(target_ids[index]), int(num_top[index]))
        for index in np.flatnonzero(finite).tolist()
    ]
    chosen = np.zeros(len(logits), dtype=np.float32)
    chosen[finite] = [row.chosen for row in rows]
    target = np.take_along_axis(logits, target_ids[:, None], axis=1)
    is_before = np.arange(logits.shape[1]) < target_ids[:, None]
    ranks = 1 + (logits > target).sum(axis=1) + ((logits == target) & is_before).sum(axis=1)
    return ScoredTargets(
        finite=finite,
        chosen=chosen,
        ranks=ranks.astype(np.int32),
        top_ids=np.concatenate([_NO_IDS, *(row.top_ids for row in rows)]),
        top_logprobs=np.concatenate([_NO_VALUES, *(row.top_logprobs for row in rows)]),
    )


def joined(tiles: Sequence[ScoredTargets]) -> ScoredTargets:
    """Tiles of rows as one."""
    names = [item.name for item in fields(ScoredTargets)]
    return ScoredTargets(**{name: np.concatenate([getattr(tile, name) for tile in tiles]) for name in names})


def by_row(
    prompts: PromptColumns, scored: ScoredTargets, vocab_size: int
) -> tuple[dict[int, PromptLogprobs], dict[int, RequestError]]:
    """What was scored for a plan's prompts, and errors of those that are not finite; by index in 0..R."""
    num_top = np.minimum(np.repeat(prompts.num_top, prompts.counts), vocab_size)
    ends = np.cumsum(np.where(scored.finite, num_top, 0))
    logprobs: dict[int, PromptLogprobs] = {}
    failed: dict[int, RequestError] = {}
    last = np.cumsum(prompts.counts)
    for index, count, end in zip(prompts.rows.tolist(), prompts.counts.tolist(), last.tolist(), strict=True):
        ids = slice(end - count, end)
        if not scored.finite[ids].all():
            failed[index] = non_finite()
            continue
        top = int(num_top[ids.start])
        tops = slice(int(ends[end - 1]) - count * top, int(ends[end - 1]))
        logprobs[index] = PromptLogprobs(
            chosen=scored.chosen[ids],
            ranks=scored.ranks[ids],
            top_ids=scored.top_ids[tops].reshape(count, top),
            top_logprobs=scored.top_logprobs[tops].reshape(count, top),
        )
    return logprobs, failed
