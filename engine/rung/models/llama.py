"""The llama decoder, once for every backend, and its names in checkpoints. No arithmetic here."""

from __future__ import annotations

from rung.models.config import ModelConfig
from rung.models.ops import Ops, T


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
        h = ops.rms_norm(x, prefix + "input_norm", eps)
        q = ops.linear(h, prefix + "q_proj")
        k = ops.linear(h, prefix + "k_proj")
        v = ops.linear(h, prefix + "v_proj")
        q = ops.rope_and_store_kv(q, k, v, layer)
        attended = ops.paged_attention(q, layer, scale)
        x = ops.add(x, ops.linear(attended, prefix + "o_proj"))
        h = ops.rms_norm(x, prefix + "post_attention_norm", eps)
        gate = ops.linear(h, prefix + "gate_proj")
        up = ops.linear(h, prefix + "up_proj")
        x = ops.add(x, ops.linear(ops.silu_mul(gate, up), prefix + "down_proj"))
    x = ops.rms_norm(x, "norm", eps)
    ops.logits(x, "embed_tokens" if config.tie_word_embeddings else "lm_head")
