"""A checkpoint that `transformers` saved: every weight and setting arrives, single or in shards."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rung.models.config import DefaultSampling
from rung.models.loader import open_model
from tests.model_files import VOCAB, write_gguf


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("tokenizer") / "tiny.gguf")
    return open_model(path).metadata.tokenizer.files["tokenizer.json"]


def make_checkpoint(folder, tokenizer_json, dtype, shard_size, *, tied):
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 12345.0, "rope_type": "default"}, tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.7
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize(("dtype", "stored"), [(torch.float32, "F32"), (torch.bfloat16, "BF16")])
def test_saved_by_transformers(tmp_path, tokenizer_json, dtype, stored, shard_size, tied):
    saved = make_checkpoint(tmp_path, tokenizer_json, dtype, shard_size, tied=tied)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    opened = open_model(tmp_path)
    config = opened.metadata.config
    assert (config.num_layers, config.head_dim, config.rope_theta, config.rms_norm_eps) == (
        3,
        32,
        12345.0,
        1e-5,
    )
    assert config.tie_word_embeddings is tied
    assert opened.metadata.weight_format == stored
    assert opened.metadata.num_parameters == saved.num_parameters()
    assert opened.metadata.tokenizer.eos_token_ids == (2,)
    assert opened.metadata.default_sampling == DefaultSampling(temperature=0.7)

    state = saved.state_dict()
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    top = {
        "embed_tokens": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "lm_head": "lm_head.weight",
    }
    for name in opened.weights.names():
        part = name.rpartition(".")[2]
        inner = norms.get(part, f"self_attn.{part}" if part in attention else f"mlp.{part}")
        source = top.get(name, f"model.layers.{name.split('.')[1]}.{inner}.weight" if "." in name else "")
        weight = opened.weights.get(name)
        assert weight.format == stored
        assert torch.equal(torch.from_numpy(weight.to_float32()), state.pop(source).float())
    assert set(state) == ({"lm_head.weight"} if tied else set())
