"""Executable invariants of block ownership, for tests and for an idle engine. They repair nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rung.kv.block_pool import BlockPool


class IntegrityError(RuntimeError):
    """The bookkeeping of KV blocks contradicts itself: a bug, never a caller's mistake."""


def check_blocks(pool: BlockPool, tables: Mapping[int, Sequence[int]]) -> None:
    """Check that each block is either free or held as often as `tables` (owner -> blocks) name it."""
    free = pool.free_blocks
    ref_counts = pool.ref_counts
    owners: Counter[int] = Counter()
    for owner, blocks in tables.items():
        if len(set(blocks)) != len(blocks):
            raise IntegrityError(f"the block table of request {owner} names a block twice: {list(blocks)}")
        owners.update(blocks)
    if len(set(free)) != len(free):
        raise IntegrityError("a block stands twice in the free list")
    for block in owners.keys() - set(range(pool.num_blocks)):
        raise IntegrityError(f"a block table names block {block} of a pool of {pool.num_blocks}")
    for block in free:
        if owners[block]:
            raise IntegrityError(f"block {block} is free and in {owners[block]} block tables")
    for block, count in enumerate(ref_counts):
        if count != owners[block]:
            raise IntegrityError(f"block {block} counts {count} holders and is in {owners[block]} tables")
    if len(free) + len(owners) != pool.num_blocks:
        raise IntegrityError(
            f"{len(free)} free and {len(owners)} held blocks do not make up the pool of {pool.num_blocks}"
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
