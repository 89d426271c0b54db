"""Damaged safetensors files: each opens whole or fails in one sentence, in bounded memory."""

from __future__ import annotations

import json
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rung.errors import ModelError
from rung.formats.safetensors import open_safetensors

MAX_MEMORY_BYTES = 4 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damage")


@pytest.fixture(scope="module")
def content(folder):
    """A whole file of the library's making."""
    arrays = {f"layer.{index}.weight": np.ones((index + 1, 8), np.float32) for index in range(6)}
    save_file(arrays, folder / "whole.safetensors", metadata={"format": "pt"})
    return (folder / "whole.safetensors").read_bytes()


def open_damaged(folder, damaged):
    """Whether the file opened; if so, every tensor must be usable."""
    path = folder / "damaged.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(damaged)
    tracemalloc.start()
    try:
        tensors = open_safetensors(path)
    except ModelError as error:
        message = str(error)
    else:
        for tensor in tensors.values():
            assert tensor.to_float32().shape == tensor.shape
        return True
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_MEMORY_BYTES
    assert message
    assert "\n" not in message
    return False


def test_the_whole_file_opens(folder, content):
    assert open_damaged(folder, content)


def test_every_truncation(folder, content):
    for length in range(len(content)):
        assert not open_damaged(folder, content[:length]), length


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_bytes(folder, content, data):
    damaged = bytearray(content)
    header_end = 8 + int.from_bytes(content[:8], "little")
    changes = st.tuples(st.integers(0, header_end - 1), st.integers(0, 255))
    for position, value in data.draw(st.lists(changes, min_size=1, max_size=6)):
        damaged[position] = value
    open_damaged(folder, bytes(damaged))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
SIZES = st.lists(st.sampled_from([-1, 0, 1, 2, 4, 8, 16, 2**31, 2**63, 2**64]) | JSON, max_size=4) | JSON
ENTRIES = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "F16", "BF16", "I64"]) | JSON, "shape": SIZES, "data_offsets": SIZES}
)


@settings(max_examples=400, deadline=None)
@given(
    header=st.dictionaries(st.text(max_size=4), ENTRIES | JSON, max_size=3),
    length=st.sampled_from([0, 8, 16]),
)
def test_any_header(folder, header, length):
    raw = json.dumps(header).encode()
    open_damaged(folder, struct.pack("<Q", len(raw)) + raw + bytes(length))


@settings(max_examples=100, deadline=None)
@given(noise=st.binary(max_size=200))
def test_noise(folder, noise):
    open_damaged(folder, noise)
