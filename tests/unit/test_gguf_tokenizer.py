"""The tokenizer of a GGUF file: splits as its authors published them, ids as the file says, no guesses."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rung.errors import ModelError
from rung.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from rung.models.loader import open_model
from tests.model_files import (
    CHAT_TEMPLATE,
    MERGES,
    SPECIALS,
    USER_DEFINED,
    VOCAB,
    vocabulary,
    write_gguf,
)

TOKENS = vocabulary()
ID = {token: token_id for token_id, token in enumerate(TOKENS)}

CORPUS = [
    "",
    " ",
    "hello hello  hello",
    "  1",
    "12 345 6789012 1.5e-7 ½ ٣ Ⅷ",
    "def f(x):\n\treturn x**2  # squared\r\n\r\n\n   end",
    "I'll can't WE'VE they'd 'S",
    "日本語のテキスト 中文 한국어 العربية עברית हिन्दी ไทย Ελληνικά Русский",
    "naïve café Ångström e\u0301 ﬁ ß İ",
    "🍕🍕👨‍👩‍👧‍👦🏳️‍🌈 \u200d\ufe0f",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff",
    "".join(chr(code) for code in range(32)) + "\x7f\x80\x9f",
    " \t \n \r\n  \n\n\n   ",
    "<|im_start|>user\nhi<|im_end|><think>",
    "<|im_start|<|im_end|>|> <|im_sta",
    "\U0010ffff\ue000\ufffd\ufffe",
]


def bundle(tmp_path, **metadata):
    changes = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return open_model(write_gguf(tmp_path / "tiny.gguf", changes)).metadata.tokenizer


def tokenizer(tmp_path, **metadata):
    return Tokenizer.from_buffer(bundle(tmp_path, **metadata).files["tokenizer.json"])


def refused(tmp_path, match, **metadata):
    with pytest.raises(ModelError, match=match) as caught:
        bundle(tmp_path, **metadata)
    assert "\n" not in str(caught.value)


def reference_tokenizer():
    """The `smollm` tokenizer made from library objects rather than from JSON."""
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    reference = Tokenizer(models.BPE(vocab=ID, merges=merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    reference.decoder = decoders.ByteLevel()
    reference.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    reference.add_tokens([AddedToken(USER_DEFINED, normalized=False)])
    return reference


@pytest.mark.parametrize("text", CORPUS)
def test_ids_equal_those_of_a_tokenizer_built_by_the_library(tmp_path, text):
    assert tokenizer(tmp_path).encode(text).ids == reference_tokenizer().encode(text).ids


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_decoding_gives_back_the_text(tmp_path, pre):
    ours = tokenizer(tmp_path, pre=pre)
    for text in CORPUS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_digits_are_split_before_spaces_are_joined(tmp_path):
    """Two spaces are one token before a digit; with GPT-2's expression alone the second sticks to it."""
    assert tokenizer(tmp_path).encode("  1").tokens == ["ĠĠ", "1"]
    assert tokenizer(tmp_path, pre="gpt-2").encode("  1").tokens == ["Ġ", "Ġ", "1"]
    assert tokenizer(tmp_path, pre="gpt-2").encode("12").tokens == ["12"]
    assert tokenizer(tmp_path).encode("12").tokens == ["1", "2"]


SPLITS = {
    "gpt-2": ["I", "'ll", "Ġpay", "Ġ12345", "$", "Ġ", "Ġ!", "ĊĊ", "Ġx", "ĊĊ"],
    "gpt2": ["I", "'ll", "Ġpay", "Ġ12345", "$", "Ġ", "Ġ!", "ĊĊ", "Ġx", "ĊĊ"],
    "smollm": ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "$", "Ġ", "Ġ!", "ĊĊ", "Ġx", "ĊĊ"],
    "llama-bpe": ["I", "'ll", "Ġpay", "Ġ", "123", "45", "$", "Ġ", "Ġ!ĊĊ", "Ġx", "ĊĊ"],
    "qwen2": ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "$", "Ġ", "Ġ!ĊĊ", "Ġx", "ĊĊ"],
}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_each_pre_tokenizer_splits_as_published(tmp_path, pre):
    pieces = tokenizer(tmp_path, pre=pre).pre_tokenizer.pre_tokenize_str("I'll pay 12345$  !\n\n x\n\n")
    assert [piece for piece, _ in pieces] == SPLITS[pre]


PUBLISHED = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


@pytest.mark.parametrize("pre", PUBLISHED)
@pytest.mark.parametrize("text", CORPUS)
def test_split_expressions(tmp_path, pre, text):
    expected = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PUBLISHED[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    actual = tokenizer(tmp_path, pre=pre).pre_tokenizer
    assert actual.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


def test_qwen2_composes_characters_first(tmp_path):
    assert tokenizer(tmp_path, pre="qwen2").encode("e\u0301").tokens == ["Ã©"]
    assert tokenizer(tmp_path, pre="llama-bpe").encode("e\u0301", add_special_tokens=False).tokens[0] == "e"


def test_llama_bpe_takes_a_whole_piece_before_merging(tmp_path):
    """A word in the vocabulary is one token even where no chain of merges leads to it."""
    merges = [merge for merge in MERGES if merge != "hell o"]
    metadata = {"merges": merges, "add_bos_token": False}
    assert tokenizer(tmp_path, pre="llama-bpe", **metadata).encode("hello").tokens == ["hello"]
    assert tokenizer(tmp_path, pre="qwen2", **metadata).encode("hello").tokens == ["hell", "o"]


def test_special_tokens(tmp_path):
    ours = tokenizer(tmp_path)
    ids = ours.encode("<|im_start|>hello<think><|im_end|>").ids
    assert ids == [ID["<|im_start|>"], ID["hello"], ID["<think>"], ID["<|im_end|>"]]
    assert ours.decode(ids, skip_special_tokens=True) == "hello<think>"
    added = ours.get_added_tokens_decoder()
    assert {token_id: token.special for token_id, token in added.items()} == {
        0: True,
        1: True,
        2: True,
        VOCAB - 1: False,
    }
    assert not any(
        token.lstrip or token.rstrip or token.single_word or token.normalized for token in added.values()
    )


def test_ids_and_template(tmp_path):
    ours = bundle(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))
    assert ours.files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    assert bundle(tmp_path, eot_token_id=0, eom_token_id=2).eos_token_ids == (2, 0)
    bare = bundle(tmp_path, bos_token_id=None, eos_token_id=None)
    assert (bare.bos_token_id, bare.eos_token_ids) == (None, ())


def test_a_file_without_a_template(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", {"tokenizer.chat_template": None})
    assert set(open_model(path).metadata.tokenizer.files) == {"tokenizer.json"}


@pytest.mark.parametrize(
    ("metadata", "framed"),
    [
        ({"add_bos_token": False}, False),
        ({"add_bos_token": None}, False),
        ({"add_bos_token": True}, True),
        ({"add_bos_token": None, "pre": "llama-bpe"}, True),
        ({"add_bos_token": False, "pre": "llama-bpe"}, False),
    ],
)
def test_beginning_of_text(tmp_path, metadata, framed):
    ours = tokenizer(tmp_path, **metadata)
    assert ours.encode("hello").ids == [1] * framed + [ID["hello"]]
    assert ours.encode("hello", add_special_tokens=False).ids == [ID["hello"]]
    assert ours.encode("hello", "hello").ids == ([1] * framed + [ID["hello"]]) * 2


def test_end_of_text(tmp_path):
    ours = tokenizer(tmp_path, add_bos_token=True, add_eos_token=True)
    assert ours.encode("hello").ids == [1, ID["hello"], 2]


def test_added_leading_space(tmp_path):
    assert tokenizer(tmp_path, add_space_prefix=True).encode("a").tokens == ["Ġ", "a"]
    assert tokenizer(tmp_path, add_space_prefix=False).encode("a").tokens == ["a"]


def test_unknown_pre_tokenizer_is_refused_never_guessed(tmp_path):
    refused(tmp_path, "pre-tokenizer 'tekken' is not supported; supported: gpt-2, .*smollm", pre="tekken")
    refused(tmp_path, "tokenizer.ggml.pre is missing, so .*supported: gpt-2", pre=None)
    refused(tmp_path, "pre-tokenizer 'default' is not supported", pre="default")


def test_unknown_tokenizer_model_is_refused(tmp_path):
    refused(tmp_path, r"tokenizer model 'llama' is not supported; supported: gpt2", model="llama")
    refused(tmp_path, "tokenizer.ggml.model is missing", model=None)


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
def test_ids_outside_the_vocabulary(tmp_path, name):
    refused(
        tmp_path, rf"{name}_token_id is {VOCAB}; it must be 0 to {VOCAB - 1}", **{f"{name}_token_id": VOCAB}
    )
    refused(tmp_path, rf"{name}_token_id is -1; it must be 0", **{f"{name}_token_id": -1})


def test_damaged_vocabularies(tmp_path):
    types = [3] * 3 + [1] * (VOCAB - 3)
    refused(tmp_path, "token 'hello' appears twice", tokens=[*TOKENS[:-1], "hello"])
    refused(tmp_path, f"{VOCAB} tokens and {VOCAB - 1} token types", token_type=types[:-1])
    refused(tmp_path, "token_type is missing", token_type=None)
    refused(tmp_path, "merges is missing", merges=None)
    refused(
        tmp_path,
        f"{VOCAB + 1} tokens, the model only {VOCAB} embeddings",
        tokens=[*TOKENS, "x" * 9],
        token_type=[*types, 1],
    )
    refused(
        tmp_path,
        "token 3 is special and empty",
        tokens=[*TOKENS[:3], "", *TOKENS[4:]],
        token_type=[3] * VOCAB,
    )
    refused(tmp_path, "bos_token_id is missing", bos_token_id=None, add_bos_token=True)


@pytest.mark.parametrize("merge", ["hello", "h  e", "Ġ zz", "h q", "", " ", " e", "h "])
def test_damaged_merges(tmp_path, merge):
    refused(tmp_path, "merge 1, .*, does not join two tokens into a third", merges=["h e", merge])
