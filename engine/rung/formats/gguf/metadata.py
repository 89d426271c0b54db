"""Typed access to GGUF metadata: what is missing or of the wrong type is a sentence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rung.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from rung.formats.gguf.cursor import MetadataValue

_T = TypeVar("_T")


class Metadata:
    """The key-value pairs of one file. `optional_*` return None for a key that is not there."""

    def __init__(self, values: Mapping[str, MetadataValue], source: str) -> None:
        self.values = values
        self.source = source

    def error(self, message: str) -> ModelError:
        """A `ModelError` about this file."""
        return ModelError(f"{self.source}: {message}")

    def optional_text(self, key: str) -> str | None:
        """A string."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong_type(key, "a string")

    def text(self, key: str) -> str:
        """A string that must be there."""
        return self._present(key, self.optional_text(key))

    def optional_integer(self, key: str, minimum: int = 0, maximum: int = 2**31 - 1) -> int | None:
        """An integer within the limits, both included."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not int:
            raise self._wrong_type(key, "an integer")
        if not minimum <= value <= maximum:
            raise self.error(f"metadata {key} is {value}; it must be {minimum} to {maximum}")
        return value

    def integer(self, key: str, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        """An integer that must be there."""
        return self._present(key, self.optional_integer(key, minimum, maximum))

    def optional_real(self, key: str) -> float | None:
        """A finite number."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise self._wrong_type(key, "a number")
        number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number):
            raise self.error(f"metadata {key} is {number}; it must be finite")
        return number

    def real(self, key: str) -> float:
        """A finite number that must be there."""
        return self._present(key, self.optional_real(key))

    def optional_flag(self, key: str) -> bool | None:
        """A truth value."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong_type(key, "a truth value")

    def texts(self, key: str) -> list[str]:
        """An array of strings that must be there."""
        value = self._present(key, self.values.get(key))
        if not isinstance(value, list):
            raise self._wrong_type(key, "an array of strings")
        return value

    def integers(self, key: str) -> npt.NDArray[np.integer]:
        """An array of integers that must be there."""
        value = self._present(key, self.values.get(key))
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.integer):
            raise self._wrong_type(key, "an array of integers")
        return value

    def _present(self, key: str, value: _T | None) -> _T:
        if value is None:
            raise self.error(f"metadata {key} is missing")
        return value

    def _wrong_type(self, key: str, expected: str) -> ModelError:
        value = self.values[key]
        actual = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        return self.error(f"metadata {key} must be {expected}, not {actual}")
