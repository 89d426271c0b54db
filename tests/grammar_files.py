"""A tokenizer of 256 byte tokens and an end, and texts as its ids."""

from __future__ import annotations

import json
from functools import cache

from rung.grammar.compiler import GrammarCompiler

EOS = 256
VOCAB_SIZE = 257


@cache
def byte_tokenizer() -> str:
    """tokenizer.json: id b is byte b, and 256 is `<eos>`."""
    # The printable stand-ins of byte-level tokenizers.
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    vocabulary = {chr(byte): byte for byte in shown}
    for extra, byte in enumerate(b for b in range(256) if b not in shown):
        vocabulary[chr(256 + extra)] = byte
    special = {"id": EOS, "content": "<eos>", "special": True, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [special | flags],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    )


def byte_compiler() -> GrammarCompiler:
    """A compiler for that tokenizer."""
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, [EOS])


def schema(value: object) -> str:
    """The grammar of a JSON schema."""
    return json.dumps({"grammars": [{"json_schema": value}]})


def lark(text: str) -> str:
    """The grammar of a Lark text."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})
