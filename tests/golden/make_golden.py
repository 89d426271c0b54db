"""Make the golden values: greedy ids and logprobs of varied prompts, by `transformers` in float32.

Usage: python tests/golden/make_golden.py MODEL.gguf [OUTPUT.json]

Independent of Rung: the weights are dequantized by the `gguf` package, and the tokenizer is built
here, because the GGUF route of `transformers` ignores the pre-tokenizer that the file names.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from prompts import CHATS, TEXTS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_TOKENS = 32
NUM_TOP = 5
DECIMALS = 5

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main() -> None:
    """Read the model, run every prompt, write the JSON."""
    source = Path(sys.argv[1])
    output = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).with_name("smollm2_q4_1.json"))
    reader = GGUFReader(source)
    model, tokenizer = load_model(reader), load_tokenizer(reader)
    prompts: list[dict[str, Any]] = [{"name": name, "text": text} for name, text in TEXTS.items()]
    for name, messages in CHATS.items():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append({"name": name, "messages": messages, "text": text})
    for prompt in prompts:
        prompt["prompt_ids"] = tokenizer(prompt["text"], add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(prompt["prompt_ids"]) == prompt["text"], prompt["name"]
        prompt |= continue_greedily(model, prompt["prompt_ids"], tokenizer.eos_token_id)
        print(f"{prompt['name']}: {tokenizer.decode(prompt['output_ids'])!r}")
    provenance = {
        "file": source.name,
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "eos_token_id": tokenizer.eos_token_id,
        "versions": {
            name: version(name) for name in ("gguf", "numpy", "tokenizers", "torch", "transformers")
        },
        "machine": platform.machine(),
    }
    # One prompt a line, so that a difference shows which prompts changed.
    lines = ",\n".join(json.dumps(prompt, ensure_ascii=False, separators=(",", ":")) for prompt in prompts)
    document = f'{{"provenance":{json.dumps(provenance)},\n"prompts":[\n{lines}\n]}}\n'
    output.write_text(document, encoding="utf-8")


def load_model(reader: GGUFReader) -> LlamaForCausalLM:
    """The file's weights, dequantized to float32, in `transformers`' own model."""
    num_heads = field(reader, "llama.attention.head_count")
    num_kv_heads = field(reader, "llama.attention.head_count_kv")
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
            heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(parts[2])
            if heads:
                # GGUF interleaves the rotary pairs (2i, 2i+1); transformers wants (i, i + head_dim/2).
                paired = weight.reshape(heads, -1, 2, weight.shape[1])
                weight = paired.swapaxes(1, 2).reshape(weight.shape)
        else:
            name = f"{TOP_NAMES[parts[0]]}.weight"
        state[name] = torch.from_numpy(np.array(weight, dtype=np.float32))
    tied = "lm_head.weight" not in state
    config = LlamaConfig(
        vocab_size=len(field(reader, "tokenizer.ggml.tokens")),
        hidden_size=field(reader, "llama.embedding_length"),
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        rms_norm_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field(reader, "llama.rope.freq_base")},
        max_position_embeddings=field(reader, "llama.context_length"),
        tie_word_embeddings=tied,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert missing == (["lm_head.weight"] if tied else []), missing
    model.tie_weights()
    return model.eval()


def load_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the pre-tokenizer `smollm`: single digits, then GPT-2 splitting."""
    assert field(reader, "tokenizer.ggml.pre") == "smollm"
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = field(reader, "tokenizer.ggml.token_type")
    bpe.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=tokens[field(reader, "tokenizer.ggml.eos_token_id")],
        chat_template=field(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


@torch.inference_mode()
def continue_greedily(model: LlamaForCausalLM, prompt_ids: list[int], eos_token_id: int) -> dict[str, Any]:
    """Up to NUM_TOKENS greedy ids, the last one end-of-text if it came; values per step.

    margins: logprob of the likeliest id minus that of the second.
    """
    columns: dict[str, list[Any]] = {
        key: [] for key in ("output_ids", "logprobs", "margins", "top_ids", "top_logprobs")
    }
    result = model(torch.tensor([prompt_ids]), use_cache=True)
    while True:
        logprobs = torch.log_softmax(result.logits[0, -1].double(), dim=-1)
        top = torch.topk(logprobs, NUM_TOP)
        values = [round(value, DECIMALS) for value in top.values.tolist()]
        token_id = int(top.indices[0])
        columns["output_ids"].append(token_id)
        columns["logprobs"].append(values[0])
        columns["margins"].append(round(float(top.values[0] - top.values[1]), DECIMALS))
        columns["top_ids"].append(top.indices.tolist())
        columns["top_logprobs"].append(values)
        if token_id == eos_token_id or len(columns["output_ids"]) == NUM_TOKENS:
            return columns
        result = model(torch.tensor([[token_id]]), cache=result.cache, use_cache=True)


def field(reader: GGUFReader, key: str) -> Any:
    """One metadata value of the file."""
    return reader.fields[key].contents()


if __name__ == "__main__":
    main()
