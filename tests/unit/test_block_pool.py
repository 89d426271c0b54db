"""Reference counts, orders of reuse and eviction, and the invariants that must notice each kind of damage."""

from __future__ import annotations

from collections import deque

import pytest

from rung.kv.block_pool import BlockPool
from rung.kv.integrity import IntegrityError, check_blocks, check_coverage, check_writable
from rung.kv.kv_cache import KvCache


def test_blocks_are_reused_first_in_first_out():
    kv = KvCache(4)
    assert kv.allocate(3) == [0, 1, 2]
    kv.release([1], 0)
    kv.release([0], 0)
    assert kv.allocate(3) == [3, 1, 0]


def test_counts_add_up():
    kv = KvCache(5)
    blocks = kv.allocate(2)
    assert (kv.num_blocks, kv.num_free, kv.num_used) == (5, 3, 2)
    kv.release(blocks, 0)
    assert (kv.num_blocks, kv.num_free, kv.num_used) == (5, 5, 0)


def test_shared_block_is_released_by_its_last_holder():
    kv = KvCache(2)
    blocks = kv.allocate(1)
    kv.share(blocks)
    kv.release(blocks, 0)
    assert (kv.num_free, kv.take_dropped()) == (1, [])
    kv.release(blocks, 0)
    assert (kv.num_free, kv.take_dropped()) == (2, blocks)


def test_more_blocks_than_are_free_is_refused_and_changes_nothing():
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="3 KV blocks were asked for while 2 are free"):
        pool.allocate(3)
    assert pool.allocate(2) == [0, 1]


def test_double_free_is_noticed():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="block 0 was freed twice"):
        pool.release(blocks)


def test_free_block_cannot_be_shared():
    with pytest.raises(RuntimeError, match="block 0 is free"):
        KvCache(1).share([0])


def test_named_block_outlives_its_holder_until_the_space_is_needed():
    kv = KvCache(2)
    blocks = kv.allocate(2)
    kv.prefixes.add(blocks[0], b"a")
    kv.release(blocks, 8)
    assert (kv.num_free, kv.take_dropped()) == (2, [blocks[1]])
    assert kv.prefixes.find([b"a"]) == [blocks[0]]
    assert kv.allocate(1) == [blocks[1]]
    assert kv.prefixes.holds(b"a")
    assert kv.allocate(1) == [blocks[0]]
    assert not kv.prefixes.holds(b"a")
    assert kv.take_dropped() == [blocks[0]]


def cached_chains(kv, *chains, num_tokens=8):
    """Chains of names, each computed and released in turn."""
    blocks = {}
    for chain in chains:
        held = kv.allocate(len(chain))
        for block, name in zip(held, chain, strict=True):
            kv.prefixes.add(block, name)
            blocks[name] = block
        kv.release(held, num_tokens)
    return blocks


def test_the_end_of_a_chain_goes_before_its_beginning_and_the_old_before_the_new():
    kv = KvCache(5)
    blocks = cached_chains(kv, [b"a1", b"a2", b"a3"], [b"b1", b"b2"])
    order = [b"a3", b"a2", b"a1", b"b2", b"b1"]
    assert [kv.prefixes.evict() for _ in order] == [blocks[name] for name in order]


def test_blocks_that_were_found_again_stay_longer_but_not_for_ever():
    kv = KvCache(3)
    blocks = cached_chains(kv, [b"hot"])
    for _ in range(3):
        kv.share([blocks[b"hot"]])
        kv.prefixes.count_hits([blocks[b"hot"]])
        kv.release([blocks[b"hot"]], 8)
    victims = []
    for index in range(12):
        if kv.prefixes.holds(b"hot"):
            victims.append(index)
        cached_chains(kv, [b"%d" % index, b"%d." % index])
    assert 3 < len(victims) < 12


def test_blocks_of_a_long_context_outlast_those_of_a_short_one():
    kv = KvCache(2)
    cached_chains(kv, [b"long"], num_tokens=50_000)
    cached_chains(kv, [b"short"], num_tokens=8)
    kv.allocate(1)
    assert kv.prefixes.holds(b"long")
    assert not kv.prefixes.holds(b"short")


def test_second_block_of_the_same_content_stays_without_a_name():
    kv = KvCache(2)
    one, other = kv.allocate(2)
    kv.prefixes.add(one, b"a")
    kv.prefixes.add(other, b"a")
    kv.release([one, other], 4)
    assert kv.take_dropped() == [other]
    assert kv.prefixes.find([b"a"]) == [one]


def test_integrity_accepts_honest_tables():
    kv = KvCache(6)
    first, second, third = kv.allocate(2), kv.allocate(1), kv.allocate(1)
    kv.share(first[:1])
    kv.prefixes.add(third[0], b"a")
    kv.release(third, 4)
    check_blocks(kv, {7: first, 8: [first[0], *second]})


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
    kv = KvCache(4)
    kv.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        check_blocks(kv, tables)


@pytest.mark.parametrize("free", [[2], [2, 3, 3], [0, 2, 3]])
def test_integrity_notices_a_free_list_that_lost_or_repeats_a_block(free):
    kv = KvCache(4)
    blocks = kv.allocate(2)
    kv.pool._free = deque(free)
    with pytest.raises(IntegrityError, match="times free or idle"):
        check_blocks(kv, {7: blocks})


def test_integrity_notices_a_writable_block_that_others_hold_or_find():
    kv = KvCache(3)
    blocks = kv.allocate(3)
    check_writable(7, blocks, 0, kv)
    kv.share(blocks[1:2])
    check_writable(7, blocks, 2, kv)
    with pytest.raises(IntegrityError, match="may write block 1, which has 2 holders"):
        check_writable(7, blocks, 1, kv)
    kv.prefixes.add(blocks[2], b"a")
    with pytest.raises(IntegrityError, match="may write block 2, which others may find"):
        check_writable(7, blocks, 2, kv)


@pytest.mark.parametrize(("num_computed", "num_tokens"), [(9, 20), (-1, 20), (5, 4)])
def test_integrity_notices_rows_that_claim_too_much(num_computed, num_tokens):
    with pytest.raises(IntegrityError, match="request 7 has computed"):
        check_coverage(7, num_computed=num_computed, num_tokens=num_tokens, num_blocks=2, block_size=4)


def test_integrity_accepts_a_row_that_fills_its_blocks():
    check_coverage(7, num_computed=8, num_tokens=9, num_blocks=2, block_size=4)
