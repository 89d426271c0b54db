"""Weights as they are stored: bytes, shape and format, under canonical names. Reads no files.

Canonical names: `embed_tokens`, `norm`, `lm_head` (absent where it is tied to `embed_tokens`) and
`layers.{i}.{attn_norm,q_proj,k_proj,v_proj,o_proj,mlp_norm,gate_proj,up_proj,down_proj}`. Rows of
q_proj and k_proj are in half-split rotary order, whatever the source stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import rung_kernels

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor in its stored format; usually a view on the mapped file, never to be written.

    shape:  [rows, cols], or [cols] for a vector.
    format: one of `rung_kernels.FORMATS`.
    data:   [rows, row_bytes] uint8, contiguous; one row for a vector.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: npt.NDArray[np.uint8]

    @property
    def num_values(self) -> int:
        """How many numbers the tensor holds."""
        return len(self.data) * self.shape[-1]

    def to_float32(self) -> npt.NDArray[np.float32]:
        """A decoded copy of shape `shape`."""
        return rung_kernels.dequantize(self.format, self.data, self.shape[-1]).reshape(self.shape)


class WeightSource(Protocol):
    """The weights of one model, all present and of the right shapes."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    def names(self) -> tuple[str, ...]:
        """Canonical names, in the order in which a load should touch them (that of the file)."""
        ...

    def get(self, name: str) -> StoredTensor:
        """The tensor of that canonical name; `KeyError` when it is not in `names`."""
        ...

    def release_pages(self) -> None:
        """Give back the memory that reading took, where it holds mapped files; reading works on."""
        ...
