"""Small model files for tests: a seeded llama of two layers as GGUF, and raw GGUF bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<think>"
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ã ©", "Ċ Ċ"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, in order of their code."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    return sorted([chr(code) for code in visible] + [chr(256 + index) for index in range(256 - len(visible))])


def vocabulary() -> list[str]:
    """Tokens by id: specials, the byte alphabet, results of merges, one user-defined token."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIALS, *byte_alphabet(), *merged, USER_DEFINED]


VOCAB = len(vocabulary())

CANONICAL_SHAPES = {
    "embed_tokens": (VOCAB, HIDDEN),
    "norm": (HIDDEN,),
    **{
        f"layers.{layer}.{part}": shape
        for layer in range(LAYERS)
        for part, shape in {
            "attn_norm": (HIDDEN,),
            "q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp_norm": (HIDDEN,),
            "gate_proj": (MLP, HIDDEN),
            "up_proj": (MLP, HIDDEN),
            "down_proj": (HIDDEN, MLP),
        }.items()
    },
}

GGUF_PARTS = {
    "attn_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(canonical: str) -> str:
    """The tensor's name in a GGUF file; names that are not canonical stay as they are."""
    if canonical.startswith("layers."):
        _, layer, part = canonical.split(".")
        return f"blk.{layer}.{GGUF_PARTS[part]}.weight"
    top = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}
    return top.get(canonical, canonical)


def canonical_weights(seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Seeded weights under canonical names, head tied."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) / 8).astype(np.float32) for name, shape in CANONICAL_SHAPES.items()
    }


def interleave(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Half-split rotary rows to GGUF's pairs, as converters do it."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.vocab_size": VOCAB,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": vocabulary(),
    "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (VOCAB - len(SPECIALS) - 1) + [4],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    weights: dict[str, npt.NDArray[np.float32]] | None = None,
    quantization: str = "F32",
) -> Path:
    """A GGUF file made by the `gguf` package.

    metadata: changes to `METADATA`; None removes a key.
    weights:  canonical float32 weights; matrices are stored as `quantization`, vectors as F32.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (METADATA | (metadata or {})).items():
        if value is not None and key != "general.architecture":
            _add_value(writer, key, value)
    quant_type = gguf.GGMLQuantizationType[quantization]
    for name, weight in (canonical_weights() if weights is None else weights).items():
        stored = weight
        if name.endswith(("q_proj", "k_proj")):
            stored = interleave(weight, weight.shape[0] // HEAD_DIM)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(stored, quant_type), raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    value_type = gguf.GGUFValueType
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_key_value(key, value, value_type.UINT32 if value >= 0 else value_type.INT32)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


class RawGguf:
    """GGUF bytes written field by field, so that any field can be wrong."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.tensors: list[bytes] = []
        self.data = b""
        self.version = 3
        self.alignment = 32

    @staticmethod
    def string(text: str | bytes, length: int | None = None) -> bytes:
        """A length and bytes; the length may lie."""
        raw = text.encode() if isinstance(text, str) else text
        return struct.pack("<Q", len(raw) if length is None else length) + raw

    def value(self, key: str | bytes, type_id: int, payload: bytes) -> RawGguf:
        """Add a metadata value."""
        self.values.append(self.string(key) + struct.pack("<I", type_id) + payload)
        return self

    def array(self, key: str, type_id: int, count: int, payload: bytes) -> RawGguf:
        """Add a metadata array; the count may lie."""
        return self.value(key, 9, struct.pack("<IQ", type_id, count) + payload)

    def tensor(self, name: str, dims: tuple[int, ...], type_id: int = 0, offset: int = 0) -> RawGguf:
        """Add a tensor's entry; dims in the order of the file, innermost first."""
        shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        self.tensors.append(self.string(name) + shape + struct.pack("<IQ", type_id, offset))
        return self

    def bytes(self) -> bytes:
        """The file."""
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.values))
        head += b"".join(self.values) + b"".join(self.tensors)
        return head + b"\0" * (-len(head) % self.alignment) + self.data
