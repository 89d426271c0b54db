"""Open a safetensors file: tensor views, all checked against the file's length.

Refuses what the format forbids: holes, overlaps, tensors past the end. Decodes no weights.
Source: the format description of the safetensors library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rung.errors import ModelError
from rung.formats.mapping import map_file, quoted
from rung.models.weights import StoredTensor

if TYPE_CHECKING:
    import os

# The format allows 100 MB; headers of the largest published files stay under 1 MB.
_MAX_HEADER_BYTES = 16 << 20
_MAX_DIMS = 4
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors by name; `ModelError` says what is wrong and where."""
    path = Path(path)
    mapped = map_file(path)
    data = np.frombuffer(mapped, dtype=np.uint8)
    if len(data) < 8:
        raise ModelError(f"{path} is not a safetensors file: it has only {len(data)} bytes")
    header_len = int.from_bytes(mapped[:8], "little")
    if header_len > _MAX_HEADER_BYTES:
        raise ModelError(
            f"{path} is not a safetensors file, or damaged: a header of {header_len} bytes, "
            f"the limit is {_MAX_HEADER_BYTES}"
        )
    if header_len > len(data) - 8:
        raise ModelError(f"{path}: the header of {header_len} bytes is cut off; the file is truncated")
    header = _parse_header(mapped[8 : 8 + header_len], path)
    body = data[8 + header_len :]
    tensors: dict[str, StoredTensor] = {}
    end_of_last = 0
    entries = [(_range(entry, name, len(body), path), name, entry) for name, entry in header.items()]
    for (begin, end), name, entry in sorted(entries, key=lambda item: item[0]):
        if begin != end_of_last:
            problem = "overlaps the tensor before it" if begin < end_of_last else "leaves a hole before it"
            raise ModelError(
                f"{path}: tensor {quoted(name)} at offset {begin} {problem}; the file is damaged"
            )
        tensors[name] = _tensor(name, entry, body[begin:end], path)
        end_of_last = end
    if end_of_last != len(body):
        raise ModelError(f"{path}: the tensors end at byte {end_of_last} of {len(body)}; the file is damaged")
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name appears twice")
    return entries


def _parse_header(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the safetensors header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _is_size_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _range(entry: object, name: str, num_bytes: int, path: Path) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or not _is_size_list(offsets) or len(offsets) != 2:
        raise ModelError(f"{path}: tensor {quoted(name)} has no valid data_offsets")
    begin, end = offsets
    if not begin <= end <= num_bytes:
        raise ModelError(
            f"{path}: tensor {quoted(name)} spans bytes {begin} to {end} of {num_bytes}; "
            "the file is truncated or damaged"
        )
    return begin, end


def _tensor(
    name: str, entry: dict[str, Any], data: np.ndarray[Any, np.dtype[np.uint8]], path: Path
) -> StoredTensor:
    what = f"{path}: tensor {quoted(name)}"
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        supported = ", ".join(_DTYPES)
        raise ModelError(
            f"{what} is stored as {quoted(str(dtype))}, which is not supported; supported: {supported}"
        )
    if not isinstance(shape, list) or not _is_size_list(shape) or not 1 <= len(shape) <= _MAX_DIMS:
        raise ModelError(
            f"{what} has the shape {quoted(str(shape))}; 1 to {_MAX_DIMS} dimensions are supported"
        )
    num_rows = 1
    for dim in shape[:-1]:
        num_rows *= dim
    row_bytes = shape[-1] * _DTYPES[dtype]
    if num_rows * row_bytes != len(data) or not len(data):
        raise ModelError(f"{what} of shape {shape} takes {num_rows * row_bytes} bytes, not {len(data)}")
    return StoredTensor(name, tuple(shape), dtype, data.reshape(num_rows, row_bytes))
