"""`config.json` to `ModelConfig`. Settings that would change the answers and that no runner
implements are refused, never ignored. Opens no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rung.formats.mapping import quoted
from rung.models.config import ModelConfig
from rung.models.registry import HF_ARCHITECTURES

if TYPE_CHECKING:
    from rung.formats.json_file import JsonFile

_ROPE_KEYS = ("rope_theta", "rope_type", "type")


def model_config(file: JsonFile) -> ModelConfig:
    """The decoder that the file describes."""
    architecture = _architecture(file)
    _refuse_unsupported(file)
    num_heads = file.integer("num_attention_heads")
    hidden_size = file.integer("hidden_size")
    head_dim = file.optional_integer("head_dim")
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise file.error(f"hidden_size {hidden_size} is not a multiple of {num_heads} attention heads")
        head_dim = hidden_size // num_heads
    rms_norm_eps = file.optional_real("rms_norm_eps")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=file.integer("intermediate_size"),
        num_layers=file.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=file.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=1e-6 if rms_norm_eps is None else rms_norm_eps,
        rope_theta=_rope_theta(file),
        max_position_embeddings=file.integer("max_position_embeddings"),
        tie_word_embeddings=file.flag("tie_word_embeddings"),
    )


def _architecture(file: JsonFile) -> str:
    names = file.values.get("architectures")
    supported = ", ".join(sorted(HF_ARCHITECTURES))
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise file.error(f"architectures must name one class, not {names!r:.80}; supported: {supported}")
    if names[0] not in HF_ARCHITECTURES:
        raise file.error(f"architecture {names[0]!r:.80} is not supported; supported: {supported}")
    return HF_ARCHITECTURES[names[0]]


def _refuse_unsupported(file: JsonFile) -> None:
    if file.values.get("auto_map") is not None:
        raise file.error("auto_map asks for code from the model's author, which is never run")
    quantization = file.values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise file.error(f"weights quantized with {method!r:.80} are not supported; use a GGUF file")
    activation = file.values.get("hidden_act", "silu")
    if activation != "silu":
        raise file.error(f"hidden_act {activation!r:.80} is not supported; supported: silu")
    for key in ("attention_bias", "mlp_bias"):
        if file.flag(key):
            raise file.error(f"{key} is true; biases are not supported")


def _rope_theta(file: JsonFile) -> float:
    """`rope_theta` with `rope_scaling`, or `rope_parameters`, which newer files have instead."""
    theta = file.optional_real("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        parameters = file.optional_object(key)
        if parameters is None:
            continue
        kind = parameters.values.get("rope_type", parameters.values.get("type", "default"))
        if kind != "default":
            raise file.error(f"{key} asks for rotary scaling {kind!r:.80}, which is not supported")
        for name, value in parameters.values.items():
            if name not in _ROPE_KEYS and (name, value) != ("partial_rotary_factor", 1.0):
                raise file.error(f"{key} has {quoted(name)}, which is not supported")
        own = parameters.optional_real("rope_theta")
        theta = theta if own is None else own
    return 10000.0 if theta is None else theta
