"""Which KV blocks are free and how often each other one is held. It knows neither rows nor memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class BlockPool:
    """Reference-counted block ids 0..num_blocks.

    A block is free, held, or idle: released by its last holder and not given back, because what it
    stores is still worth something. The free list is first in, first out: reuse is deterministic,
    and as late as it can be, which gives a stale read the best chance of being noticed.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, whatever their state."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks in the free list."""
        return len(self._free)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free list, next to be allocated first."""
        return tuple(self._free)

    @property
    def ref_counts(self) -> tuple[int, ...]:
        """Holders of each block."""
        return tuple(self._ref_counts)

    def ref_count(self, block: int) -> int:
        """Holders of one block."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder. The caller has checked `num_free`."""
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks were asked for while {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of these held or idle blocks."""
        for block in blocks:
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Take one holder from each block; return those that nobody holds any more, now idle."""
        released = []
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise RuntimeError(f"KV block {block} was freed twice")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                released.append(block)
        return released

    def give_back(self, blocks: Iterable[int]) -> None:
        """Put idle blocks at the end of the free list."""
        self._free.extend(blocks)
