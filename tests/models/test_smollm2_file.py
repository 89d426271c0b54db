"""The default model's file: ids as an independent tokenizer made them, and text given back whole."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from rung.config import cache_dir
from rung.hub import resolve
from rung.models.loader import open_model
from tests.golden.prompts import TEXTS

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/smollm2_q4_1.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def path():
    return resolve("smollm2", cache_dir())


@pytest.fixture(scope="module")
def model(path):
    return open_model(path)


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.from_buffer(model.metadata.tokenizer.files["tokenizer.json"])


def test_facts(model):
    metadata = model.metadata
    assert metadata.weight_format == "Q4_1"
    assert metadata.num_parameters == 134_515_008
    assert (metadata.tokenizer.bos_token_id, metadata.tokenizer.eos_token_ids) == (1, (2,))
    assert metadata.config.max_position_embeddings == 8192
    assert b"<|im_start|>" in metadata.tokenizer.files["chat_template.jinja"]


@pytest.mark.parametrize("prompt", GOLDEN, ids=lambda prompt: prompt["name"])
def test_golden_ids(tokenizer, prompt):
    assert tokenizer.encode(prompt["text"]).ids == prompt["prompt_ids"]


def test_two_spaces_and_a_digit(tokenizer):
    """What a tokenizer that ignores the file's pre-tokenizer turns into 216 216 33."""
    assert tokenizer.encode("  1").ids == [256, 33]


# The vocabulary has no token for these bytes (nor for F1 and F2, which begin characters of planes
# that are not in use); the publishers' tokenizer leaves them out, and so does ours.
MISSING = "\x04\x06\x13\x14\x16\x1d"

VARIED = [
    *TEXTS.values(),
    "".join(chr(code) for code in range(0x250) if chr(code) not in MISSING),
    " \t\n\r\n  \u00a0\u2003\u3000\u200b\ufeff\n\n\n    x   \n",
    "1234567890 ½ ٣ Ⅷ ৩ ²",
    "🏳️‍🌈👩‍👩‍👧‍👦 👍🏽 \U0001f1eb\U0001f1f7 e\u0301 \u0000\u0007\u001b[31m",
    "import os\n\tif x == 1:\n\t\treturn {'a': [1, 2.5e-3]}  # ünï\r\n",
    "\U0010ffff\ue000\ufffd\ufffe\U000e0041",
    "don't WE'LL o'clock ''s",
]


@pytest.mark.parametrize("text", VARIED)
def test_decoding_gives_back_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_bytes_without_a_token_are_left_out(tokenizer):
    for character in MISSING:
        assert tokenizer.decode(tokenizer.encode(f"a{character}b").ids) == "ab"


def test_special_tokens_in_text(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|endoftext|>").ids
    assert ids[0] == 1
    assert ids[-1] == 0
    assert 2 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi\n"
    assert 1 not in tokenizer.encode("<|im_start |> <|im_star").ids


def test_every_weight_equals_the_gguf_package(path, model):
    """Decoded values, after undoing the interleaving of rotary rows the long way round."""
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    config = model.metadata.config
    for layer in (0, config.num_layers - 1):
        for part, source, heads in (
            ("q_proj", "attn_q", config.num_heads),
            ("k_proj", "attn_k", config.num_kv_heads),
            ("o_proj", "attn_output", None),
            ("down_proj", "ffn_down", None),
        ):
            tensor = theirs[f"blk.{layer}.{source}.weight"]
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            if heads is not None:
                half = config.head_dim // 2
                order = [h * 2 * half + 2 * i + p for h in range(heads) for p in (0, 1) for i in range(half)]
                expected = expected[order]
            np.testing.assert_array_equal(model.weights.get(f"layers.{layer}.{part}").to_float32(), expected)
    embedding, rows = theirs["token_embd.weight"], slice(20_000, 20_512)
    np.testing.assert_array_equal(
        model.weights.get("embed_tokens").to_float32()[rows],
        gguf.dequantize(embedding.data[rows], embedding.tensor_type),
    )
