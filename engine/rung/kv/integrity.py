"""Executable invariants of block ownership, for tests and for an idle engine. They repair nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rung.kv.block_pool import BlockPool


class IntegrityError(RuntimeError):
    """The bookkeeping of KV blocks contradicts itself: a bug, never a caller's mistake."""


def check_blocks(pool: BlockPool, tables: Mapping[int, Sequence[int]]) -> None:
    """Check that each block is either free or held as often as `tables` (owner -> blocks) name it."""
    num_blocks = pool.num_blocks
    for owner, blocks in tables.items():
        if len(set(blocks)) != len(blocks):
            raise IntegrityError(f"the block table of request {owner} names a block twice: {list(blocks)}")
        for block in blocks:
            if not 0 <= block < num_blocks:
                raise IntegrityError(f"request {owner} holds block {block} of a pool of {num_blocks}")
    held = np.array([block for blocks in tables.values() for block in blocks], dtype=np.int64)
    owners = np.bincount(held, minlength=num_blocks)
    times_free = np.bincount(np.array(pool.free_blocks, dtype=np.int64), minlength=num_blocks)
    counted = np.array(pool.ref_counts, dtype=np.int64)
    wrong = np.flatnonzero(owners != counted)
    if len(wrong):
        block = wrong[0]
        raise IntegrityError(
            f"block {block} counts {counted[block]} holders and is in {owners[block]} tables"
        )
    wrong = np.flatnonzero(times_free != (owners == 0))
    if len(wrong):
        block = wrong[0]
        raise IntegrityError(
            f"block {block} is in {owners[block]} tables and {times_free[block]} times in the free list"
        )


def check_coverage(
    owner: int, *, num_computed: int, num_tokens: int, num_blocks: int, block_size: int
) -> None:
    """Check that a row's blocks cover the tokens whose KV it claims to have stored."""
    if not 0 <= num_computed <= num_tokens:
        raise IntegrityError(f"request {owner} has computed {num_computed} of its {num_tokens} tokens")
    if num_computed > num_blocks * block_size:
        raise IntegrityError(
            f"request {owner} has computed {num_computed} tokens and holds {num_blocks} blocks "
            f"of {block_size}"
        )
