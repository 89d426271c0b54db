"""How text is cut before byte pairs are merged: one entry per name in `tokenizer.ggml.pre`.

The expressions are those that the models' authors published in their `tokenizer.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What `tokenizer.json` says around the byte-pair model.

    splits:  pre-tokenizers before the byte mapping.
    use_gpt2_regex: the byte mapping itself splits as GPT-2 does.
    ignore_merges: a piece that is in the vocabulary is one token, whatever the merges say.
    adds_bos: whether a beginning-of-text id leads when the file does not say.
    """

    splits: tuple[dict[str, Any], ...] = ()
    use_gpt2_regex: bool = False
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


_GPT2 = PreTokenizer(use_gpt2_regex=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": PreTokenizer(
        splits=({"type": "Digits", "individual_digits": True},),
        use_gpt2_regex=True,
    ),
    "llama-bpe": PreTokenizer(
        splits=(_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),),
        ignore_merges=True,
        adds_bos=True,
    ),
    "qwen2": PreTokenizer(
        splits=(_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"),),
        normalizer={"type": "NFC"},
    ),
}
