"""Executable invariants of block ownership, for tests and for an idle engine. They repair nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from rung.kv.kv_cache import KvCache


class IntegrityError(RuntimeError):
    """The bookkeeping of KV blocks contradicts itself: a bug, never a caller's mistake."""


def check_blocks(kv: KvCache, tables: Mapping[int, Sequence[int]]) -> None:
    """Check that each block is free, idle with a name, or held as often as `tables` (owner -> blocks) say."""
    num_blocks = kv.num_blocks
    for owner, blocks in tables.items():
        if len(set(blocks)) != len(blocks):
            raise IntegrityError(f"the block table of request {owner} names a block twice: {list(blocks)}")
        for block in blocks:
            if not 0 <= block < num_blocks:
                raise IntegrityError(f"request {owner} holds block {block} of a pool of {num_blocks}")
    owners = _counts([block for blocks in tables.values() for block in blocks], num_blocks)
    counted = kv.pool.ref_counts
    wrong = np.flatnonzero(owners != counted)
    if len(wrong):
        block = wrong[0]
        raise IntegrityError(
            f"block {block} counts {counted[block]} holders and is in {owners[block]} tables"
        )
    idle = kv.prefixes.idle_blocks
    times_listed = _counts(kv.pool.free_blocks, num_blocks) + _counts(idle, num_blocks)
    wrong = np.flatnonzero(times_listed != (owners == 0))
    if len(wrong):
        block = wrong[0]
        raise IntegrityError(
            f"block {block} is in {owners[block]} tables and {times_listed[block]} times free or idle"
        )
    if len(idle) != kv.prefixes.num_idle:
        raise IntegrityError(f"{len(idle)} blocks are idle and {kv.prefixes.num_idle} are counted")
    kv.prefixes.check()


def check_writable(owner: int, blocks: Sequence[int], first: int, kv: KvCache) -> None:
    """Check that the blocks that a row is yet to write, from `first` on, are its own and nobody's prefix."""
    own = blocks[first:]
    for block, holders in zip(own, kv.pool.holders(own), strict=True):
        if holders != 1:
            raise IntegrityError(f"request {owner} may write block {block}, which has {holders} holders")
        if kv.prefixes.name_of(block) is not None:
            raise IntegrityError(f"request {owner} may write block {block}, which others may find")


def _counts(blocks: Sequence[int], num_blocks: int) -> npt.NDArray[np.int64]:
    return np.bincount(np.array(blocks, dtype=np.int64), minlength=num_blocks)


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
