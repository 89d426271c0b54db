"""The table of architectures: name to the module that describes it. Imports none until asked."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rung.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rung.models.config import ModelConfig
    from rung.models.ops import Ops

# Name, as in `ModelConfig.architecture` and GGUF, to "module:attribute" of its `Architecture`.
ARCHITECTURES = {
    "llama": "rung.models.llama:ARCHITECTURE",
}

# The class names of `config.json`.
HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a model file provides.

    Weights are keyed by canonical part, such as "layers.{i}.q_proj" with the layer left open.

    decoder:       runs one step against the op interface.
    weight_shapes: part to shape, rows first; "lm_head" counts only where it is not tied.
    gguf_names, hf_names: part to the tensor's name in the source, "{i}" for the layer.
    gguf_interleaved_heads: parts whose rows GGUF stores per head as pairs (0, d/2, 1, d/2+1, ...),
        for rotary embedding of neighbours; canonical is the half-split order (0, 1, ...).
    hf_ignored: patterns of tensors that checkpoints may hold and the decoder does without.
    """

    decoder: Callable[[Ops[Any], ModelConfig], None]
    weight_shapes: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]
    gguf_names: Mapping[str, str]
    hf_names: Mapping[str, str]
    gguf_interleaved_heads: tuple[str, ...] = ()
    hf_ignored: tuple[str, ...] = ()


def find_architecture(name: str) -> Architecture:
    """The architecture of that name, or a `ModelError` that lists the known ones."""
    target = ARCHITECTURES.get(name)
    if target is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"architecture {name!r} is not supported; supported: {known}")
    module_name, _, attribute = target.partition(":")
    architecture = getattr(importlib.import_module(module_name), attribute)
    assert isinstance(architecture, Architecture)
    return architecture
