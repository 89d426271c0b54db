"""The llama decoder, once for every backend, and its names in checkpoints. No arithmetic here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rung.models.registry import Architecture

if TYPE_CHECKING:
    from rung.models.config import ModelConfig
    from rung.models.ops import Ops, T

GGUF_NAMES = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.q_proj": "blk.{i}.attn_q.weight",
    "layers.{i}.k_proj": "blk.{i}.attn_k.weight",
    "layers.{i}.v_proj": "blk.{i}.attn_v.weight",
    "layers.{i}.o_proj": "blk.{i}.attn_output.weight",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.gate_proj": "blk.{i}.ffn_gate.weight",
    "layers.{i}.up_proj": "blk.{i}.ffn_up.weight",
    "layers.{i}.down_proj": "blk.{i}.ffn_down.weight",
}

HF_NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.q_proj": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.k_proj": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.v_proj": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.o_proj": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.gate_proj": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.up_proj": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.down_proj": "model.layers.{i}.mlp.down_proj.weight",
}


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical part to shape, rows first: [out_features, in_features], or [hidden_size] for norms."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return {
        "embed_tokens": (config.vocab_size, hidden),
        "norm": (hidden,),
        "lm_head": (config.vocab_size, hidden),
        "layers.{i}.attn_norm": (hidden,),
        "layers.{i}.q_proj": (q_size, hidden),
        "layers.{i}.k_proj": (kv_size, hidden),
        "layers.{i}.v_proj": (kv_size, hidden),
        "layers.{i}.o_proj": (hidden, q_size),
        "layers.{i}.mlp_norm": (hidden,),
        "layers.{i}.gate_proj": (mlp, hidden),
        "layers.{i}.up_proj": (mlp, hidden),
        "layers.{i}.down_proj": (hidden, mlp),
    }


def decoder(ops: Ops[T], config: ModelConfig) -> None:
    """Run one step: pre-norm blocks of grouped-query attention and a gated MLP.

    Source: Touvron et al. 2023, arXiv:2302.13971; grouped queries: Ainslie et al. 2023,
    arXiv:2305.13245. The packed hidden state x is [num_tokens, hidden_size].
    """
    eps = config.rms_norm_eps
    scale = config.head_dim**-0.5
    x = ops.embed("embed_tokens")
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        h = ops.rms_norm(x, prefix + "attn_norm", eps)
        q = ops.linear(h, prefix + "q_proj")
        k = ops.linear(h, prefix + "k_proj")
        v = ops.linear(h, prefix + "v_proj")
        q = ops.rope_and_store_kv(q, k, v, layer)
        attended = ops.paged_attention(q, layer, scale)
        x = ops.add(x, ops.linear(attended, prefix + "o_proj"))
        h = ops.rms_norm(x, prefix + "mlp_norm", eps)
        gate = ops.linear(h, prefix + "gate_proj")
        up = ops.linear(h, prefix + "up_proj")
        x = ops.add(x, ops.linear(ops.silu_mul(gate, up), prefix + "down_proj"))
    x = ops.rms_norm(x, "norm", eps)
    ops.logits(x, "embed_tokens" if config.tie_word_embeddings else "lm_head")


ARCHITECTURE = Architecture(
    decoder=decoder,
    weight_shapes=weight_shapes,
    gguf_names=GGUF_NAMES,
    hf_names=HF_NAMES,
    gguf_interleaved_heads=("layers.{i}.q_proj", "layers.{i}.k_proj"),
    # A tied head may be stored again; old checkpoints hold the rotary frequencies.
    hf_ignored=("lm_head.weight", "model.layers.*.self_attn.rotary_emb.inv_freq"),
)
