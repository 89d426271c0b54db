"""A small Hugging Face model folder for tests, written without torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors.numpy import save_file

from rung.models.loader import open_model
from tests.model_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    VOCAB,
    canonical_weights,
    write_gguf,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

HF_PARTS = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf_name(canonical: str) -> str:
    """The tensor's name in a checkpoint; names that are not canonical stay as they are."""
    if canonical.startswith("layers."):
        _, layer, part = canonical.split(".")
        return f"model.layers.{layer}.{HF_PARTS[part]}.weight"
    top = {
        "embed_tokens": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "lm_head": "lm_head.weight",
    }
    return top.get(canonical, canonical)


def write_json(path: Path, values: Any) -> None:
    """A JSON file."""
    path.write_text(json.dumps(values))


def write_folder(
    folder: Path,
    config: dict[str, Any] | None = None,
    weights: dict[str, npt.NDArray[np.float32]] | None = None,
    num_shards: int = 1,
) -> Path:
    """config: changes to `CONFIG`. weights: canonical; spread over `num_shards` files."""
    folder.mkdir()
    write_json(folder / "config.json", CONFIG | (config or {}))
    bundle = open_model(write_gguf(folder / "tokenizer.gguf")).metadata.tokenizer
    (folder / "tokenizer.gguf").unlink()
    (folder / "tokenizer.json").write_bytes(bundle.files["tokenizer.json"])
    named = {hf_name(name): array for name, array in (weights or canonical_weights()).items()}
    if num_shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: array for index, (key, array) in enumerate(named.items()) if index % num_shards == shard}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder
