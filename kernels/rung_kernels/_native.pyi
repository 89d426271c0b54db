import numpy as np
import numpy.typing as npt

__version__: str

FORMATS: tuple[str, ...]
"""Names of the stored weight formats that the kernels read."""

def row_bytes(format: str, num_cols: int) -> int:
    """Bytes of a row of `num_cols` values.

    ValueError when the format is unknown or the row is not a whole number of its blocks.
    """

def dequantize(format: str, data: npt.NDArray[np.uint8], num_cols: int) -> npt.NDArray[np.float32]:
    """Decode rows of stored weights.

    data: [num_rows, row_bytes(format, num_cols)] uint8, contiguous
    Returns [num_rows, num_cols] float32, bit for bit what the `gguf` package computes. Releases
    the GIL, so several tensors may be decoded at once by Python threads. ValueError when shapes
    and format disagree. Source: the block structures of ggml.
    """
