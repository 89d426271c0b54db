"""What a Submit says of choosing tokens: any gives parameters within bounds or one deliberate error."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import ErrorCode, RequestError
from rung.request import SamplingParams
from rung.server.gen import generation_pb2
from rung.server.sampling import sampling_params
from tests.unit.engine_fixture import VOCAB_SIZE, make_facts, u32

FACTS = make_facts(max_model_len=64)
FLOAT = st.none() | st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0, 2.0, -2.0, 100.0])
IDS = st.lists(st.integers(0, VOCAB_SIZE), max_size=5).map(u32) | st.binary(max_size=9)


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def params(**sampling: object) -> SamplingParams:
    return sampling_params(generation_pb2.Submit(sampling=generation_pb2.Sampling(**sampling)), FACTS)


@given(
    st.builds(
        generation_pb2.Sampling,
        min_p=FLOAT,
        typical_p=FLOAT,
        repetition_penalty=FLOAT,
        frequency_penalty=FLOAT,
        presence_penalty=FLOAT,
        logit_bias_ids=IDS,
        logit_bias_values=st.binary(max_size=12) | st.lists(st.floats(width=32)).map(lambda x: f32(*x)),
        allowed_token_ids=st.none() | IDS,
        bad_words=st.lists(st.builds(generation_pb2.TokenSequence, token_ids=IDS), max_size=3),
    )
)
def test_any_sampling_is_within_bounds_or_a_deliberate_error(sampling: generation_pb2.Sampling) -> None:
    try:
        result = sampling_params(generation_pb2.Submit(sampling=sampling), FACTS)
    except RequestError:
        return
    assert 0.0 <= result.min_p <= 1.0
    assert 0.0 < result.typical_p <= 1.0
    rules = result.rules
    if rules is None:
        return
    assert not rules.changes_nothing
    assert 0.0 < rules.repetition_penalty <= 2.0
    assert abs(rules.frequency_penalty) <= 2.0
    assert abs(rules.presence_penalty) <= 2.0
    assert len(rules.bias_ids) == len(rules.bias_values)
    assert (np.abs(rules.bias_values) <= 100.0).all()
    for ids in (rules.bias_ids, rules.allowed_ids):
        if ids is not None and len(ids):
            assert ids.dtype == np.int32
            assert 0 <= ids.min() <= ids.max() < VOCAB_SIZE


def test_silence_and_neutral_values_mean_no_rules() -> None:
    assert params().rules is None
    neutral = params(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    assert neutral.rules is None
    assert (neutral.min_p, neutral.typical_p) == (0.0, 1.0)


def test_everything_that_is_given_arrives() -> None:
    result = params(
        min_p=0.25,
        typical_p=0.5,
        repetition_penalty=1.5,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias_ids=u32([3, 1]),
        logit_bias_values=f32(-100.0, 0.5),
        allowed_token_ids=u32([1, 2, 3]),
        bad_words=[generation_pb2.TokenSequence(token_ids=u32(ids)) for ids in ([4], [5, 6])],
    )
    rules = result.rules
    assert rules is not None
    assert (result.min_p, result.typical_p) == (0.25, 0.5)
    assert (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty) == (1.5, -2.0, 2.0)
    assert rules.bias_ids.tolist() == [3, 1]
    assert rules.bias_values.tolist() == [-100.0, 0.5]
    assert rules.allowed_ids is not None
    assert rules.allowed_ids.tolist() == [1, 2, 3]
    assert rules.bad_words is not None
    assert set(rules.bad_words.banned(np.array([5], dtype=np.int32)).tolist()) == {4, 6}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        *[({"min_p": value}, "min_p must be between 0 and 1") for value in (-0.1, 1.1, NAN, INF)],
        *[({"typical_p": value}, "typical_p must be above 0") for value in (0.0, 1.1, NAN, -INF)],
        *[({"repetition_penalty": value}, "repetition_penalty") for value in (0.0, 2.1, NAN, INF)],
        *[({"frequency_penalty": value}, "frequency_penalty") for value in (-2.1, 2.1, NAN)],
        *[({"presence_penalty": value}, "presence_penalty") for value in (-2.1, 2.1, INF)],
        *[
            ({"logit_bias_ids": u32([1]), "logit_bias_values": f32(value)}, "between -100 and 100")
            for value in (-100.1, NAN, INF)
        ],
        ({"logit_bias_ids": u32([1, 2]), "logit_bias_values": f32(1.0)}, "2 ids but 4 bytes"),
        ({"logit_bias_ids": u32([1, 1]), "logit_bias_values": f32(1.0, 2.0)}, "an id twice"),
        ({"logit_bias_ids": u32([VOCAB_SIZE]), "logit_bias_values": f32(1.0)}, "ids must be below"),
        ({"logit_bias_ids": b"abc"}, "4-byte token ids"),
        ({"logit_bias_ids": u32(range(1025))}, "at most 1024 ids"),
        ({"allowed_token_ids": b""}, "allow at least one"),
        ({"allowed_token_ids": u32([2**31])}, "ids must be below"),
        ({"allowed_token_ids": u32([0] * 16385)}, "at most 16384"),
        ({"bad_words": [generation_pb2.TokenSequence()]}, "bad word is empty"),
        ({"bad_words": [generation_pb2.TokenSequence(token_ids=u32([1]))] * 257}, "at most 256 bad words"),
        ({"bad_words": [generation_pb2.TokenSequence(token_ids=u32([1] * 65))]}, "at most 64 ids"),
        ({"bad_words": [generation_pb2.TokenSequence(token_ids=u32([2**32 - 1]))]}, "ids must be below"),
    ],
)
def test_b11_what_is_out_of_bounds_is_refused(sampling: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        params(**sampling)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
