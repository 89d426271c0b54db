"""Hugging Face folders: settings, weights in shards, tokenizer files, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rung.errors import ModelError
from rung.models.config import DefaultSampling, ModelConfig
from rung.models.loader import open_model
from tests.hf_files import write_folder, write_json
from tests.model_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    VOCAB,
    canonical_weights,
)


def refused(folder, match):
    with pytest.raises(ModelError, match=match) as caught:
        open_model(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_whole_folder(tmp_path, num_shards):
    model = open_model(write_folder(tmp_path / "tiny-llama", num_shards=num_shards))
    assert model.metadata.name == "tiny-llama"
    assert model.metadata.config == ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    assert model.metadata.weight_format == "F32"
    assert model.metadata.tokenizer.bos_token_id == 1
    assert model.metadata.tokenizer.eos_token_ids == (2,)
    assert set(model.metadata.tokenizer.files) == {"tokenizer.json"}
    expected = canonical_weights()
    assert set(model.weights.names()) == set(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(model.weights.get(name).to_float32(), weight)


def test_a_head_of_its_own(tmp_path):
    weights = canonical_weights()
    weights["lm_head"] = weights["embed_tokens"] + 1
    folder = write_folder(tmp_path / "m", {"tie_word_embeddings": False}, weights)
    np.testing.assert_array_equal(open_model(folder).weights.get("lm_head").to_float32(), weights["lm_head"])


def test_tensors_that_change_nothing_are_passed_over(tmp_path):
    weights = canonical_weights()
    weights["lm_head"] = weights["embed_tokens"]
    weights["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    assert set(open_model(write_folder(tmp_path / "m", weights=weights)).weights.names()) == set(
        canonical_weights()
    )


def test_wrong_sets_of_tensors(tmp_path):
    weights = canonical_weights()
    weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(HIDDEN, np.float32)
    refused(write_folder(tmp_path / "a", weights=weights), "q_proj.bias' has no place in this architecture")
    refused(write_folder(tmp_path / "b", {"tie_word_embeddings": False}), "tensor lm_head.weight is missing")
    refused(
        write_folder(tmp_path / "c", {"intermediate_size": 32}),
        r"has the shape \[96, 64\].*asks for \[32, 64\]",
    )


def test_absent_settings_have_the_defaults_of_the_class(tmp_path):
    folder = write_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    for key in (
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "rope_scaling",
    ):
        del config[key]
    write_json(folder / "config.json", config)
    read = open_model(folder).metadata.config
    assert (read.head_dim, read.rms_norm_eps, read.rope_theta) == (HEAD_DIM, 1e-6, 10000.0)


@pytest.mark.parametrize(
    "parameters", [{"rope_theta": 123.0, "rope_type": "default"}, {"rope_theta": 123, "type": "default"}]
)
def test_rope_parameters(tmp_path, parameters):
    folder = write_folder(tmp_path / "m", {"rope_theta": None, "rope_parameters": parameters})
    assert open_model(folder).metadata.config.rope_theta == 123.0


UNSUPPORTED = [
    (
        {"architectures": ["MambaForCausalLM"]},
        "'MambaForCausalLM' is not supported; supported: LlamaForCausalLM",
    ),
    ({"architectures": None}, "architectures must name one class, not None"),
    (
        {"auto_map": {"AutoModel": "evil.Model"}},
        "auto_map asks for code from the model's author, which is never run",
    ),
    ({"quantization_config": {"quant_method": "awq"}}, "weights quantized with 'awq' are not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"attention_bias": True}, "attention_bias is true; biases are not supported"),
    ({"mlp_bias": True}, "mlp_bias is true"),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope_scaling asks for rotary scaling 'llama3'",
    ),
    ({"rope_parameters": {"type": "yarn"}}, "rope_parameters asks for rotary scaling 'yarn'"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters has 'partial_rotary_factor'"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters has 'full_attention'"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters: rope_theta must be a finite number"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    ({"vocab_size": None}, "vocab_size must be an integer, not None"),
    ({"vocab_size": True}, "vocab_size must be an integer, not True"),
    ({"hidden_size": 64.0}, "hidden_size must be an integer"),
    ({"hidden_size": -64}, "hidden_size is -64; it must be 1 to"),
    ({"num_hidden_layers": 10**30}, "num_layers is 1000000000000000000000000000000; it must be 1 to"),
    ({"num_attention_heads": 0, "head_dim": None}, "not a multiple of 0 attention heads"),
    ({"num_key_value_heads": 3}, "cannot share 3 key-value heads evenly"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
    ({"rope_theta": 10**400}, "rope_theta must be a finite number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id must be an integer or a list of integers"),
    ({"eos_token_id": VOCAB}, f"special token id {VOCAB} is outside the vocabulary of {VOCAB}"),
    ({"bos_token_id": -1}, "special token id -1 is outside the vocabulary"),
]


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED)
def test_settings_that_are_refused(tmp_path, change, message):
    refused(write_folder(tmp_path / "m", change), message)


def test_generation_config(tmp_path):
    folder = write_folder(tmp_path / "m")
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    recommended |= {"min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.1}
    generation = {"eos_token_id": [2, 0, 2], "do_sample": True} | recommended
    write_json(folder / "generation_config.json", generation)
    metadata = open_model(folder).metadata
    assert metadata.tokenizer.eos_token_ids == (2, 0)
    assert metadata.default_sampling == DefaultSampling(**recommended)
    write_json(folder / "generation_config.json", generation | {"do_sample": False})
    assert open_model(folder).metadata.default_sampling == DefaultSampling()
    for name, value, bounds in (
        ("top_p", 0.0, "above 0 and at most 1"),
        ("typical_p", 1.5, "above 0 and at most 1"),
        ("repetition_penalty", 0.0, "above 0 and at most 2"),
        ("min_p", -0.5, "0 to 1"),
    ):
        write_json(folder / "generation_config.json", {name: value})
        refused(folder, f"default {name} is {value}; it must be {bounds}")


@pytest.mark.parametrize(
    "template",
    ["{{ x }}", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ x }}"}]],
)
def test_chat_template_of_the_tokenizer_config(tmp_path, template):
    folder = write_folder(tmp_path / "m")
    write_json(folder / "tokenizer_config.json", {"chat_template": template})
    assert open_model(folder).metadata.tokenizer.files["chat_template.jinja"] == b"{{ x }}"
    (folder / "chat_template.jinja").write_text("{{ own }}")
    assert open_model(folder).metadata.tokenizer.files["chat_template.jinja"] == b"{{ own }}"


def test_wrong_chat_templates(tmp_path):
    folder = write_folder(tmp_path / "m")
    write_json(folder / "tokenizer_config.json", {"chat_template": 5})
    refused(folder, "chat_template must be a string")
    (folder / "tokenizer_config.json").write_text(r'{"chat_template": "\ud800"}')
    refused(folder, "half of a surrogate pair")


def test_pickles_are_refused(tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(
        folder, r"pickle files \(pytorch_model.bin\), which can run code when they are read; convert them"
    )


def test_missing_files(tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    refused(folder, "has no weights: neither model.safetensors nor")
    (folder / "tokenizer.json").unlink()
    refused(folder, "has no tokenizer.json")
    (folder / "config.json").unlink()
    refused(folder, "is not a model folder: it has no config.json")


@pytest.mark.parametrize("content", ["", "[", "[1]", '{"a": 1', "\x00", "[" * 100_000, "{" + " " * 100])
def test_json_that_is_not_an_object(tmp_path, content):
    for name in ("config.json", "tokenizer.json"):
        folder = write_folder(tmp_path / name)
        (folder / name).write_text(content)
        refused(folder, f"{name} is not (valid JSON|a JSON object)")


def test_an_index_that_leads_astray(tmp_path):
    folder = write_folder(tmp_path / "m", num_shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    first = next(iter(good))
    for shard in (
        "../m/model-00001-of-00002.safetensors",
        "/etc/passwd",
        "model.bin",
        "",
        7,
        ".safetensors/",
    ):
        write_json(index, {"weight_map": good | {first: shard}})
        refused(folder, "is not the name of a safetensors file in the same folder")
    write_json(index, {"weight_map": good | {first: "model-00009-of-00002.safetensors"}})
    refused(folder, "model-00009-of-00002.safetensors does not exist")
    write_json(index, {"weight_map": good | {"extra": "model-00001-of-00002.safetensors"}})
    refused(folder, "tensor 'extra' is not in model-00001-of-00002.safetensors")
    write_json(index, {"weight_map": {name: shard for name, shard in good.items() if name != first}})
    refused(folder, "which the index does not say")
    write_json(index, {"weight_map": []})
    refused(folder, "weight_map must be an object")


def test_a_damaged_shard(tmp_path):
    folder = write_folder(tmp_path / "m", num_shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(folder, r"model-00002-of-00002.safetensors: tensor .* is truncated or damaged")
