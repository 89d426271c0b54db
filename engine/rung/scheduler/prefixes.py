"""Which of a request's tokens have their KV already, and which are just being computed by another row.

Names blocks when their step has landed, finds them for requests that start, and keeps what is
about to be named. Blocks are held by the scheduler alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rung.kv.hashing import BlockHasher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.kv.prefix_cache import PrefixCache
    from rung.request import Request
    from rung.scheduler.batch import I32

# Blocks named for look-ups in one step, about half a millisecond of work: a long prompt that is all
# in the cache is looked up over several steps while others run.
MAX_NAMED_PER_STEP = 512
_BATCH = 32


class PrefixIndex:
    """The prefix cache as seen by requests; with `cache` of None nothing is ever found.

    A request looks up the blocks before its last known token only: that one has to be computed in
    any case, because its logits choose the next.
    """

    def __init__(self, cache: PrefixCache | None, block_size: int, key: bytes) -> None:
        self._cache = cache
        self._block_size = block_size
        self._hasher = BlockHasher(key, block_size)
        # Name of the next block of a row that reads its prompt -> its request id. A second request
        # that lacks just this block waits for it.
        self._coming: dict[bytes, int] = {}
        self._next_of: dict[int, bytes] = {}
        self._budget = MAX_NAMED_PER_STEP

    def start_step(self, *, is_idle: bool) -> None:
        """A new step is planned; without rows that run, nobody is held up by a long look-up."""
        self._budget = 1 << 60 if is_idle else MAX_NAMED_PER_STEP

    def look_up(self, request: Request) -> list[int] | None:
        """The blocks of the request that are in the cache; None: ask again in the next step.

        That is so when the look-up is not finished, or when a row that runs is about to compute the
        first block that is missing.
        """
        cache = self._cache
        if cache is None or not request.reads_cache:
            return []
        last = (len(request.token_ids) - 1) // self._block_size
        names = request.block_names
        found = min(request.num_found, last)
        while found and not cache.holds(names[found - 1]):
            found -= 1
        while found < last:
            if found == len(names) and not self._name(request, min(last, found + _BATCH)):
                request.num_found = found
                return None
            if not cache.holds(names[found]):
                break
            found += 1
        request.num_found = found
        if found < last and names[found] in self._coming:
            return None
        # Usually all of them; a block that was forgotten in the middle ends what can be used.
        return cache.find(names[:found])

    def expect(self, request: Request, num_named: int) -> None:
        """A row reads its prompt and has `num_named` blocks so far: others may wait for the next."""
        self.expect_nothing(request)
        if self._cache is None or len(request.token_ids) < (num_named + 1) * self._block_size:
            return
        self._extend(request, num_named + 1, request.token_ids)
        name = request.block_names[num_named]
        if name not in self._coming and not self._cache.holds(name):
            self._coming[name] = request.request_id
            self._next_of[request.request_id] = name

    def forget(self, blocks: Sequence[int]) -> None:
        """What these held blocks store must not be found: it may be wrong."""
        if self._cache is not None:
            for block in blocks:
                self._cache.forget(block)

    def expect_nothing(self, request: Request) -> None:
        """The request is not about to compute a block of its prompt any more."""
        name = self._next_of.pop(request.request_id, None)
        if name is not None:
            del self._coming[name]

    def add(self, request: Request, first: int, blocks: Sequence[int], token_ids: I32) -> None:
        """These are the request's blocks from its `first` on, each with all its tokens stored.

        token_ids: those of the request so far, as far as the blocks go at least.
        """
        if self._cache is None:
            return
        self._extend(request, first + len(blocks), token_ids)
        for block, name in zip(blocks, request.block_names[first:], strict=False):
            self._cache.add(block, name)

    def _name(self, request: Request, count: int) -> bool:
        """Name the request's first `count` blocks, if the step's budget allows it."""
        if self._budget <= 0:
            return False
        self._budget -= count - len(request.block_names)
        self._extend(request, count, request.token_ids)
        return True

    def _extend(self, request: Request, count: int, token_ids: I32) -> None:
        names = request.block_names
        if len(names) < count:
            parent = names[-1] if names else self._hasher.root(request.cache_salt)
            size = self._block_size
            names += self._hasher.extend(parent, token_ids[len(names) * size : count * size])
