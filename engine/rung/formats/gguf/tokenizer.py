"""The tokenizer inside a GGUF file as `tokenizer.json` and a chat template.

Byte-level BPE (`tokenizer.ggml.model` = `gpt2`) only. Does not tokenize: a frontend does.
Source: the `tokenizer.json` format of the Hugging Face tokenizers library, version 1.0.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from rung.formats.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from rung.formats.mapping import quoted
from rung.models.config import TokenizerBundle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.formats.gguf.metadata import Metadata

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

_PREFIX = "tokenizer.ggml."


def tokenizer_bundle(metadata: Metadata, vocab_size: int) -> TokenizerBundle:
    """The files a frontend needs; `vocab_size` bounds the ids."""
    _check_model(metadata)
    pre_tokenizer = _pre_tokenizer(metadata)
    tokens = metadata.texts(_PREFIX + "tokens")
    if len(tokens) > vocab_size:
        raise metadata.error(
            f"the tokenizer has {len(tokens)} tokens, the model only {vocab_size} embeddings"
        )
    vocab = _vocab(metadata, tokens)
    bos = metadata.optional_integer(_PREFIX + "bos_token_id", maximum=len(tokens) - 1)
    # Named apart in some files: the end of a text, of a turn, of a message that waits for a tool.
    ends = (
        metadata.optional_integer(_PREFIX + f"{name}_token_id", maximum=len(tokens) - 1)
        for name in ("eos", "eot", "eom")
    )
    eos = tuple(dict.fromkeys(end for end in ends if end is not None))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens),
        "normalizer": pre_tokenizer.normalizer,
        "pre_tokenizer": _pre_tokenizer_json(metadata, pre_tokenizer),
        "post_processor": _post_processor(metadata, pre_tokenizer, tokens),
        "decoder": _byte_level(add_prefix_space=True, use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.ignore_merges,
            "vocab": vocab,
            "merges": _merges(metadata, vocab),
        },
    }
    files = {"tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode()}
    template = metadata.optional_text("tokenizer.chat_template")
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return TokenizerBundle(files, bos, eos)


def _check_model(metadata: Metadata) -> None:
    model = metadata.text(_PREFIX + "model")
    if model != "gpt2":
        raise metadata.error(
            f"tokenizer model {quoted(model)} is not supported; supported: gpt2 (byte-level BPE)"
        )


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    supported = ", ".join(PRE_TOKENIZERS)
    name = metadata.optional_text(_PREFIX + "pre")
    if name is None:
        raise metadata.error(
            "metadata tokenizer.ggml.pre is missing, so it is unknown how text is split before merging; "
            f"convert the model again with a converter that writes it (supported: {supported})"
        )
    if name not in PRE_TOKENIZERS:
        raise metadata.error(f"pre-tokenizer {quoted(name)} is not supported; supported: {supported}")
    return PRE_TOKENIZERS[name]


def _vocab(metadata: Metadata, tokens: list[str]) -> dict[str, int]:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        token = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise metadata.error(f"token {quoted(token)} appears twice in the vocabulary")
    return vocab


def _merges(metadata: Metadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in order of rank. What the tokenizers library would choke on is refused here."""
    merges = []
    for rank, merge in enumerate(metadata.texts(_PREFIX + "merges")):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise metadata.error(f"merge {rank}, {quoted(merge)}, does not join two tokens into a third")
        merges.append((left, right))
    return merges


def _added_tokens(metadata: Metadata, tokens: list[str]) -> list[dict[str, Any]]:
    """Tokens found in text before anything else; control tokens are also hidden from it."""
    types = metadata.integers(_PREFIX + "token_type")
    if len(types) != len(tokens):
        raise metadata.error(f"the tokenizer has {len(tokens)} tokens and {len(types)} token types")
    added = []
    for token_id in np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED)).tolist():
        if not tokens[token_id]:
            raise metadata.error(f"token {token_id} is special and empty")
        added.append(
            {
                "id": token_id,
                "content": tokens[token_id],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": bool(types[token_id] == _CONTROL),
            }
        )
    return added


def _byte_level(*, add_prefix_space: bool, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _pre_tokenizer_json(metadata: Metadata, pre_tokenizer: PreTokenizer) -> dict[str, Any]:
    byte_level = _byte_level(
        add_prefix_space=bool(metadata.optional_flag(_PREFIX + "add_space_prefix")),
        use_regex=pre_tokenizer.use_gpt2_regex,
    )
    if not pre_tokenizer.splits:
        return byte_level
    return {"type": "Sequence", "pretokenizers": [*pre_tokenizer.splits, byte_level]}


def _post_processor(
    metadata: Metadata, pre_tokenizer: PreTokenizer, tokens: Sequence[str]
) -> dict[str, Any] | None:
    """Frames a text in the ids that `add_bos_token` and `add_eos_token` ask for."""
    add_bos = metadata.optional_flag(_PREFIX + "add_bos_token")
    if add_bos is None:
        add_bos = pre_tokenizer.adds_bos
    add_eos = bool(metadata.optional_flag(_PREFIX + "add_eos_token"))
    if not add_bos and not add_eos:
        return None
    specials: dict[str, dict[str, Any]] = {}

    def special(name: str, type_id: int) -> dict[str, Any]:
        token_id = metadata.integer(_PREFIX + name, maximum=len(tokens) - 1)
        token = tokens[token_id]
        specials[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        return {"SpecialToken": {"id": token, "type_id": type_id}}

    def framed(sequence: str, type_id: int) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if add_bos:
            pieces.insert(0, special("bos_token_id", type_id))
        if add_eos:
            pieces.append(special("eos_token_id", type_id))
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": framed("A", 0) + framed("B", 1),
        "special_tokens": specials,
    }
