"""Which running request gives its blocks away when there are too few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from rung.scheduler.batch import I32, I64

# A row with no more than this left is about to give its blocks back anyway.
NEARLY_FINISHED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows that may be preempted, in the order of admission; columns over N of them.

    priority    [N] i64
    exclusive   [N] i32  blocks that preempting the row would free
    recompute   [N] i32  tokens whose KV would be lost with them
    remaining   [N] i32  tokens until the row ends at the latest
    """

    priority: I64
    exclusive: I32
    recompute: I32
    remaining: I32


class VictimPolicy(Protocol):
    """Chooses one row."""

    def choose(self, rows: Candidates, wanted: int) -> int:
        """Index of the row to preempt. `wanted`: blocks that are of use now and soon."""
        ...


class YoungestFirst:
    """Last in, first out, among those of the lowest priority."""

    def choose(self, rows: Candidates, wanted: int) -> int:
        """See `VictimPolicy`."""
        del wanted
        return int(np.flatnonzero(rows.priority == rows.priority.min())[-1])


class CheapestFirst:
    """The least to compute again per block that it frees, nearly finished rows last.

    Blocks beyond those that are wanted count for nothing: to free a hundred for the sake of one
    is no bargain.
    """

    def choose(self, rows: Candidates, wanted: int) -> int:
        """See `VictimPolicy`."""
        useful = np.clip(rows.exclusive, 0, max(wanted, 1))
        cost = np.where(useful > 0, (rows.recompute + 1) / np.maximum(useful, 1), np.inf)
        is_ending = rows.remaining <= NEARLY_FINISHED_TOKENS
        # Of equals the one that came last.
        order = np.lexsort((-np.arange(len(cost)), cost, is_ending, rows.priority))
        return int(order[0])
