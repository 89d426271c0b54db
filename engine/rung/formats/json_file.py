"""JSON files that came with a model: bounded in size, typed access, errors as sentences."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from rung.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_BYTES = 128 << 20


def read_bounded(path: Path) -> bytes:
    """The file's bytes; a `ModelError` when it cannot be read or is too large."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} does not exist or is not a regular file")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ModelError(f"{path} has {size} bytes; the limit is {_MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


class JsonObject:
    """Typed access to one object; a key that holds null counts as absent. Errors name `source`."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def error(self, message: str) -> ModelError:
        """A `ModelError` about this file."""
        return ModelError(f"{self.source}: {message}")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; required when no default is given."""
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int:
            raise self.error(f"{key} must be an integer, not {value!r:.80}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer or None."""
        return None if self.values.get(key) is None else self.integer(key)

    def optional_real(self, key: str) -> float | None:
        """A finite number or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value):
            raise self.error(f"{key} must be a finite number, not {value!r:.80}")
        return float(value)

    def flag(self, key: str) -> bool:
        """A truth value; absent is false."""
        value = self.values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r:.80}")
        return value

    def optional_object(self, key: str) -> JsonObject | None:
        """An object or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, not {value!r:.80}")
        return JsonObject(value, f"{self.source}: {key}")


class JsonFile(JsonObject):
    """The object that a JSON file holds, and its bytes."""

    def __init__(self, path: Path) -> None:
        self.raw = read_bounded(path)
        try:
            values = json.loads(self.raw.decode())
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} is not a JSON object")
        super().__init__(values, str(path))
