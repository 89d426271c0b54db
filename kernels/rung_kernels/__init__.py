"""Native CPU kernels of Rung, written in Rust: over numpy arrays, or a whole recorded model.

Imports nothing from the engine and knows no model or file format beyond the layout of a block.
"""

from rung_kernels._native import (
    AVAILABLE_ISAS,
    FORMATS,
    Model,
    __version__,
    dequantize,
    kv_bytes_per_block,
    measure_limits,
    row_bytes,
)

__all__ = [
    "AVAILABLE_ISAS",
    "FORMATS",
    "Model",
    "__version__",
    "dequantize",
    "kv_bytes_per_block",
    "measure_limits",
    "row_bytes",
]
