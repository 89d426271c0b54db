"""The KV memory as the scheduler uses it: blocks to write, blocks to share, blocks found by content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rung.kv.block_pool import BlockPool
from rung.kv.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Sequence


class KvCache:
    """A pool of blocks whose named ones outlive their holders until the space is needed."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.prefixes = PrefixCache(num_blocks)
        # Blocks whose content has been dropped since the last `take_dropped`, in order and once each.
        self._dropped: dict[int, None] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: the free and the idle ones."""
        return self.pool.num_free + self.prefixes.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Blocks to write, each with one holder; evicts idle ones. The caller has checked `num_free`."""
        for _ in range(count - self.pool.num_free):
            evicted = self.prefixes.evict()
            self._dropped[evicted] = None
            self.pool.give_back((evicted,))
        return self.pool.allocate(count)

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks that are held or idle, once more each."""
        for block, count in zip(blocks, self.pool.holders(blocks), strict=True):
            if count == 0:
                self.prefixes.revive(block)
        self.pool.hold(blocks)

    def release(self, blocks: Sequence[int], num_tokens: int) -> None:
        """One holder lets go of its block table. `num_tokens`: the context that it stood for."""
        unnamed = self.prefixes.let_go(blocks, self.pool.release(blocks), num_tokens)
        self._dropped |= dict.fromkeys(unnamed)
        self.pool.give_back(unnamed)

    def num_exclusive(self, blocks: Sequence[int]) -> int:
        """How many of these blocks one release would free."""
        return self.pool.holders(blocks).count(1)

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many of these blocks somebody holds."""
        return len(blocks) - self.pool.holders(blocks).count(0)

    def take_dropped(self) -> list[int]:
        """Blocks whose content nobody may read any more, since the last call."""
        dropped = list(self._dropped)
        self._dropped = {}
        return dropped

    def drop_again(self, blocks: Sequence[int]) -> None:
        """Tell of these once more, before later ones, unless somebody holds them by now.

        Whoever was told may not have acted on it.
        """
        free = [block for block, count in zip(blocks, self.pool.holders(blocks), strict=True) if count == 0]
        self._dropped = dict.fromkeys(free) | self._dropped
