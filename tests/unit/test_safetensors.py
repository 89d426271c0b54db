"""The safetensors reader: what it reads equals the library; what is wrong is one clear sentence."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from rung.errors import ModelError
from rung.formats.safetensors import open_safetensors


def file_of(header, body=b"", header_len=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if header_len is None else header_len) + raw + body


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_equals_the_library(tmp_path):
    rng = np.random.default_rng(1)
    arrays = {
        "matrix": rng.standard_normal((3, 5)).astype(np.float32),
        "vector": rng.standard_normal(7).astype(np.float32),
        "half": rng.standard_normal((2, 4, 6)).astype(np.float16),
    }
    save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "np"})
    tensors = open_safetensors(tmp_path / "m.safetensors")
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert tensors[name].format == {"float32": "F32", "float16": "F16"}[array.dtype.name]
        np.testing.assert_array_equal(tensors[name].to_float32(), array.astype(np.float32))


def test_bfloat16(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(
        file_of({"t": entry("BF16", (1, 3), (0, 6))}, struct.pack("<3H", 0x3F80, 0xC040, 0x7F80))
    )
    np.testing.assert_array_equal(open_safetensors(path)["t"].to_float32(), [[1.0, -3.0, np.inf]])


def test_no_tensors(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of({"__metadata__": {"format": "pt"}}))
    assert open_safetensors(path) == {}


EIGHT = bytes(8)

HOSTILE = {
    "short": (b"\x01\0\0", "it has only 3 bytes"),
    "header length": (file_of({}, header_len=2**63), "the limit is 16777216"),
    "header cut off": (file_of({}, header_len=1000), "is cut off; the file is truncated"),
    "not JSON": (file_of(b"{'t': 1}"), "is not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "is not valid JSON"),
    "deep JSON": (file_of(b"[" * 200_000), "is not valid JSON"),
    "long number": (file_of(b'{"t": ' + b"9" * 5000 + b"}"), "is not valid JSON"),
    "not an object": (file_of([1]), "is not a JSON object"),
    "duplicate name": (file_of(b'{"t": 1, "t": 1}'), "a name appears twice"),
    "entry": (file_of({"t": 5}), "has no valid data_offsets"),
    "no offsets": (file_of({"t": {"dtype": "F32", "shape": [2]}}, EIGHT), "has no valid data_offsets"),
    "three offsets": (file_of({"t": entry(offsets=(0, 4, 8))}, EIGHT), "has no valid data_offsets"),
    "negative offset": (file_of({"t": entry(offsets=(-8, 0))}, EIGHT), "has no valid data_offsets"),
    "float offset": (file_of({"t": entry(offsets=(0.0, 8.0))}, EIGHT), "has no valid data_offsets"),
    "bool offset": (file_of({"t": entry(offsets=(False, 8))}, EIGHT), "has no valid data_offsets"),
    "huge offset": (file_of({"t": entry(offsets=(0, 2**70))}, EIGHT), "has no valid data_offsets"),
    "past the end": (file_of({"t": entry(offsets=(0, 16))}, EIGHT), "spans bytes 0 to 16 of 8"),
    "backwards": (file_of({"t": entry(offsets=(8, 0))}, EIGHT), "spans bytes 8 to 0 of 8"),
    "hole": (file_of({"t": entry(offsets=(4, 12))}, bytes(12)), "leaves a hole before it"),
    "overlap": (
        file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        "overlaps the tensor before it",
    ),
    "rest": (file_of({"t": entry()}, bytes(12)), "the tensors end at byte 8 of 12"),
    "dtype": (
        file_of({"t": entry("I64", (1,))}, EIGHT),
        "stored as 'I64', which is not supported; supported: F32",
    ),
    "dtype type": (file_of({"t": entry(["F32"])}, EIGHT), "which is not supported"),
    "shape and size": (file_of({"t": entry(shape=(3,))}, EIGHT), "takes 12 bytes, not 8"),
    "shape overflow": (file_of({"t": entry(shape=(2**62, 2**62))}, EIGHT), "not 8"),
    "negative shape": (file_of({"t": entry(shape=(-1, -2))}, EIGHT), "1 to 4 dimensions are supported"),
    "scalar": (file_of({"t": entry(shape=(), offsets=(0, 4))}, bytes(4)), "1 to 4 dimensions are supported"),
    "empty tensor": (file_of({"t": entry(shape=(0,), offsets=(0, 0))}), "takes 0 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_a_sentence(tmp_path, case):
    content, message = HOSTILE[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        open_safetensors(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
