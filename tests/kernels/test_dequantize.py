"""`rung_kernels.dequantize` against the `gguf` package, bit for bit."""

from __future__ import annotations

import importlib.metadata
import threading

import gguf
import numpy as np
import numpy.typing as npt
import pytest

import rung_kernels

FORMATS = rung_kernels.FORMATS


def oracle(format_name: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    quant_type = gguf.GGMLQuantizationType[format_name]
    with np.errstate(all="ignore"):
        return np.asarray(gguf.dequantize(data, quant_type), dtype=np.float32)


def assert_same_bits(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    # A NaN's sign and payload are the instruction's choice; where one is, and all else, is ours.
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(actual.view(np.uint32)[finite], expected.view(np.uint32)[finite])


def block_of(format_name: str) -> tuple[int, int]:
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format_name]]
    return block_len, block_bytes


def test_formats_are_those_the_loader_needs() -> None:
    assert set(FORMATS) == {
        "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K",
    }  # fmt: skip


def test_version_is_that_of_the_installed_package() -> None:
    assert rung_kernels.__version__ == importlib.metadata.version("rung-kernels")


@pytest.mark.parametrize("format_name", FORMATS)
def test_random_blocks(format_name: str) -> None:
    rng = np.random.default_rng(7)
    block_len, block_bytes = block_of(format_name)
    data = rng.integers(0, 256, size=(13, 5 * block_bytes), dtype=np.uint8)
    assert_same_bits(rung_kernels.dequantize(format_name, data, 5 * block_len), oracle(format_name, data))


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_byte_value_everywhere(format_name: str) -> None:
    block_len, block_bytes = block_of(format_name)
    data = np.repeat(np.arange(256, dtype=np.uint8)[:, None], block_bytes, axis=1)
    assert_same_bits(rung_kernels.dequantize(format_name, data, block_len), oracle(format_name, data))


@pytest.mark.parametrize("format_name", [name for name in FORMATS if name not in ("F32", "F16", "BF16")])
@pytest.mark.parametrize(
    "scale", [0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00]
)
def test_edge_scales(format_name: str, scale: int) -> None:
    """Zero, negative zero, subnormal, largest, infinite and NaN scales and minima."""
    rng = np.random.default_rng(scale)
    block_len, block_bytes = block_of(format_name)
    data = rng.integers(0, 256, size=(4, block_bytes), dtype=np.uint8)
    places = (208,) if format_name == "Q6_K" else (0, 2) if format_name.endswith(("1", "_K")) else (0,)
    for place in places:
        data[:, place : place + 2] = np.frombuffer(np.uint16(scale).tobytes(), dtype=np.uint8)
    assert_same_bits(rung_kernels.dequantize(format_name, data, block_len), oracle(format_name, data))


def test_all_half_and_bfloat_numbers() -> None:
    data = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(256, 512)
    for format_name in ("F16", "BF16"):
        assert_same_bits(rung_kernels.dequantize(format_name, data, 256), oracle(format_name, data))


@pytest.mark.parametrize("format_name", FORMATS)
def test_row_bytes(format_name: str) -> None:
    block_len, block_bytes = block_of(format_name)
    assert rung_kernels.row_bytes(format_name, 3 * block_len) == 3 * block_bytes
    if block_len > 1:
        with pytest.raises(
            ValueError, match=rf"{3 * block_len + 1} values .* {format_name} blocks of {block_len}"
        ):
            rung_kernels.row_bytes(format_name, 3 * block_len + 1)


def test_empty() -> None:
    assert rung_kernels.dequantize("Q4_K", np.empty((0, 144), np.uint8), 256).shape == (0, 256)
    assert rung_kernels.dequantize("F32", np.empty((3, 0), np.uint8), 0).shape == (3, 0)


def test_wrong_arguments_name_the_numbers() -> None:
    data = np.zeros((2, 36), np.uint8)
    with pytest.raises(ValueError, match=r"rows of 36 bytes; 32 values of format Q8_0 take 34"):
        rung_kernels.dequantize("Q8_0", data, 32)
    with pytest.raises(ValueError, match=r"unknown weight format .IQ2_XS.; known: F32, F16"):
        rung_kernels.dequantize("IQ2_XS", data, 32)
    with pytest.raises(ValueError, match="not a whole number of Q8_0 blocks"):
        rung_kernels.dequantize("Q8_0", data, 31)
    with pytest.raises(ValueError, match="too large"):
        rung_kernels.dequantize("F32", data, 2**63)
    with pytest.raises(ValueError, match="contiguous"):
        rung_kernels.dequantize("F32", data[:, ::2][:, :16], 4)
    with pytest.raises(TypeError):
        rung_kernels.dequantize("F32", data.view(np.int8), 9)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rung_kernels.dequantize("F32", data[0], 9)


def test_read_only_rows_and_several_threads() -> None:
    data = np.random.default_rng(3).integers(0, 256, size=(64, 210 * 4), dtype=np.uint8)
    data.flags.writeable = False
    expected = oracle("Q6_K", data)
    results: list[npt.NDArray[np.float32]] = []
    threads = [
        threading.Thread(target=lambda: results.append(rung_kernels.dequantize("Q6_K", data, 1024)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        assert_same_bits(result, expected)
