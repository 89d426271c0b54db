"""Where a waiting request can start: behind KV that is there, or not yet because it is in the making."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.request import Request
    from rung.scheduler.prefixes import PrefixIndex
    from rung.scheduler.table import StateTable


@dataclass(frozen=True, slots=True)
class Start:
    """What a request finds when it starts.

    blocks:     to be shared, each with all its tokens stored.
    num_stored: tokens whose KV is there, those of a copied block included.
    copied:     block whose first tokens are needed while its owner writes on; None: none.
    """

    blocks: Sequence[int]
    num_stored: int
    copied: int | None = None


class StartFinder:
    """Samples of one prompt start from each other, all others from the prefix cache."""

    def __init__(self, table: StateTable, prefixes: PrefixIndex) -> None:
        self._table = table
        self._prefixes = prefixes
        # Samples of one prompt that have not ended, by group.
        self._groups: dict[int, dict[int, Request]] = {}

    def add(self, request: Request) -> None:
        """A request has come."""
        if request.group_id >= 0:
            self._groups.setdefault(request.group_id, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        """A request has ended."""
        siblings = self._groups.get(request.group_id)
        if siblings is not None:
            del siblings[request.request_id]
            if not siblings:
                del self._groups[request.group_id]

    def find(self, request: Request) -> Start | None:
        """What the request can take over now; None: it should wait for what is in the making."""
        is_sample = request.reads_cache and len(request.token_ids) == request.num_prompt_tokens
        siblings = self._groups.get(request.group_id) if is_sample else None
        if siblings is not None:
            running = [sibling for sibling in siblings.values() if sibling.row >= 0]
            for sibling in running:
                fork = self._fork(request, sibling)
                if fork is not None:
                    return fork
            if running:
                return None
        blocks = self._prefixes.look_up(request)
        return None if blocks is None else Start(blocks, len(blocks) * self._table.block_size)

    def _fork(self, request: Request, sibling: Request) -> Start | None:
        """The sibling's prompt if it has been read: all but the last token, computed again for its logits.

        The block in which the sibling goes on writing is copied.
        """
        num_shared = request.num_prompt_tokens - 1
        if self._table.num_stored[sibling.row] < num_shared:
            return None
        num_full, rest = divmod(num_shared, self._table.block_size)
        blocks = self._table.blocks(sibling.row)
        return Start(blocks[:num_full], num_shared, blocks[num_full] if rest else None)
