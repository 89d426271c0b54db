"""Any sequence of allocate, share and free keeps the pool in step with a model of owners."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rung.kv.block_pool import BlockPool
from rung.kv.integrity import check_blocks

NUM_BLOCKS = 12


class BlockPoolMachine(RuleBasedStateMachine):
    """Owners hold lists of blocks; the model knows how often each block is held and the free order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free_order = list(range(NUM_BLOCKS))
        self.tables: dict[int, list[int]] = {}
        self.next_owner = 0

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free_order)))
        blocks = self.pool.allocate(count)
        assert blocks == self.free_order[:count]
        del self.free_order[:count]
        self.tables[self.next_owner] = blocks
        self.next_owner += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        source = self.tables[data.draw(st.sampled_from(sorted(self.tables)))]
        prefix = source[: data.draw(st.integers(0, len(source)))]
        self.pool.share(prefix)
        self.tables[self.next_owner] = list(prefix)
        self.next_owner += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.tables.pop(data.draw(st.sampled_from(sorted(self.tables))))
        held = Counter(block for table in self.tables.values() for block in table)
        released = [block for block in blocks if not held[block]]
        assert self.pool.free(blocks) == released
        self.free_order += released

    @invariant()
    def pool_and_model_agree(self) -> None:
        assert list(self.pool.free_blocks) == self.free_order
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks == NUM_BLOCKS
        check_blocks(self.pool, self.tables)


TestBlockPool = BlockPoolMachine.TestCase
