"""The rows that run: which request is in which state row, which blocks it holds, and when those are free.

It carries out what the scheduler decides, and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rung.kv.integrity import IntegrityError, check_blocks, check_coverage, check_writable
from rung.kv.kv_cache import KvCache
from rung.scheduler.prefixes import PrefixIndex
from rung.scheduler.table import StateTable

if TYPE_CHECKING:
    from rung.request import Request
    from rung.scheduler.batch import I32
    from rung.scheduler.limits import SchedulerConfig
    from rung.scheduler.starts import Start


@dataclass(frozen=True, slots=True)
class _Fenced:
    """What a request that ended leaves to the steps in flight, up to `step_id`."""

    step_id: int
    row: int
    blocks: list[int]
    num_tokens: int


class RunningRows:
    """State rows, KV blocks and their order.

    order:       the rows that are in use, in the order of admission.
    last_step:   id of the newest step in flight; None when none is.
    """

    def __init__(self, config: SchedulerConfig, cache_key: bytes) -> None:
        self._block_size = config.block_size
        self._max_num_seqs = config.max_num_seqs
        self.kv = KvCache(config.num_blocks)
        self.prefixes = PrefixIndex(
            self.kv.prefixes if config.prefix_cache else None, config.block_size, cache_key
        )
        self.table = StateTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
        )
        self.order: I32 = np.empty(0, dtype=np.int32)
        # Next to be used last.
        self._empty = list(range(config.max_num_seqs - 1, -1, -1))
        self.last_step: int | None = None
        self._requests: dict[int, Request] = {}
        self._fenced: list[_Fenced] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def num_empty(self) -> int:
        """Rows that a request could enter now."""
        return len(self._empty)

    @property
    def num_coming(self) -> int:
        """Blocks that become free when the steps in flight have landed."""
        return sum(self.kv.num_exclusive(fenced.blocks) for fenced in self._fenced)

    def request(self, row: int) -> Request:
        """Who is in that row."""
        return self._requests[row]

    def enter(self, request: Request, start: Start, num_blocks: int, planned: int) -> int:
        """Give a request a row, what it found, and new blocks up to `num_blocks` in all.

        planned: tokens for which it is to have room in the end.
        """
        row = request.row = self._empty.pop()
        self._requests[row] = request
        shared = len(start.blocks)
        # Held before anything is allocated: an idle block could be evicted for it.
        self.kv.share(start.blocks)
        self.kv.prefixes.count_hits(start.blocks)
        blocks = [*start.blocks, *self.kv.allocate(num_blocks - shared)]
        if start.copied is not None:
            self._copies.append((start.copied, blocks[shared]))
        self.table.enter(row, request, start.num_stored, shared)
        self.table.planned[row] = planned
        self.table.add_blocks(row, blocks)
        self.order = np.append(self.order, np.int32(row))
        if start.num_stored + 1 < len(request.token_ids):
            self.prefixes.expect(request, shared)
        return row

    def leave(self, request: Request) -> None:
        """Empty the request's row; steps in flight keep it and its blocks until the last has landed."""
        row, table = request.row, self.table
        num_tokens = int(table.num_stored[row])
        blocks = table.leave(row)
        self.prefixes.expect_nothing(request)
        del self._requests[row]
        request.row = -1
        if self.last_step is None:
            self._free(row, blocks, num_tokens)
        else:
            self._fenced.append(_Fenced(self.last_step, row, blocks, num_tokens))

    def drop_left(self) -> None:
        """Bring `order` up to date after rows were left."""
        self.order = self.order[self.table.request_id[self.order] >= 0]

    def land(self, step_id: int) -> None:
        """The steps up to this one use nothing any more."""
        if self.last_step == step_id:
            self.last_step = None
        while self._fenced and self._fenced[0].step_id <= step_id:
            fenced = self._fenced.pop(0)
            self._free(fenced.row, fenced.blocks, fenced.num_tokens)

    def grow(self, rows: I32, missing: I32) -> None:
        """Give each row as many blocks as it is missing."""
        for index in np.flatnonzero(missing).tolist():
            self.table.add_blocks(rows[index], self.kv.allocate(int(missing[index])))

    def store(self, rows: I32, num_stored: I32) -> None:
        """A step has stored the KV of these rows up to `num_stored` tokens: name the blocks that are full."""
        table = self.table
        table.num_stored[rows] = num_stored
        full = num_stored // self._block_size
        for index in np.flatnonzero(full > table.num_named[rows]).tolist():
            row, num_full = int(rows[index]), int(full[index])
            request, first = self._requests[row], int(table.num_named[row])
            blocks = table.block_tables[row, first:num_full].tolist()
            self.prefixes.add(request, first, blocks, table.token_ids[row])
            table.num_named[row] = num_full
            if num_stored[index] < len(request.token_ids):
                self.prefixes.expect(request, num_full)
            else:
                self.prefixes.expect_nothing(request)

    def count_blocks(self, rows: I32) -> tuple[I32, I32]:
        """How many blocks of each row are its own, and how many are others' too: two of [R] i32."""
        tables = self.table.block_tables[rows]
        holders = np.where(tables >= 0, self.kv.pool.ref_counts[tables], 0)
        return (holders == 1).sum(axis=1, dtype=np.int32), (holders > 1).sum(axis=1, dtype=np.int32)

    def distrust(self, request: Request) -> None:
        """What the row's blocks store may be wrong, so that nobody is to find it."""
        self.prefixes.forget(self.table.blocks(request.row))

    def take_copies(self) -> I32:
        """Pairs (source, target) of blocks to be copied in the next step: [C, 2] i32."""
        copies = np.array(self._copies, dtype=np.int32).reshape(-1, 2)
        self._copies = []
        return copies

    def check_integrity(self) -> None:
        """Raise `IntegrityError` when rows and blocks contradict each other."""
        table, kv = self.table, self.kv
        tables = {int(table.request_id[row]): table.blocks(row) for row in self.order.tolist()}
        tables |= {-1 - index: fenced.blocks for index, fenced in enumerate(self._fenced)}
        check_blocks(kv, tables)
        for row in self.order.tolist():
            owner = int(table.request_id[row])
            check_coverage(
                owner,
                num_computed=int(table.num_computed[row]),
                num_tokens=int(table.num_tokens[row] + table.num_pending[row]),
                num_blocks=int(table.num_blocks[row]),
                block_size=self._block_size,
            )
            check_writable(owner, tables[owner], int(table.num_stored[row]) // self._block_size, kv)
        rows = [*self._empty, *self.order.tolist(), *(fenced.row for fenced in self._fenced)]
        if sorted(rows) != list(range(self._max_num_seqs)):
            raise IntegrityError("the state rows are not those in use and those that are empty")

    def _free(self, row: int, blocks: list[int], num_tokens: int) -> None:
        self.kv.release(blocks, num_tokens)
        self._empty.append(row)
