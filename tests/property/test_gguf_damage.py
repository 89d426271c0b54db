"""Damaged GGUF files: each opens as a whole model or fails in one sentence, in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rung.errors import ModelError
from rung.formats.gguf import open_gguf
from rung.models.loader import open_model
from tests.model_files import write_gguf

# A damaged count must not cost more than a few times the file, whatever it claims.
MAX_MEMORY_BYTES = 4 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damage")


@pytest.fixture(scope="module")
def content(folder):
    """A whole file of the `gguf` package's making, with quantized matrices."""
    return write_gguf(folder / "whole.gguf", quantization="Q8_0").read_bytes()


@pytest.fixture(scope="module")
def data_start(folder, content):
    """Where the header ends and the first tensor begins."""
    path = folder / "whole.gguf"
    first = next(iter(open_gguf(path).tensors.values()))
    start = content.index(first.data.tobytes())
    assert start % 32 == 0
    return start


def open_damaged(folder, damaged):
    """Whether the file opened; if so, everything in it must be usable."""
    path = folder / "damaged.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(damaged)
    try:
        model = open_model(path)
    except ModelError as error:
        message = str(error)
    else:
        use(model)
        return True
    assert message
    assert "\n" not in message
    return False


def use(model):
    """Decode all weights, load the tokenizer."""
    for name in model.weights.names():
        stored = model.weights.get(name)
        assert stored.to_float32().shape == stored.shape
    Tokenizer.from_buffer(model.metadata.tokenizer.files["tokenizer.json"])


def test_the_whole_file_opens(folder, content):
    assert open_damaged(folder, content)


def test_every_truncation_of_the_header(folder, content, data_start):
    for length in range(data_start):
        assert not open_damaged(folder, content[:length]), length


def test_truncations_of_the_data(folder, content, data_start):
    tensors = open_gguf(folder / "whole.gguf").tensors
    boundaries, position = [], data_start
    for tensor in tensors.values():
        boundaries += [position, position + 1, position + tensor.data.nbytes - 1]
        position += -(-tensor.data.nbytes // 32) * 32
    assert len(boundaries) == 3 * len(tensors)
    for length in boundaries:
        assert not open_damaged(folder, content[:length]), length


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_bytes(folder, content, data_start, data):
    damaged = bytearray(content)
    changes = st.tuples(st.integers(0, data_start - 1), st.integers(0, 255))
    for position, value in data.draw(st.lists(changes, min_size=1, max_size=8)):
        damaged[position] = value
    open_damaged(folder, bytes(damaged))


EXTREMES = [
    0,
    1,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**61,
    2**63 - 1,
    2**63,
    2**64 - 32,
    2**64 - 1,
]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_counts(folder, content, data_start, data):
    """Eight or four bytes anywhere become an extreme number: lengths, counts, dimensions, offsets."""
    damaged = bytearray(content)
    position = data.draw(st.integers(4, data_start - 8))
    number = data.draw(st.sampled_from(EXTREMES) | st.integers(0, 2**64 - 1))
    width, layout = data.draw(st.sampled_from([(8, "<Q"), (4, "<I")]))
    damaged[position : position + width] = struct.pack(layout, number % (1 << 8 * width))
    tracemalloc.start()
    try:
        open_damaged(folder, bytes(damaged))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_MEMORY_BYTES


@settings(max_examples=200, deadline=None)
@given(tail=st.binary(max_size=400))
@example(tail=b"")
def test_noise_after_the_magic(folder, tail):
    open_damaged(folder, b"GGUF" + struct.pack("<I", 3) + tail)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_removed_and_doubled_parts(folder, content, data_start, data):
    start = data.draw(st.integers(0, data_start - 1))
    end = data.draw(st.integers(start, data_start))
    part = content[start:end]
    open_damaged(folder, content[:start] + part * data.draw(st.sampled_from([0, 2])) + content[end:])
