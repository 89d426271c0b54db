"""Paged keys and values in float32. Who owns a block is the scheduler's business, not this file's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rung.models.config import ModelConfig


def kv_bytes_per_block(config: ModelConfig, block_size: int) -> int:
    """Bytes of one block over all layers: 2 x layers x kv_heads x head_dim x block_size x 4."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size * 4


class PagedKV:
    """Per layer, keys and values [num_blocks + 1, block_size, num_kv_heads, head_dim] float32.

    A slot is `block * block_size + offset`. The extra last block is never written and holds
    zeros: padding of a gather points there, so that no stale or poisoned value reaches a product.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self.block_size = block_size
        self.pad_slot = num_blocks * block_size
        # Left as the system gives it: no slot is read before it is written, and pages that are never
        # used never become resident.
        self._keys = [torch.empty(shape) for _ in range(config.num_layers)]
        self._values = [torch.empty(shape) for _ in range(config.num_layers)]
        for cache in (*self._keys, *self._values):
            cache[-1] = 0.0

    def poison(self, blocks: torch.Tensor) -> None:
        """Fill `blocks` [F] int64 with NaN, so that reading one before it is rewritten shows."""
        if len(blocks) == 0:
            return
        for cache in (*self._keys, *self._values):
            cache.index_fill_(0, blocks, torch.nan)

    def copy(self, pairs: torch.Tensor) -> None:
        """Copy whole blocks: `pairs` [C, 2] int64 of (source, target)."""
        if len(pairs) == 0:
            return
        for cache in (*self._keys, *self._values):
            cache.index_copy_(0, pairs[:, 1], cache.index_select(0, pairs[:, 0]))

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [num_tokens, num_kv_heads, head_dim] to `slots` [num_tokens] int64."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self._values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `slots` [...] int64: two tensors [..., num_kv_heads, head_dim]."""
        return _take(self._keys[layer], slots), _take(self._values[layer], slots)


def _take(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    # One flat row per slot: index_select copies it whole, several times quicker than cache[slots].
    flat = cache.flatten(2).flatten(0, 1).index_select(0, slots.flatten())
    return flat.view(*slots.shape, *cache.shape[2:])
