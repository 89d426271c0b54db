"""The op interface that a model file is written against, once for every backend.

A backend binds the step's batch before the model runs, so ops take tensors and weight names
only. `T` is the backend's tensor (a torch tensor, or a register of a recorded program).
Rows of a step are packed: [num_tokens, ...] over all rows' query tokens.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

T = TypeVar("T")


class Ops(Protocol[T]):
    """Each weight is named `layers.{i}.{part}` or as the model file's table says."""

    def embed(self, weight: str) -> T:
        """Rows of `weight` for the step's token ids: [num_tokens, hidden_size]."""
        ...

    def rms_norm(self, x: T, weight: str, eps: float) -> T:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019)."""
        ...

    def linear(self, x: T, weight: str) -> T:
        """x @ weight^T: [num_tokens, in] x [out, in] -> [num_tokens, out]."""
        ...

    def rope_and_store_kv(self, q: T, k: T, v: T, layer: int) -> T:
        """Rotate q and k by absolute position (Su et al. 2021; pairs (i, i + head_dim/2)), store
        k and v in the layer's KV blocks, return the rotated q.

        q: [num_tokens, num_heads * head_dim]; k, v: [num_tokens, num_kv_heads * head_dim].
        """
        ...

    def paged_attention(self, q: T, layer: int, scale: float) -> T:
        """Causal attention of each query over its row's stored keys and values.

        Returns [num_tokens, num_heads * head_dim]. Source: Kwon et al. 2023, arXiv:2309.06180.
        """
        ...

    def silu_mul(self, gate: T, up: T) -> T:
        """silu(gate) * up, elementwise."""
        ...

    def add(self, a: T, b: T) -> T:
        """a + b, elementwise."""
        ...

    def logits(self, x: T, weight: str) -> None:
        """Keep x @ weight^T of the rows that sample, for the sampling phase: [num_samples, vocab]."""
        ...
