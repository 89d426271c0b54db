"""Any Submit gives requests within the limits or one of two errors; nothing else ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import ErrorCode, RequestError
from rung.models.config import DefaultSampling
from rung.request import Finished, FinishReason, Started
from rung.server import convert
from rung.server.gen import engine_pb2, generation_pb2, step_pb2
from rung.server.outbox import request_id
from tests.unit.engine_fixture import EOS, VOCAB_SIZE, make_facts, make_submit, u32

FACTS = make_facts(max_model_len=64)
U32 = st.integers(0, 2**32 - 1)
# Small numbers are the interesting ones, and bare u32s hardly ever are small.
COUNT = st.integers(0, 70) | U32
FLOAT = st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0, 100.0])

sampling = st.builds(
    generation_pb2.Sampling,
    temperature=st.none() | FLOAT,
    top_k=st.none() | COUNT,
    top_p=st.none() | FLOAT,
    seed=st.none() | st.integers(0, 2**64 - 1),
)
stopping = st.builds(
    generation_pb2.Stopping,
    max_tokens=st.none() | COUNT,
    min_tokens=st.none() | COUNT,
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE) | U32, max_size=5),
    ignore_eos=st.none() | st.booleans(),
)
prompts = st.binary(max_size=20) | st.lists(st.integers(0, VOCAB_SIZE), max_size=70).map(u32)
submits = st.builds(
    generation_pb2.Submit,
    handles=st.lists(U32, max_size=6) | st.lists(U32, max_size=4, unique=True),
    prompt_ids=prompts,
    sampling=st.none() | sampling,
    stopping=st.none() | stopping,
    logprobs=st.none() | st.builds(generation_pb2.LogprobRequest, top_n=st.none() | st.integers(0, 30) | U32),
    priority=st.none() | U32,
    deadline_ms=st.none() | st.integers(0, 2**64 - 1),
    cache_salt=st.none() | st.binary(max_size=70),
)


@given(submits)
def test_any_submit_gives_requests_within_limits_or_a_deliberate_error(submit: generation_pb2.Submit) -> None:
    try:
        handles = convert.submit_handles(submit)
        requests = convert.to_requests(submit, handles, 5, FACTS)
    except (convert.FrameError, RequestError):
        return
    assert [request.request_id for request in requests] == [request_id(5, handle) for handle in handles]
    for index, request in enumerate(requests):
        assert request.num_prompt_tokens >= 1
        assert request.max_total_tokens <= FACTS.max_model_len
        assert request.prompt_ids.dtype == np.int32
        assert request.prompt_ids.min() >= 0
        assert request.prompt_ids.max() < VOCAB_SIZE
        assert 0.0 <= request.sampling.temperature <= 100.0
        assert 0.0 < request.sampling.top_p <= 1.0
        assert 0 <= request.sampling.top_k <= VOCAB_SIZE
        assert 0 <= request.sampling.seed < 2**64
        assert request.sampling.sample_index == index
        assert request.stopping.min_tokens <= request.stopping.max_tokens
        assert all(0 <= stop < VOCAB_SIZE for stop in request.stopping.stop_token_ids)
        assert len(request.cache_salt) <= convert.MAX_CACHE_SALT_BYTES
        assert request.deadline_s is None or 0 <= request.deadline_s < float("inf")
        assert request.group_id == (requests[0].request_id if len(requests) > 1 else -1)


@given(st.binary(max_size=60))
def test_any_bytes_that_parse_are_handled(data: bytes) -> None:
    try:
        message = engine_pb2.SessionRequest.FromString(data)
    except Exception:
        return
    try:
        handles = convert.submit_handles(message.submit)
        convert.to_requests(message.submit, handles, 1, FACTS)
        convert.column(message.abort.handles, "Abort.handles")
    except (convert.FrameError, RequestError):
        pass


def one(submit: generation_pb2.Submit):  # type: ignore[no-untyped-def]
    (request,) = convert.to_requests(submit, [1], 1, FACTS)
    return request


def test_absent_fields_take_the_documented_values() -> None:
    request = one(generation_pb2.Submit(handles=[1], prompt_ids=u32([5])))
    assert request.sampling.temperature == 1.0
    assert request.sampling.top_k == 0
    assert request.sampling.top_p == 1.0
    assert request.sampling.top_logprobs is None
    assert request.stopping.max_tokens == 63
    assert request.stopping.min_tokens == 0
    assert request.stopping.stop_token_ids == {EOS}


def test_zero_is_a_value_and_not_absence() -> None:
    request = one(make_submit([1], temperature=0.0, seed=0, top_n=0))
    assert request.sampling.temperature == 0.0
    assert request.sampling.seed == 0
    assert request.sampling.top_logprobs == 0


def test_unseeded_requests_draw_a_seed_that_their_samples_share() -> None:
    submit = make_submit([1, 2], temperature=1.0)
    first, second = convert.to_requests(submit, [1, 2], 1, FACTS)
    assert first.sampling.seed == second.sampling.seed
    seeds = {one(make_submit([1])).sampling.seed for _ in range(8)}
    assert len(seeds) == 8


def test_stop_ids_join_the_models_own_unless_those_are_ignored() -> None:
    assert one(make_submit([1], stop_token_ids=[3], ignore_eos=False)).stopping.stop_token_ids == {3, EOS}
    assert one(make_submit([1], stop_token_ids=[3], ignore_eos=True)).stopping.stop_token_ids == {3}


def test_a_prompt_leaves_room_for_one_token() -> None:
    assert one(make_submit([1], [1] * 63, max_tokens=None)).stopping.max_tokens == 1
    with pytest.raises(RequestError, match=r"64 tokens.*64") as raised:
        one(make_submit([1], [1] * 64))
    assert raised.value.code == ErrorCode.CONTEXT_LENGTH


@pytest.mark.parametrize("temperature", [-0.1, 100.5, float("nan"), float("inf"), -float("inf")])
def test_temperatures_out_of_range_are_refused(temperature: float) -> None:
    with pytest.raises(RequestError, match="temperature must be between 0 and 100"):
        one(make_submit([1], temperature=temperature))


def test_too_many_samples_and_stop_ids_are_refused_with_the_limit() -> None:
    handles = list(range(FACTS.max_samples + 1))
    with pytest.raises(RequestError, match="at most 128 samples"):
        convert.to_requests(make_submit(handles), handles, 1, FACTS)
    with pytest.raises(RequestError, match="at most 256 stop ids"):
        one(make_submit([1], stop_token_ids=[1] * 257))


@pytest.mark.parametrize(
    ("last", "handles", "after"), [(None, [0], 0), (4, [5, 9], 9), (2**32 - 2, [2**32 - 1, 0, 1], 1)]
)
def test_handles_count_up_and_wrap(last: int | None, handles: list[int], after: int) -> None:
    assert convert.check_order(last, handles) == after


@pytest.mark.parametrize(("last", "handles"), [(5, [5]), (5, [4]), (None, [7, 6]), (0, [2**32 - 1])])
def test_handles_that_go_back_are_refused(last: int | None, handles: list[int]) -> None:
    with pytest.raises(convert.FrameError, match="count up"):
        convert.check_order(last, handles)


def test_every_code_and_reason_has_its_counterpart() -> None:
    for code in ErrorCode:
        assert step_pb2.EngineErrorCode.Name(convert._ERROR_CODES[code]) == f"ENGINE_ERROR_CODE_{code.name}"
    for reason in FinishReason:
        assert step_pb2.FinishReason.Name(convert._FINISH_REASONS[reason]) == f"FINISH_REASON_{reason.name}"
    assert len(convert._ERROR_CODES) == len(step_pb2.EngineErrorCode.values()) - 1
    assert len(convert._FINISH_REASONS) == len(step_pb2.FinishReason.values()) - 1


def test_events_become_messages_field_by_field() -> None:
    finished = convert._finished(
        Finished(
            request_id=request_id(2**31 - 1, 2**32 - 1),
            reason=FinishReason.ERROR,
            num_prompt_tokens=3,
            num_output_tokens=4,
            error=RequestError(ErrorCode.NON_FINITE, "NaN."),
        )
    )
    assert finished.handle == 2**32 - 1
    assert finished.reason == step_pb2.FINISH_REASON_ERROR
    assert (finished.prompt_tokens, finished.completion_tokens) == (3, 4)
    assert (finished.error.code, finished.error.message) == (step_pb2.ENGINE_ERROR_CODE_NON_FINITE, "NaN.")
    assert not finished.error.retryable
    assert not finished.HasField("stop_token_id")
    stopped = convert._finished(Finished(1, FinishReason.STOP, 1, 1, stop_token_id=0))
    assert stopped.HasField("stop_token_id")
    assert not stopped.HasField("error")
    started = convert._started(Started(9, 3, 2, queue_s=1.5, prefill_s=float("nan")))
    assert (started.handle, started.prompt_tokens, started.cached_tokens) == (9, 3, 2)
    assert (started.queue_ns, started.prefill_ns) == (1_500_000_000, 0)


def test_default_sampling_says_what_the_model_says_and_no_more() -> None:
    facts = make_facts()
    object.__setattr__(facts.model, "default_sampling", DefaultSampling(temperature=0.0, top_k=40))
    default = convert.describe(facts).model.default_sampling
    assert default.HasField("temperature")
    assert default.temperature == 0.0
    assert default.top_k == 40
    assert not default.HasField("top_p")


def test_what_decides_when_it_runs_and_what_it_shares_arrives() -> None:
    submit = make_submit([1])
    assert (one(submit).priority, one(submit).deadline_s, one(submit).cache_salt) == (0, None, b"")
    submit = generation_pb2.Submit(priority=7, deadline_ms=1500, cache_salt=b"tenant")
    submit.MergeFrom(make_submit([1]))
    assert (one(submit).priority, one(submit).deadline_s, one(submit).cache_salt) == (7, 1.5, b"tenant")


def test_a_salt_that_is_too_long_is_refused() -> None:
    submit = make_submit([1])
    submit.cache_salt = b"x" * 65
    with pytest.raises(RequestError, match="at most 64 bytes, but it has 65") as caught:
        one(submit)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
