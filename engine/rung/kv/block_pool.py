"""Which KV blocks are free and how often each other one is held. It knows neither rows nor memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt


class BlockPool:
    """Reference-counted block ids 0..num_blocks.

    A block is free, held, or idle: released by its last holder and not given back, because what it
    stores is still worth something. The free list is first in, first out: reuse is deterministic,
    and as late as it can be, which gives a stale read the best chance of being noticed.

    ref_counts: [num_blocks] i32, holders of each block; not to be written.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self.ref_counts: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, whatever their state."""
        return len(self.ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks in the free list."""
        return len(self._free)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free list, next to be allocated first."""
        return tuple(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder. The caller has checked `num_free`."""
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks were asked for while {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        self.ref_counts[blocks] = 1
        return blocks

    def holders(self, blocks: Sequence[int]) -> list[int]:
        """How many hold each of these blocks."""
        counts: list[int] = self.ref_counts[_index(blocks)].tolist()
        return counts

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one holder to each of these held or idle blocks, which are distinct."""
        self.ref_counts[_index(blocks)] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Take one holder from each of these distinct blocks; return how many each has left."""
        left = self.ref_counts[_index(blocks)] - 1
        if (left < 0).any():
            raise RuntimeError(f"KV block {blocks[int(np.argmin(left))]} was freed twice")
        self.ref_counts[_index(blocks)] = left
        counts: list[int] = left.tolist()
        return counts

    def give_back(self, blocks: Iterable[int]) -> None:
        """Put idle blocks at the end of the free list."""
        self._free.extend(blocks)


def _index(blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    # An empty list alone would be an index of floats.
    return np.array(blocks, dtype=np.int64)
