"""Native CPU kernels of Rung: pure functions over numpy arrays, written in Rust.

Imports nothing from the engine and knows no model or file format beyond the layout of a block.
"""

from rung_kernels._native import FORMATS, __version__, dequantize, row_bytes

__all__ = ["FORMATS", "__version__", "dequantize", "row_bytes"]
