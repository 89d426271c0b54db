"""How short and long prompts share the prompts' part of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# Part of the prompts' tokens that long ones get at least, and at most as they age, while short ones
# are there too; and the seconds after which it is the most.
LONG_SHARE = 0.25
MAX_LONG_SHARE = 0.75
AGED_S = 60.0
# So long may short requests start before a long one that finds no room, and so long does it have to
# leave this part of the KV memory to them.
MAX_OVERTAKEN_S = 30.0
SHORT_MEMORY_SHARE = 1 / 8


class LanePolicy(Protocol):
    """Tells long prompts from short ones and divides."""

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prompt of which so many tokens are missing is a long one."""
        ...

    def long_share(self, limit: int, age_s: float) -> int:
        """Tokens of `limit` for long prompts while there are short ones too.

        age_s: since the oldest of the long ones came.
        """
        ...

    def may_overtake(self, waited_s: float) -> bool:
        """Whether short ones may start before a long one that has waited so long for room."""
        ...

    def kept_memory(self, waited_s: float) -> float:
        """Part of the KV memory that a long one which has waited so long leaves to short ones."""
        ...


class OneLane:
    """First come, first served, whatever the length."""

    def is_long(self, num_tokens: int) -> bool:
        """See `LanePolicy`."""
        del num_tokens
        return False

    def long_share(self, limit: int, age_s: float) -> int:
        """See `LanePolicy`."""
        del age_s
        return limit

    def may_overtake(self, waited_s: float) -> bool:
        """See `LanePolicy`."""
        del waited_s
        return False

    def kept_memory(self, waited_s: float) -> float:
        """See `LanePolicy`."""
        del waited_s
        return 0.0


@dataclass(frozen=True, slots=True)
class TwoLanes:
    """Short prompts never wait for a long one, which keeps a share that grows as it waits.

    long_tokens: prompts that lack more than this are long.
    """

    long_tokens: int

    def is_long(self, num_tokens: int) -> bool:
        """See `LanePolicy`."""
        return num_tokens > self.long_tokens

    def long_share(self, limit: int, age_s: float) -> int:
        """See `LanePolicy`."""
        share = LONG_SHARE + (MAX_LONG_SHARE - LONG_SHARE) * min(1.0, age_s / AGED_S)
        return int(share * limit)

    def may_overtake(self, waited_s: float) -> bool:
        """See `LanePolicy`."""
        return waited_s < MAX_OVERTAKEN_S

    def kept_memory(self, waited_s: float) -> float:
        """See `LanePolicy`."""
        return SHORT_MEMORY_SHARE if waited_s < MAX_OVERTAKEN_S else 0.0
