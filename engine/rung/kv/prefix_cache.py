"""Which blocks hold which named content, and which of the idle ones goes first. It holds no blocks itself."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A name that was asked for this often weighs no more than one that was asked for more often.
MAX_COUNTED_HITS = 7
# Tokens of context at which a block costs twice as much to recompute as the first one: attention
# over what is before it is then as dear as its share of the weights.
CONTEXT_WEIGHT_TOKENS = 4096


class PrefixCache:
    """Names of blocks, and an eviction order over those that are idle.

    The order is GreedyDual (Young 1994; with frequencies Cao and Irani 1997): a block that becomes
    idle gets the priority of the last victim plus its weight, and the lowest goes. The weight is
    what losing it would cost: once for the block and once for each hit so far, more at the end of
    a long context. Weights are rounded to powers of two, so that each weight is one queue in the
    order of release and a victim is the lowest of a few heads.

    A parent is never lighter than its children, because every hit and every release of a child is
    one of the parent, and it becomes idle after them. So chains go from their ends, and no block is
    kept that nothing leads to.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: list[bytes | None] = [None] * num_blocks
        self._hits = [0] * num_blocks
        self._class = [0] * num_blocks
        # By weight class: idle block -> priority, lowest and oldest first.
        self._idle: dict[int, OrderedDict[int, int]] = {}
        self._num_idle = 0
        self._last_priority = 0

    @property
    def num_idle(self) -> int:
        """Blocks that are named and that nobody holds."""
        return self._num_idle

    @property
    def idle_blocks(self) -> tuple[int, ...]:
        """Those blocks, in no order that matters."""
        return tuple(block for queue in self._idle.values() for block in queue)

    def name_of(self, block: int) -> bytes | None:
        """What the block holds, if that has a name."""
        return self._name_of[block]

    def holds(self, name: bytes) -> bool:
        """Whether some block holds this."""
        return name in self._block_of

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Blocks that hold `names`, up to the first that none does."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_hits(self, blocks: Iterable[int]) -> None:
        """These blocks were found and are going to be used."""
        for block in blocks:
            self._hits[block] += 1

    def add(self, block: int, name: bytes) -> None:
        """A held block has got all its content. If another one has the same, that stays the named one."""
        if name not in self._block_of:
            self._block_of[name] = block
            self._name_of[block] = name
            self._hits[block] = 0
            self._class[block] = 0

    def let_go(self, blocks: Sequence[int], holders: Sequence[int], num_tokens: int) -> list[int]:
        """A holder of this chain has let go of it, and each block has so many left.

        Named blocks that nobody holds become idle, from the end of the chain, so that they are
        evicted from there; those without a name are returned. `num_tokens`: the holder's context.
        """
        names, hits, classes = self._name_of, self._hits, self._class
        base, num_idle, unnamed = self._last_priority, 0, []
        context = 1 + num_tokens // CONTEXT_WEIGHT_TOKENS
        # By hits: the exponent of the weight, rounded down to a power of two.
        class_of = [((1 + count) * context).bit_length() - 1 for count in range(MAX_COUNTED_HITS + 1)]
        for block, left in zip(reversed(blocks), reversed(holders), strict=True):
            if names[block] is None:
                if left == 0:
                    unnamed.append(block)
                continue
            weight_class = max(classes[block], class_of[min(hits[block], MAX_COUNTED_HITS)])
            classes[block] = weight_class
            if left == 0:
                queue = self._idle.get(weight_class)
                if queue is None:
                    queue = self._idle[weight_class] = OrderedDict()
                queue[block] = base + (1 << weight_class)
                num_idle += 1
        self._num_idle += num_idle
        unnamed.reverse()
        return unnamed

    def revive(self, block: int) -> None:
        """An idle block is held again."""
        queue = self._idle.get(self._class[block])
        if queue is None or queue.pop(block, None) is None:
            raise RuntimeError(f"KV block {block} is free and cannot be shared")
        self._num_idle -= 1

    def evict(self) -> int:
        """Take the cheapest idle block out and forget its name. The caller has checked `num_idle`."""
        heads = [(next(iter(queue.values())), cls) for cls, queue in self._idle.items() if queue]
        self._last_priority, cheapest = min(heads)
        block, _ = self._idle[cheapest].popitem(last=False)
        self._num_idle -= 1
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """The content of this held block is not to be found any more."""
        name = self._name_of[block]
        if name is not None:
            del self._block_of[name]
            self._name_of[block] = None

    def check(self) -> None:
        """Raise `RuntimeError` unless names and blocks are pairs and every idle block has a name."""
        named = {block: name for block, name in enumerate(self._name_of) if name is not None}
        if named != {block: name for name, block in self._block_of.items()}:
            raise RuntimeError("names and blocks of the prefix cache do not belong to each other")
        if any(block not in named for block in self.idle_blocks):
            raise RuntimeError("an idle block has no name")
