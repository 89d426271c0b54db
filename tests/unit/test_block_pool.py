"""Reference counts, order of reuse, and the invariants that must notice each kind of damage."""

from __future__ import annotations

from collections import deque

import pytest

from rung.kv.block_pool import BlockPool
from rung.kv.integrity import IntegrityError, check_blocks, check_coverage


def test_blocks_are_reused_first_in_first_out():
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.free([1]) == [1]
    assert pool.free([0]) == [0]
    assert pool.allocate(3) == [3, 1, 0]


def test_counts_add_up():
    pool = BlockPool(5)
    blocks = pool.allocate(2)
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (5, 3, 2)
    pool.free(blocks)
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (5, 5, 0)


def test_shared_block_is_released_by_its_last_holder():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    assert pool.free(blocks) == []
    assert pool.num_free == 1
    assert pool.free(blocks) == blocks
    assert pool.num_free == 2


def test_more_blocks_than_are_free_is_refused_and_changes_nothing():
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="3 KV blocks were asked for while 2 are free"):
        pool.allocate(3)
    assert pool.allocate(2) == [0, 1]


def test_double_free_is_noticed():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="block 0 was freed twice"):
        pool.free(blocks)


def test_free_block_cannot_be_shared():
    with pytest.raises(RuntimeError, match="block 0 is free"):
        BlockPool(1).share([0])


def test_integrity_accepts_honest_tables():
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(1)
    pool.share(first[:1])
    check_blocks(pool, {7: first, 8: [first[0], *second]})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({7: [0, 1], 8: [1]}, "counts 1 holders and is in 2"),
        ({7: [0]}, "counts 1 holders and is in 0"),
        ({7: [0, 1, 2]}, "counts 0 holders and is in 1"),
        ({7: [0, 1, 1]}, "names a block twice"),
        ({7: [0, 1, 9]}, "holds block 9 of a pool of 4"),
        ({7: [0, 1, -1]}, "holds block -1 of a pool of 4"),
    ],
)
def test_integrity_notices_tables_that_contradict_the_pool(tables, message):
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        check_blocks(pool, tables)


@pytest.mark.parametrize("free", [[2], [2, 3, 3], [0, 2, 3]])
def test_integrity_notices_a_free_list_that_lost_or_repeats_a_block(free):
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool._free = deque(free)
    with pytest.raises(IntegrityError, match="times in the free list"):
        check_blocks(pool, {7: blocks})


@pytest.mark.parametrize(("num_computed", "num_tokens"), [(9, 20), (-1, 20), (5, 4)])
def test_integrity_notices_rows_that_claim_too_much(num_computed, num_tokens):
    with pytest.raises(IntegrityError, match="request 7 has computed"):
        check_coverage(7, num_computed=num_computed, num_tokens=num_tokens, num_blocks=2, block_size=4)


def test_integrity_accepts_a_row_that_fills_its_blocks():
    check_coverage(7, num_computed=8, num_tokens=9, num_blocks=2, block_size=4)
