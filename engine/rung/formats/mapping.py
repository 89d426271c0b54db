"""Files as read-only memory. Knows no format.

A mapped file must not be changed while it is in use: replace it by rename instead.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rung.errors import ModelError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    import numpy.typing as npt


def map_file(path: str | os.PathLike[str]) -> mmap.mmap:
    """The whole of a regular, non-empty file. Arrays made from the map keep it open."""
    path = Path(path)
    try:
        # Anything else could block on open (a pipe) or has no length (a device).
        if not path.is_file():
            kind = "is not a regular file" if path.exists() else "does not exist"
            raise ModelError(f"{path} {kind}")
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelError(f"{path} is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def release_pages(arrays: Iterable[npt.NDArray[Any]]) -> None:
    """Take the maps behind arrays out of this process's memory; what is read again comes back.

    The system keeps the file's pages for as long as it likes, so the next start is none the slower.
    """
    maps = {id(found): found for array in arrays if (found := _map_behind(array)) is not None}
    for mapped in maps.values():
        # Not on every system; a map is read-only, so that this never loses anything.
        if hasattr(mapped, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def _map_behind(array: object) -> mmap.mmap | None:
    while isinstance(array, np.ndarray):
        array = array.base
    if isinstance(array, memoryview):
        array = array.obj
    return array if isinstance(array, mmap.mmap) else None


def quoted(text: str) -> str:
    """A name out of a file, for a message: escaped and cut, since it may be anything."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
