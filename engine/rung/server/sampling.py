"""The part of a Submit that says how tokens are chosen, checked and made plain.

The frontend is not trusted: every length, id and range is checked here. Keeps no state.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rung.errors import ErrorCode, RequestError
from rung.request import SamplingParams
from rung.sampling.rules import BadWords, TokenRules

if TYPE_CHECKING:
    from rung.server.convert import EngineFacts
    from rung.server.gen import generation_pb2

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 2.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0


def invalid(message: str) -> RequestError:
    """The error of a request that can never succeed."""
    return RequestError(ErrorCode.INVALID_ARGUMENT, message)


def count_ids(data: bytes, what: str) -> int:
    """How many token ids a column from the wire holds. `RequestError` if its bytes are no whole ids."""
    if len(data) % 4:
        raise invalid(f"{what} must be a column of 4-byte token ids, but it has {len(data)} bytes.")
    return len(data) // 4


def read_ids(data: bytes, what: str, facts: EngineFacts) -> I32:
    """The ids of such a column: [n] i32. `RequestError` for one that the vocabulary does not have."""
    ids = np.frombuffer(data, dtype="<u4")
    largest = int(ids.max(initial=0))
    if largest >= facts.vocab_size:
        raise invalid(f"{what} holds token id {largest}, but ids must be below {facts.vocab_size}.")
    return ids.astype(np.int32)


def sampling_params(submit: generation_pb2.Submit, facts: EngineFacts) -> SamplingParams:
    """Parameters of a Submit's first sample. Raises `RequestError` for anything out of bounds."""
    given = submit.sampling
    temperature = given.temperature if given.HasField("temperature") else 1.0
    _check_range("temperature", temperature, 0.0, MAX_TEMPERATURE)
    min_p = given.min_p if given.HasField("min_p") else 0.0
    _check_range("min_p", min_p, 0.0, 1.0)
    return SamplingParams(
        temperature=temperature,
        # Keeping more ids than there are is keeping all.
        top_k=min(given.top_k, facts.vocab_size),
        top_p=_share("top_p", given.top_p if given.HasField("top_p") else 1.0),
        seed=given.seed if given.HasField("seed") else secrets.randbits(64),
        top_logprobs=_top_n(submit.logprobs.top_n, facts) if submit.HasField("logprobs") else None,
        min_p=min_p,
        typical_p=_share("typical_p", given.typical_p if given.HasField("typical_p") else 1.0),
        rules=_rules(given, facts),
        grammar=_grammar(submit, facts),
        prompt_top_logprobs=(
            _top_n(submit.logprobs.prompt_top_n, facts) if submit.logprobs.HasField("prompt_top_n") else None
        ),
    )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails each comparison.
    if not low <= value <= high:
        raise invalid(f"{name} must be between {low:g} and {high:g}, but it is {value:g}.")


def _share(name: str, value: float) -> float:
    if not 0.0 < value <= 1.0:
        raise invalid(f"{name} must be above 0 and at most 1, but it is {value:g}.")
    return value


def _top_n(top_n: int, facts: EngineFacts) -> int:
    if top_n > facts.max_top_logprobs:
        raise invalid(f"At most {facts.max_top_logprobs} alternatives per token can be given, not {top_n}.")
    return top_n


def _grammar(submit: generation_pb2.Submit, facts: EngineFacts) -> str | None:
    if not submit.HasField("grammar"):
        return None
    if not facts.supports_grammar:
        raise invalid("This engine cannot follow grammars; ask without one.")
    text: str = submit.grammar.llguidance
    num_bytes = len(text.encode())
    if num_bytes > facts.max_grammar_bytes:
        raise invalid(
            f"The grammar has {num_bytes} bytes, but at most {facts.max_grammar_bytes} are taken; "
            "make it smaller."
        )
    return text


def _rules(given: generation_pb2.Sampling, facts: EngineFacts) -> TokenRules | None:
    repetition = given.repetition_penalty if given.HasField("repetition_penalty") else 1.0
    if not 0.0 < repetition <= MAX_REPETITION_PENALTY:
        raise invalid(
            f"repetition_penalty must be above 0 and at most {MAX_REPETITION_PENALTY:g}, "
            f"but it is {repetition:g}."
        )
    _check_range("frequency_penalty", given.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("presence_penalty", given.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    bias_ids, bias_values = _bias(given, facts)
    rules = TokenRules(
        repetition_penalty=repetition,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        bias_ids=bias_ids,
        bias_values=bias_values,
        allowed_ids=_allowed_ids(given, facts),
        bad_words=_bad_words(given, facts),
    )
    return None if rules.changes_nothing else rules


def _bias(given: generation_pb2.Sampling, facts: EngineFacts) -> tuple[I32, F32]:
    ids = _ids(given.logit_bias_ids, "The logit bias", facts.max_logit_bias, facts)
    if len(given.logit_bias_values) != 4 * len(ids):
        raise invalid(
            f"The logit bias has {len(ids)} ids but {len(given.logit_bias_values)} bytes of values; "
            "each id needs a float32."
        )
    if len(np.unique(ids)) != len(ids):
        raise invalid("The logit bias names an id twice; give each id one value.")
    values = np.frombuffer(given.logit_bias_values, dtype="<f4").astype(np.float32)
    outside = ~(np.abs(values) <= MAX_BIAS)
    if outside.any():
        raise invalid(
            f"A logit bias must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, but one is {values[outside][0]:g}."
        )
    return ids, values


def _allowed_ids(given: generation_pb2.Sampling, facts: EngineFacts) -> I32 | None:
    if not given.HasField("allowed_token_ids"):
        return None
    ids = _ids(given.allowed_token_ids, "The allowed ids", facts.max_allowed_token_ids, facts)
    if not len(ids):
        raise invalid("The allowed ids are empty, so that nothing could be chosen; allow at least one.")
    return ids


def _bad_words(given: generation_pb2.Sampling, facts: EngineFacts) -> BadWords | None:
    if not given.bad_words:
        return None
    if len(given.bad_words) > facts.max_bad_words:
        raise invalid(
            f"A request may name at most {facts.max_bad_words} bad words, "
            f"but it names {len(given.bad_words)}."
        )
    words = [_ids(word.token_ids, "A bad word", facts.max_bad_word_tokens, facts) for word in given.bad_words]
    if not all(len(word) for word in words):
        raise invalid("A bad word is empty; it needs at least one token.")
    return BadWords(words)


def _ids(data: bytes, what: str, most: int, facts: EngineFacts) -> I32:
    """A column of at most `most` token ids from the wire."""
    num_ids = count_ids(data, what)
    if num_ids > most:
        raise invalid(f"{what} may have at most {most} ids, but it has {num_ids}.")
    return read_ids(data, what, facts)
