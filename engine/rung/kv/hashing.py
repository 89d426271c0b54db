"""Names of full KV blocks: a keyed hash over everything that their content depends on.

A block's name covers its tokens and, through its parent's name, all tokens before them, the tenant's
salt and the adapter. Every part has a type and a length in front, so that no two different things
are written alike: a salt is never an adapter, and no part runs into the next.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# 128 bits. Whoever does not know the key can neither make two blocks collide nor ask for another
# tenant's.
DIGEST_BYTES = 16
_ROOT, _SALT, _ADAPTER, _BLOCK = b"R", b"S", b"A", b"B"


class BlockHasher:
    """Hashes chains of blocks with one secret key of at most 64 bytes; the empty key is none."""

    def __init__(self, key: bytes, block_size: int) -> None:
        self._key = key
        self._block_size = block_size

    def root(self, salt: bytes, adapter: bytes = b"") -> bytes:
        """The parent of the first block."""
        return self._digest(_ROOT, _part(_SALT, salt), _part(_ADAPTER, adapter))

    def extend(self, parent: bytes, token_ids: npt.NDArray[np.int32]) -> list[bytes]:
        """Names of consecutive full blocks behind `parent`: [n * block_size] int32 -> n names."""
        size = self._block_size * token_ids.itemsize
        data = token_ids.tobytes()
        key, head = self._key, _BLOCK + size.to_bytes(8, "little")
        names = []
        for start in range(0, len(data), size):
            parent = blake2b(
                parent + head + data[start : start + size], digest_size=DIGEST_BYTES, key=key
            ).digest()
            names.append(parent)
        return names

    def _digest(self, *parts: bytes) -> bytes:
        return blake2b(b"".join(parts), digest_size=DIGEST_BYTES, key=self._key).digest()


def _part(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(8, "little") + content
