"""The GGUF reader: what it reads equals the `gguf` package; what is wrong is one clear sentence."""

from __future__ import annotations

import os
import struct

import gguf
import numpy as np
import pytest

from rung.errors import ModelError
from rung.formats.gguf import open_gguf
from tests.model_files import RawGguf, canonical_weights, write_gguf


def write(tmp_path, content):
    path = tmp_path / "file.gguf"
    path.write_bytes(content.bytes() if isinstance(content, RawGguf) else content)
    return path


def test_equals_the_gguf_package(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", quantization="Q5_1")
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    expected = {
        name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")
    }
    assert set(ours.metadata.values) == set(expected)
    for key, value in expected.items():
        actual = ours.metadata.values[key]
        assert (actual.tolist() if isinstance(actual, np.ndarray) else actual) == value, key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert stored.format == tensor.tensor_type.name
        assert stored.shape == tuple(tensor.shape.tolist()[::-1])
        np.testing.assert_array_equal(stored.data.ravel(), tensor.data.view(np.uint8).ravel())
        np.testing.assert_array_equal(stored.to_float32(), gguf.dequantize(tensor.data, tensor.tensor_type))


def test_tensors_cannot_be_written(tmp_path):
    tensor = next(iter(open_gguf(write_gguf(tmp_path / "tiny.gguf")).tensors.values()))
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0, 0] = 1


SCALARS = {
    0: ("<B", 200),
    1: ("<b", -7),
    2: ("<H", 65000),
    3: ("<h", -30000),
    4: ("<I", 4_000_000_000),
    5: ("<i", -2_000_000_000),
    6: ("<f", 0.5),
    7: ("<?", True),
    10: ("<Q", 2**63 + 1),
    11: ("<q", -(2**62)),
    12: ("<d", 0.1),
}


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(tmp_path, version):
    raw = RawGguf()
    raw.version = version
    for type_id, (layout, value) in SCALARS.items():
        raw.value(f"scalar.{type_id}", type_id, struct.pack(layout, value))
        raw.array(f"array.{type_id}", type_id, 3, struct.pack(layout, value) * 3)
    raw.value("text", 8, RawGguf.string("déjà vu"))
    raw.array("texts", 8, 3, RawGguf.string("") + RawGguf.string("a") + RawGguf.string("日本"))
    raw.array("none", 8, 0, b"")
    values = open_gguf(write(tmp_path, raw)).metadata.values
    for type_id, (_, value) in SCALARS.items():
        assert values[f"scalar.{type_id}"] == value
        assert type(values[f"scalar.{type_id}"]) is type(value)
        assert values[f"array.{type_id}"].tolist() == [value] * 3
    assert values["text"] == "déjà vu"
    assert values["texts"] == ["", "a", "日本"]
    assert values["none"] == []


HUGE = 2**64 - 1

HOSTILE = {
    "magic": (b"GGML" + bytes(60), "is not a GGUF file"),
    "short": (b"GGU", "is not a GGUF file"),
    "magic alone": (b"GGUF", "the version at byte 4 needs 4 bytes, 0 are left"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; supported versions: 2, 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "truncated or damaged"),
    "value count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "truncated or damaged"),
    "key length": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE) + bytes(32),
        "the key of metadata value 0",
    ),
    "string length": (RawGguf().value("k", 8, RawGguf.string("x", length=2**50)), "metadata 'k' at byte"),
    "not UTF-8": (RawGguf().value("k", 8, RawGguf.string(b"\xff\xfe")), "is not valid UTF-8"),
    "not UTF-8 in array": (RawGguf().array("k", 8, 1, RawGguf.string(b"\xc0")), "is not valid UTF-8"),
    "not UTF-8 key": (RawGguf().value(b"\xff", 4, bytes(4)), "is not valid UTF-8"),
    "value type": (RawGguf().value("k", 13, bytes(32)), "unknown value type 13"),
    "element type": (RawGguf().array("k", 77, 1, bytes(32)), "values of the unknown type 77"),
    "nested array": (RawGguf().array("k", 9, 1, bytes(32)), "is an array of arrays"),
    "array count": (RawGguf().array("k", 4, HUGE, bytes(32)), "the limit is 16777216"),
    "numbers past the end": (RawGguf().array("k", 4, 10_000_000, bytes(32)), "needs 40000000 bytes"),
    "strings past the end": (RawGguf().array("k", 8, 10_000_000, bytes(64)), "needs 80000000 bytes"),
    "string in array": (RawGguf().array("k", 8, 2, RawGguf.string("a", 2**63) + bytes(64)), "metadata 'k'"),
    "last string": (RawGguf().array("k", 8, 3, RawGguf.string("a" * 30) + bytes(8)), "metadata 'k'"),
    "bool": (RawGguf().value("k", 7, b"\x02"), "truth value other than 0 and 1"),
    "bools": (RawGguf().array("k", 7, 2, b"\x01\x03"), "truth value other than 0 and 1"),
    "duplicate key": (RawGguf().value("k", 0, b"1").value("k", 0, b"1"), "metadata 'k' appears twice"),
    "alignment 0": (RawGguf().value("general.alignment", 4, struct.pack("<I", 0)), "a power of two"),
    "alignment 48": (RawGguf().value("general.alignment", 4, struct.pack("<I", 48)), "a power of two"),
    "alignment huge": (RawGguf().value("general.alignment", 4, struct.pack("<I", 1 << 31)), "a power of two"),
    "alignment text": (RawGguf().value("general.alignment", 8, RawGguf.string("32")), "a power of two"),
    "duplicate tensor": (RawGguf().tensor("t", (8,)).tensor("t", (8,)), "tensor 't' appears twice"),
    "no dimensions": (RawGguf().tensor("t", ()), "has 0 dimensions; 1 to 4 are supported"),
    "many dimensions": (RawGguf().tensor("t", (1,) * 5), "has 5 dimensions; 1 to 4 are supported"),
    "empty tensor": (RawGguf().tensor("t", (8, 0)), "holds no values"),
    "size overflow": (RawGguf().tensor("t", (2**32, 2**32, 2**32, 2**32)), "past the end of the file"),
    "row overflow": (RawGguf().tensor("t", (2**63,)), "too large"),
    "row overflow u64": (RawGguf().tensor("t", (HUGE,)), "wrong row length"),
    "partial block": (RawGguf().tensor("t", (33,), type_id=8), "not a whole number of Q8_0 blocks"),
    "known type": (RawGguf().tensor("t", (256,), type_id=10), "stored as Q2_K, which is not supported"),
    "unknown type": (RawGguf().tensor("t", (256,), type_id=999), "stored as type 999"),
    "offset past the end": (RawGguf().tensor("t", (8,), offset=1 << 40), "past the end of the file"),
    "offset overflow": (RawGguf().tensor("t", (8,), offset=HUGE - 31), "past the end of the file"),
    "unaligned offset": (RawGguf().tensor("t", (8,), offset=8), "not a multiple of 32"),
    "no data": (RawGguf().tensor("t", (8,)), "past the end of the file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_a_sentence(tmp_path, case):
    content, message = HOSTILE[case]
    path = write(tmp_path, content)
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    text = str(caught.value)
    assert message in text
    assert text.startswith(str(path))
    assert "\n" not in text


def test_overlapping_tensors_are_refused(tmp_path):
    raw = RawGguf().tensor("first", (16,), offset=0).tensor("second", (8,), offset=32)
    raw.data = bytes(128)
    with pytest.raises(ModelError, match="tensor 'second' overlaps tensor 'first'"):
        open_gguf(write(tmp_path, raw))


def test_alignment_of_the_file_is_used(tmp_path):
    raw = RawGguf().value("general.alignment", 4, struct.pack("<I", 8)).tensor("t", (2,), offset=8)
    raw.alignment = 8
    raw.data = struct.pack("<4f", 0, 0, 1.5, 2.5)
    assert len(raw.bytes()) % 32, "with the usual alignment the tensor would start elsewhere"
    tensor = open_gguf(write(tmp_path, raw)).tensors["t"]
    np.testing.assert_array_equal(tensor.to_float32(), [1.5, 2.5])


def test_names_in_messages_are_escaped_and_cut(tmp_path):
    name = "\x1b[31m\n" + "x" * 10_000
    raw = RawGguf().tensor(name, (8,), type_id=10)
    with pytest.raises(ModelError) as caught:
        open_gguf(write(tmp_path, raw))
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_files_that_cannot_be_mapped(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="is not a regular file"):
        open_gguf(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="is not a regular file"):
        open_gguf(tmp_path / "pipe")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="is empty"):
        open_gguf(tmp_path / "empty.gguf")
    with pytest.raises(ModelError, match="does not exist"):
        open_gguf(str(tmp_path / "nul\0byte"))


def test_views_outlive_the_reader_and_the_directory_entry(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    tensor = open_gguf(path).tensors["output_norm.weight"]
    path.unlink()
    np.testing.assert_array_equal(tensor.to_float32(), canonical_weights()["norm"])
