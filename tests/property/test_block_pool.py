"""Any sequence of allocate, name, share and release keeps the KV cache in step with a model of owners."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rung.kv.integrity import check_blocks
from rung.kv.kv_cache import KvCache

NUM_BLOCKS = 12


class KvCacheMachine(RuleBasedStateMachine):
    """Owners hold chains of blocks. The model knows who holds what, and what each named block must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCache(NUM_BLOCKS)
        self.tables: dict[int, list[int]] = {}
        self.chains: dict[int, list[bytes]] = {}
        self.content: dict[int, bytes] = {}
        self.next_owner = 0

    @property
    def held(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table)

    @rule(prefix=st.lists(st.sampled_from([b"x", b"y"]), max_size=4), hit=st.booleans())
    def start(self, prefix: list[bytes], hit: bool) -> None:
        """A row finds what it can of its chain and writes the rest, and then all of it has a name."""
        names = [b"".join(prefix[: index + 1]) for index in range(len(prefix))]
        found = self.kv.prefixes.find(names) if hit else []
        assert [self.content[block] for block in found] == names[: len(found)]
        idle = sum(not self.held[block] for block in found)
        missing = len(names) - len(found)
        if idle + missing > self.kv.num_free:
            return
        self.kv.share(found)
        self.kv.prefixes.count_hits(found)
        written = self.kv.allocate(missing)
        assert not set(written) & self.held.keys()
        assert set(self.kv.take_dropped()) >= set(written) & self.content.keys()
        for block, name in zip(written, names[len(found) :], strict=True):
            self.content[block] = name
            self.kv.prefixes.add(block, name)
        self.tables[self.next_owner] = [*found, *written]
        self.next_owner += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(0, 40_000))
    def release(self, data: st.DataObject, num_tokens: int) -> None:
        blocks = self.tables.pop(data.draw(st.sampled_from(sorted(self.tables))))
        self.kv.release(blocks, num_tokens)
        for block in self.kv.take_dropped():
            assert not self.held[block]
            self.content.pop(block, None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held) or [0]))
        if self.held[block]:
            self.kv.prefixes.forget(block)

    @invariant()
    def cache_and_model_agree(self) -> None:
        assert self.kv.num_used == len(self.held)
        check_blocks(self.kv, self.tables)


TestKvCache = KvCacheMachine.TestCase
