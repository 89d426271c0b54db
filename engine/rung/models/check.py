"""Limits on what a model file may claim, whatever its format. Reads no files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rung.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from rung.models.config import DefaultSampling, ModelConfig

# Above every published model by far; below what could overflow or exhaust anything.
_MAX_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": 1 << 12,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 28,
}


def check_config(config: ModelConfig, source: Path) -> None:
    """Refuse sizes and constants that no decoder can have."""
    for field, maximum in _MAX_SIZES.items():
        size = getattr(config, field)
        if not 1 <= size <= maximum:
            raise ModelError(f"{source}: {field} is {size}; it must be 1 to {maximum}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{source}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"{source}: head_dim is {config.head_dim}; rotary embedding needs an even number")
    for field in ("rms_norm_eps", "rope_theta"):
        value = getattr(config, field)
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{source}: {field} is {value}; it must be positive and finite")


def check_sampling(sampling: DefaultSampling, source: Path) -> None:
    """Refuse recommendations that no request could carry."""
    if sampling.temperature is not None and not 0 <= sampling.temperature <= 100:
        raise ModelError(f"{source}: default temperature is {sampling.temperature}; it must be 0 to 100")
    if sampling.top_k is not None and not 0 <= sampling.top_k < 2**31:
        raise ModelError(f"{source}: default top_k is {sampling.top_k}; it must be 0 to {2**31 - 1}")
    for name, value, most in (
        ("top_p", sampling.top_p, 1),
        ("typical_p", sampling.typical_p, 1),
        ("repetition_penalty", sampling.repetition_penalty, 2),
    ):
        if value is not None and not 0 < value <= most:
            raise ModelError(f"{source}: default {name} is {value}; it must be above 0 and at most {most}")
    if sampling.min_p is not None and not 0 <= sampling.min_p <= 1:
        raise ModelError(f"{source}: default min_p is {sampling.min_p}; it must be 0 to 1")
