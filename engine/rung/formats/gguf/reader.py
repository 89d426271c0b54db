"""Open a GGUF file: header, metadata and tensor views, all checked against the file's length.

Gives no meaning to keys or tensor names beyond `general.alignment`, and decodes no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import rung_kernels
from rung.errors import ModelError
from rung.formats.gguf.cursor import Cursor, MetadataValue
from rung.formats.gguf.metadata import Metadata
from rung.formats.mapping import map_file, quoted
from rung.models.weights import StoredTensor

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 16
_MAX_DIMS = 4
# The least that an entry takes: empty name and one-byte value; empty name, one dimension.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

# Type numbers that are in use; those that `rung_kernels` cannot decode are refused by name.
_TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """An open file. Tensors are views on its memory, by their names in the file."""

    path: Path
    metadata: Metadata
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """A tensor's entry in the header. shape: rows first, unlike in the file.

    offset: from the start of the data section.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    num_rows: int
    row_bytes: int
    offset: int


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Map the file and read its header; `ModelError` says what is wrong and where."""
    path = Path(path)
    cursor = Cursor(map_file(path), str(path))
    num_tensors, num_values = _read_header(cursor)
    values = _read_metadata(cursor, num_values)
    infos = _read_tensor_infos(cursor, num_tensors)
    alignment = _alignment(cursor, values)
    data_start = -(-cursor.position // alignment) * alignment
    _check_placement(cursor, infos, data_start, alignment)
    data = np.frombuffer(cursor.data, dtype=np.uint8)
    tensors = {info.name: _view(info, data, data_start) for info in infos}
    return GgufFile(path, Metadata(values, str(path)), tensors)


def _read_header(cursor: Cursor) -> tuple[int, int]:
    if cursor.data[:4] != _MAGIC:
        raise ModelError(f"{cursor.source} is not a GGUF file: it does not start with the bytes GGUF")
    cursor.position = 4
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise ModelError(
                f"{cursor.source} is a big-endian GGUF file; only little-endian ones are supported"
            )
        raise ModelError(f"{cursor.source} is GGUF version {version}; supported versions: 2, 3")
    num_tensors = cursor.u64("the number of tensors")
    num_values = cursor.u64("the number of metadata values")
    cursor.require(
        num_tensors * _MIN_TENSOR_BYTES + num_values * _MIN_METADATA_BYTES,
        f"a header of {num_tensors} tensors and {num_values} metadata values",
    )
    return num_tensors, num_values


def _read_metadata(cursor: Cursor, count: int) -> dict[str, MetadataValue]:
    values: dict[str, MetadataValue] = {}
    for index in range(count):
        key = cursor.string(f"the key of metadata value {index}")
        if key in values:
            raise ModelError(f"{cursor.source}: metadata {quoted(key)} appears twice")
        values[key] = cursor.value(f"metadata {quoted(key)}")
    return values


def _read_tensor_infos(cursor: Cursor, count: int) -> list[_TensorInfo]:
    infos: dict[str, _TensorInfo] = {}
    for index in range(count):
        name = cursor.string(f"the name of tensor {index}")
        if name in infos:
            raise ModelError(f"{cursor.source}: tensor {quoted(name)} appears twice")
        infos[name] = _read_tensor_info(cursor, name)
    return list(infos.values())


def _read_tensor_info(cursor: Cursor, name: str) -> _TensorInfo:
    what = f"tensor {quoted(name)}"
    num_dims = cursor.u32(what)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.error(what, f"has {num_dims} dimensions; 1 to {_MAX_DIMS} are supported")
    shape = tuple(cursor.u64(what) for _ in range(num_dims))[::-1]
    type_id = cursor.u32(what)
    offset = cursor.u64(what)
    type_name = _TENSOR_TYPES.get(type_id, f"type {type_id}")
    if type_name not in rung_kernels.FORMATS:
        supported = ", ".join(rung_kernels.FORMATS)
        raise cursor.error(what, f"is stored as {type_name}, which is not supported; supported: {supported}")
    num_rows = 1
    for dim in shape[:-1]:
        num_rows *= dim
    try:
        row_bytes = rung_kernels.row_bytes(type_name, shape[-1])
    except (ValueError, OverflowError) as error:
        raise cursor.error(what, f"has a wrong row length: {error}") from None
    if num_rows * row_bytes == 0:
        raise cursor.error(what, f"has the shape {list(shape)}, which holds no values")
    return _TensorInfo(name, shape, type_name, num_rows, row_bytes, offset)


def _alignment(cursor: Cursor, values: dict[str, MetadataValue]) -> int:
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ModelError(
            f"{cursor.source}: metadata general.alignment is {quoted(str(alignment))}; "
            f"it must be a power of two up to {_MAX_ALIGNMENT}"
        )
    return alignment


def _check_placement(cursor: Cursor, infos: list[_TensorInfo], data_start: int, alignment: int) -> None:
    """Each tensor inside the file, aligned, and none over another."""
    end_of_last, last = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        what = f"{cursor.source}: tensor {quoted(info.name)}"
        end = info.offset + info.num_rows * info.row_bytes
        if info.offset % alignment:
            raise ModelError(
                f"{what} is at offset {info.offset}, not a multiple of {alignment}; the file is damaged"
            )
        if data_start + end > cursor.size:
            raise ModelError(
                f"{what} ends at byte {data_start + end}, past the end of the file at {cursor.size}; "
                "the file is truncated or damaged"
            )
        if info.offset < end_of_last:
            raise ModelError(f"{what} overlaps tensor {quoted(last)}; the file is damaged")
        end_of_last, last = end, info.name


def _view(info: _TensorInfo, data: npt.NDArray[np.uint8], data_start: int) -> StoredTensor:
    start = data_start + info.offset
    rows = data[start : start + info.num_rows * info.row_bytes].reshape(info.num_rows, info.row_bytes)
    return StoredTensor(info.name, info.shape, info.format, rows)
