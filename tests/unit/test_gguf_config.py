"""GGUF metadata to a model: settings, weights, and refusals of what is not implemented."""

from __future__ import annotations

import numpy as np
import pytest

from rung.errors import ModelError
from rung.models.config import DefaultSampling, ModelConfig
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


def refused(tmp_path, match, metadata=None, weights=None):
    path = write_gguf(tmp_path / "tiny.gguf", metadata, weights)
    with pytest.raises(ModelError, match=match) as caught:
        open_model(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_metadata(tmp_path):
    metadata = open_model(write_gguf(tmp_path / "tiny.Q8_0.gguf", quantization="Q8_0")).metadata
    assert metadata.name == "tiny.Q8_0"
    assert metadata.config == ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=float(np.float32(1e-5)),
        rope_theta=10000.0,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    assert metadata.weight_format == "Q8_0"
    assert metadata.num_parameters == sum(weight.size for weight in canonical_weights().values())
    assert metadata.default_sampling == DefaultSampling()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_canonical(tmp_path, tied):
    """Rotary rows come back in half-split order, everything else as it was stored."""
    expected = canonical_weights()
    if not tied:
        expected["lm_head"] = expected["embed_tokens"][::-1].copy()
    model = open_model(write_gguf(tmp_path / "tiny.gguf", weights=expected))
    assert model.metadata.config.tie_word_embeddings is tied
    assert set(model.weights.names()) == set(expected)
    for name, weight in expected.items():
        stored = model.weights.get(name)
        assert stored.name == name
        assert stored.shape == weight.shape
        np.testing.assert_array_equal(stored.to_float32(), weight)
    assert model.weights.total_bytes == sum(weight.nbytes for weight in expected.values())


def test_rotary_rows_of_quantized_weights_move_whole(tmp_path):
    quantized = open_model(write_gguf(tmp_path / "quantized.gguf", quantization="Q4_0")).weights
    exact = canonical_weights()
    for name in ("layers.0.q_proj", "layers.1.k_proj"):
        stored = quantized.get(name)
        assert stored.format == "Q4_0"
        # Rows of a seeded weight are far apart: a row in a wrong place is off by more than its rounding.
        assert np.abs(stored.to_float32() - exact[name]).max() < 0.06


def test_names_keep_the_order_of_the_file(tmp_path):
    weights = dict(reversed(canonical_weights().items()))
    assert open_model(write_gguf(tmp_path / "tiny.gguf", weights=weights)).weights.names() == tuple(weights)


def test_unknown_weight_name_is_a_key_error(tmp_path):
    with pytest.raises(KeyError):
        open_model(write_gguf(tmp_path / "tiny.gguf")).weights.get("lm_head")


def test_recommended_sampling(tmp_path):
    settings = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.top_p": 0.75}
    model = open_model(write_gguf(tmp_path / "tiny.gguf", settings))
    assert model.metadata.default_sampling == DefaultSampling(temperature=0.5, top_k=20, top_p=0.75)


def test_head_size_of_its_own(tmp_path):
    settings = {"llama.attention.key_length": HEAD_DIM, "llama.attention.value_length": HEAD_DIM}
    model = open_model(write_gguf(tmp_path / "tiny.gguf", settings))
    assert model.metadata.config.head_dim == HEAD_DIM
    refused(tmp_path, "attn_q.weight has the shape", settings | {
        "llama.attention.key_length": 8, "llama.attention.value_length": 8, "llama.rope.dimension_count": 8,
    })  # fmt: skip


UNSUPPORTED = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.expert_count": 8,
    "llama.attention.sliding_window": 4096,
    "llama.final_logit_softcapping": 30.0,
    "llama.rope.dimension_count": 8,
    "llama.attention.value_length": 32,
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, key):
    refused(tmp_path, rf"metadata {key} is .*support", {key: UNSUPPORTED[key]})


def test_neutral_values_of_such_settings_are_accepted(tmp_path):
    neutral = {"llama.rope.scaling.type": "none", "llama.expert_count": 0, "llama.rope.scaling.factor": 1.0}
    open_model(write_gguf(tmp_path / "tiny.gguf", neutral))


WRONG = {
    "llama.block_count": (0, "must be 1 to"),
    "llama.embedding_length": ("64", "must be an integer, not str"),
    "llama.attention.head_count": ([4, 4], "must be an integer, not an array of int32"),
    "llama.attention.head_count_kv": (3, "4 attention heads cannot share 3 key-value heads evenly"),
    "llama.attention.layer_norm_rms_epsilon": (0.0, "rms_norm_eps is 0.0; it must be positive"),
    "llama.rope.freq_base": (float("inf"), "must be finite"),
    "llama.context_length": (-5, "is -5; it must be 1 to"),
    "llama.vocab_size": (VOCAB + 1, "token_embd.weight has the shape"),
    "llama.feed_forward_length": (MLP * 2, r"ffn_gate.weight has the shape \[96, 64\].*asks for \[192, 64\]"),
    "general.sampling.top_p": (1.5, "top_p is 1.5"),
    "general.sampling.temp": (-1.0, "temperature is -1.0"),
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_settings(tmp_path, key):
    value, message = WRONG[key]
    refused(tmp_path, message, {key: value})


@pytest.mark.parametrize(
    "key", ["llama.block_count", "llama.context_length", "llama.attention.layer_norm_rms_epsilon"]
)
def test_missing_settings(tmp_path, key):
    refused(tmp_path, f"metadata {key} is missing", {key: None})


def test_too_many_layers_are_refused_before_they_are_counted_out(tmp_path):
    refused(tmp_path, "4000 layers cannot be made of 20 tensors", {"llama.block_count": 4000})
    refused(tmp_path, "num_layers is 2147483647; it must be 1 to", {"llama.block_count": 2**31 - 1})


def test_missing_and_surplus_tensors(tmp_path):
    weights = canonical_weights()
    del weights["layers.1.up_proj"]
    refused(tmp_path, "tensor blk.1.ffn_up.weight is missing", weights=weights)
    for surplus in ("blk.0.attn_q.bias", "rope_freqs.weight"):
        weights = canonical_weights() | {surplus: np.ones(HIDDEN, np.float32)}
        refused(tmp_path, f"tensor '{surplus}' has no place in this architecture", weights=weights)


def test_unknown_architecture(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(ModelError, match="architecture 'mamba' is not supported; supported: llama"):
        open_model(path)
