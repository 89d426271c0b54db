"""GGUF files, versions 2 and 3, little-endian.

Source: the GGUF specification in the ggml repository (docs/gguf.md).
"""

from rung.formats.gguf.reader import GgufFile, open_gguf

__all__ = ["GgufFile", "open_gguf"]
