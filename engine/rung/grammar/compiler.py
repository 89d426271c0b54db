"""Grammars from their text: compiled by llguidance within limits, kept by hash, handed out as copies."""

from __future__ import annotations

import threading
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rung.errors import ErrorCode, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

# The frontend compiles with the same limits before a request gets here: `frontend/src/grammar/limits.rs`.
# Fuel and items bound the time of a compilation to about a second and that of a mask to about 10 ms,
# states the memory of a request to about 20 MB: 120 fields with patterns and formats need 2,000.
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_ITEMS_IN_ROW = 10_000
MAX_LEXER_STATES = 10_000
MAX_GRAMMAR_SIZE = 500_000

# Compiled grammars kept for the next request with the same one. Each takes up to some megabytes.
MAX_KEPT = 32


class CompiledGrammar:
    """A grammar ready to be followed from its beginning, any number of times."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> LLMatcher:
        """A matcher at the beginning; its state is its own."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles for one tokenizer. Any thread may call; compiling releases the interpreter lock.

    tokenizer_json: of the model. Reading it takes a second for the largest vocabularies, so the first
                    use does it.
    vocab_size:     rows of the output head.
    eos_token_ids:  allowed where a grammar may end.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = list(eos_token_ids)
        self.vocab_size = vocab_size
        self._limits = LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW,
            initial_lexer_fuel=INITIAL_LEXER_FUEL,
            step_lexer_fuel=STEP_LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        self._loading = threading.Lock()
        self._loaded: LLTokenizer | None = None
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._keeping = threading.Lock()

    def tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance wants it, read at the first call. `RequestError` if it cannot be."""
        with self._loading:
            if self._loaded is None:
                try:
                    self._loaded = LLTokenizer(
                        self._tokenizer_json, n_vocab=self.vocab_size, eos_token=self._eos_token_ids
                    )
                except Exception as error:
                    raise RequestError(
                        ErrorCode.INTERNAL,
                        f"This model's tokenizer cannot be used with grammars: {error}.",
                    ) from error
            return self._loaded

    def compile(self, text: str) -> CompiledGrammar:
        """The grammar of an llguidance JSON text. `RequestError` says what is wrong with it."""
        key = blake2b(text.encode(), digest_size=16).digest()
        with self._keeping:
            compiled = self._kept.get(key)
            if compiled is not None:
                self._kept.move_to_end(key)
                return compiled
        matcher = LLMatcher(self.tokenizer(), text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, f"The grammar cannot be used: {plain(matcher.get_error())}."
            )
        compiled = CompiledGrammar(matcher)
        with self._keeping:
            self._kept[key] = compiled
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled


def plain(message: str) -> str:
    """An error of llguidance as part of a sentence: what follows its first line shows the grammar."""
    return message.strip().partition("\n")[0].rstrip(".:")
