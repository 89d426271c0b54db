"""Bounded reads of GGUF's scalars, strings and arrays. Knows no keys and no tensors.

Every length is compared with what is left of the file before anything of that size is made.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from rung.errors import ModelError

if TYPE_CHECKING:
    import mmap

MetadataArray: TypeAlias = "list[str] | npt.NDArray[np.generic]"
MetadataValue: TypeAlias = "bool | int | float | str | list[str] | npt.NDArray[np.generic]"

# Far above any vocabulary; keeps a damaged count from costing gigabytes of small strings.
MAX_ARRAY_LEN = 1 << 24

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_LENGTH = struct.Struct("<Q")


class Cursor:
    """A position in a mapped file. Errors name the file, the place and what was being read."""

    def __init__(self, data: mmap.mmap, source: str) -> None:
        self.data = data
        self.source = source
        self.size = len(data)
        self.position = 0

    def error(self, what: str, problem: str) -> ModelError:
        """A `ModelError` about `what` at the present position."""
        return ModelError(f"{self.source}: {what} at byte {self.position} {problem}")

    def require(self, num_bytes: int, what: str) -> None:
        """Raise unless `num_bytes` are left."""
        if num_bytes > self.size - self.position:
            left = self.size - self.position
            raise self.error(
                what, f"needs {num_bytes} bytes, {left} are left; the file is truncated or damaged"
            )

    def u32(self, what: str) -> int:
        """An unsigned 32-bit integer."""
        return int(self._scalar(4, what))

    def u64(self, what: str) -> int:
        """An unsigned 64-bit integer."""
        return int(self._scalar(10, what))

    def string(self, what: str) -> str:
        """A length and that many bytes of UTF-8."""
        length = self.u64(what)
        self.require(length, what)
        raw = self.data[self.position : self.position + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(what, f"is not valid UTF-8 ({error.reason})") from None
        self.position += length
        return text

    def value(self, what: str) -> MetadataValue:
        """A type tag and the value it announces."""
        type_id = self.u32(what)
        if type_id == _ARRAY:
            return self._array(what)
        if type_id == _STRING:
            return self.string(what)
        if type_id == _BOOL:
            return bool(self._bools(1, what)[0])
        if type_id not in _SCALARS:
            raise self.error(what, f"has the unknown value type {type_id}")
        return self._scalar(type_id, what)

    def _scalar(self, type_id: int, what: str) -> int | float:
        layout = _SCALARS[type_id]
        self.require(layout.size, what)
        (number,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return number  # type: ignore[no-any-return]

    def _array(self, what: str) -> MetadataArray:
        type_id = self.u32(what)
        count = self.u64(what)
        if count > MAX_ARRAY_LEN:
            raise self.error(what, f"announces {count} elements, the limit is {MAX_ARRAY_LEN}")
        if type_id == _STRING:
            return self._strings(count, what)
        if type_id == _BOOL:
            return self._bools(count, what)
        if type_id not in _SCALARS:
            kind = "arrays" if type_id == _ARRAY else f"values of the unknown type {type_id}"
            raise self.error(what, f"is an array of {kind}, which is not supported")
        return self._numbers(np.dtype(_SCALARS[type_id].format), count, what)

    def _numbers(self, dtype: np.dtype[np.generic], count: int, what: str) -> npt.NDArray[np.generic]:
        num_bytes = count * dtype.itemsize
        self.require(num_bytes, what)
        numbers = np.frombuffer(self.data, dtype=dtype, count=count, offset=self.position)
        self.position += num_bytes
        return numbers

    def _bools(self, count: int, what: str) -> npt.NDArray[np.generic]:
        raw = self._numbers(np.dtype(np.uint8), count, what)
        if count and int(raw.max()) > 1:
            raise self.error(what, "holds a truth value other than 0 and 1; the file is damaged")
        return raw.view(np.bool_)

    def _strings(self, count: int, what: str) -> list[str]:
        """Vocabularies: a hundred thousand short strings, so the loop keeps to local names."""
        self.require(count * _LENGTH.size, what)
        data, size, position = self.data, self.size, self.position
        unpack = _LENGTH.unpack_from
        texts = []
        try:
            for _ in range(count):
                start = position + 8
                # A slice past the end would be short without notice, so the end is checked.
                (length,) = unpack(data, position)
                position = start + length
                if position > size:
                    self.position = start
                    self.require(length, what)
                texts.append(data[start:position].decode())
        except struct.error:
            self.position = position
            self.require(_LENGTH.size, what)
            raise
        except UnicodeDecodeError as error:
            self.position = start
            raise self.error(what, f"is not valid UTF-8 ({error.reason})") from None
        self.position = position
        return texts
