"""GGUF metadata to `ModelConfig` and sampling defaults. Settings that would change the answers
and that no runner implements are refused, never ignored. Tensor shapes are the loader's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rung.models.config import DefaultSampling, ModelConfig

if TYPE_CHECKING:
    from collections.abc import Container

    from rung.formats.gguf.metadata import Metadata

# Keys after the architecture's name, with the values that mean "off".
_MUST_BE_OFF: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
}


def model_config(metadata: Metadata, tensor_names: Container[str]) -> ModelConfig:
    """The decoder that the file describes."""
    architecture = metadata.text("general.architecture")
    prefix = architecture + "."
    for key, neutral in _MUST_BE_OFF.items():
        value = metadata.values.get(prefix + key)
        if value is not None and value not in neutral:
            raise metadata.error(f"metadata {prefix}{key} is {value!r}; this feature is not supported")

    def positive(key: str) -> int:
        return metadata.integer(prefix + key, minimum=1)

    num_heads = positive("attention.head_count")
    hidden_size = positive("embedding_length")
    head_dim = metadata.optional_integer(prefix + "attention.key_length", minimum=1)
    if head_dim is None:
        if hidden_size % num_heads:
            raise metadata.error(
                f"embedding length {hidden_size} is not a multiple of {num_heads} heads, "
                f"and metadata {prefix}attention.key_length is missing"
            )
        head_dim = hidden_size // num_heads
    for key in ("attention.value_length", "rope.dimension_count"):
        length = metadata.optional_integer(prefix + key)
        if length is not None and length != head_dim:
            raise metadata.error(
                f"metadata {prefix}{key} is {length}; only the head size {head_dim} is supported"
            )
    num_kv_heads = metadata.optional_integer(prefix + "attention.head_count_kv", minimum=1)
    vocab_size = metadata.optional_integer(prefix + "vocab_size", minimum=1)
    rope_theta = metadata.optional_real(prefix + "rope.freq_base")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size or len(metadata.texts("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=positive("feed_forward_length"),
        num_layers=positive("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_dim=head_dim,
        rms_norm_eps=metadata.real(prefix + "attention.layer_norm_rms_epsilon"),
        rope_theta=10000.0 if rope_theta is None else rope_theta,
        max_position_embeddings=positive("context_length"),
        tie_word_embeddings="output.weight" not in tensor_names,
    )


def default_sampling(metadata: Metadata) -> DefaultSampling:
    """The file's recommendation, where it has one."""
    return DefaultSampling(
        temperature=metadata.optional_real("general.sampling.temp"),
        top_k=metadata.optional_integer("general.sampling.top_k"),
        top_p=metadata.optional_real("general.sampling.top_p"),
    )
