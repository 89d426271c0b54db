"""Logprobs of prompts on their way out: parts of one row joined, cut to messages that are not too large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.scheduler.batch import PromptLogprobs

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]

# Numbers in one batch, 4 bytes each; a single part of a row may exceed it. A prompt of 128k ids with
# 20 alternatives has 5.5 million.
MAX_BATCH_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Columns over the prompt ids of some rows, in the order of the rows.

    handles, counts [A] u32; chosen [L] f32; ranks, top_counts [L] u32;
    top_ids [sum(top_counts)] u32; top_logprobs [sum(top_counts)] f32.
    """

    handles: U32
    counts: U32
    chosen: F32
    ranks: U32
    top_counts: U32
    top_ids: U32
    top_logprobs: F32


def batches(parts: Sequence[tuple[int, PromptLogprobs]]) -> tuple[PromptBatch, ...]:
    """All parts, (handle, logprobs), in order; a handle stands at most once in a batch."""
    made: list[PromptBatch] = []
    taken: dict[int, list[PromptLogprobs]] = {}
    size = 0
    for handle, part in parts:
        values = 3 * len(part.chosen) + 2 * part.top_ids.size
        if taken and size + values > MAX_BATCH_VALUES:
            made.append(_batch(taken))
            taken, size = {}, 0
        taken.setdefault(handle, []).append(part)
        size += values
    if taken:
        made.append(_batch(taken))
    return tuple(made)


def _batch(taken: dict[int, list[PromptLogprobs]]) -> PromptBatch:
    parts = [part for row in taken.values() for part in row]
    return PromptBatch(
        handles=np.array(list(taken), dtype=np.uint32),
        counts=np.array([sum(len(part.chosen) for part in row) for row in taken.values()], dtype=np.uint32),
        chosen=np.concatenate([part.chosen for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]).astype(np.uint32),
        top_counts=np.concatenate(
            [np.full(len(part.chosen), part.top_ids.shape[1], dtype=np.uint32) for part in parts]
        ),
        top_ids=np.concatenate([part.top_ids.ravel() for part in parts]).astype(np.uint32),
        top_logprobs=np.concatenate([part.top_logprobs.ravel() for part in parts]),
    )
