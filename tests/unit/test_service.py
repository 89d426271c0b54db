"""The service over a real Unix socket: what a session gets is what FakeRunner's oracle says."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import grpc
import pytest

from rung.runner.fake import expected_tokens
from rung.server import service
from rung.server.convert import MAX_MESSAGE_BYTES
from rung.server.gen import engine_pb2, generation_pb2, model_pb2, step_pb2
from tests.unit.engine_fixture import (
    CALL_TIMEOUT_S,
    EOS,
    VOCAB_SIZE,
    Client,
    RunningEngine,
    make_facts,
    make_model,
    make_submit,
    running_engine,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with running_engine() as running:
        yield running


@pytest.fixture
def client(engine: RunningEngine) -> Iterator[Client]:
    with Client(engine.address) as connected:
        yield connected


def oracle(prompt: list[int], num_tokens: int, **sampling: float) -> list[int]:
    return expected_tokens(prompt, num_tokens, vocab_size=VOCAB_SIZE, **sampling)


def test_describe_gives_the_facts(client: Client) -> None:
    description = client.stub.Describe(model_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S)
    assert description.protocol == 1
    assert description.model.name == "tiny"
    assert description.model.vocab_size == VOCAB_SIZE
    assert description.model.max_model_len == 256
    assert description.model.bos_token_id == 1
    assert list(description.model.eos_token_ids) == [EOS]
    assert not description.model.default_sampling.HasField("temperature")
    assert description.limits.max_submit_bytes < MAX_MESSAGE_BYTES
    assert model_pb2.CAPABILITY_BATCH_INVARIANT in description.capabilities
    (file,) = description.tokenizer_files
    assert (file.name, file.size_bytes) == ("tokenizer.json", 2)
    assert file.sha256 == hashlib.sha256(b"{}").digest()


def test_tokenizer_comes_in_chunks_and_unknown_files_do_not_exist() -> None:
    content = bytes(range(256)) * (9 * 1024)
    facts = make_facts()
    object.__setattr__(facts, "model", make_model(tokenizer_json=content))
    with running_engine(facts) as running, Client(running.address) as client:
        request = model_pb2.FetchTokenizerRequest(name="tokenizer.json")
        chunks = [r.chunk for r in client.stub.FetchTokenizer(request, timeout=CALL_TIMEOUT_S)]
        assert b"".join(chunks) == content
        assert [len(chunk) for chunk in chunks] == [1 << 20, 1 << 20, 256 * 1024]
        with pytest.raises(grpc.RpcError) as raised:
            list(client.stub.FetchTokenizer(model_pb2.FetchTokenizerRequest(name="../secret")))
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_request_gets_the_oracles_tokens_and_one_terminal_event(client: Client) -> None:
    client.submit(make_submit([1], [5, 6, 7], max_tokens=20))
    (row,) = client.read_until_ended(1)
    assert row.tokens == oracle([5, 6, 7], 20)
    assert row.finished is not None
    assert row.finished.reason == step_pb2.FINISH_REASON_LENGTH
    assert row.finished.prompt_tokens == 3
    assert not row.finished.HasField("stop_token_id")
    assert row.started is not None
    assert row.started.prompt_tokens == 3


def test_a_stop_id_ends_the_row_and_is_reported(client: Client) -> None:
    stop = oracle([5, 6, 7], 20)[4]
    client.submit(make_submit([1], [5, 6, 7], max_tokens=20, stop_token_ids=[stop]))
    (row,) = client.read_until_ended(1)
    assert row.tokens == oracle([5, 6, 7], 20, stop_token_ids=[stop])
    assert row.finished is not None
    assert row.finished.reason == step_pb2.FINISH_REASON_STOP
    assert row.finished.stop_token_id == stop


def test_samples_of_one_request_draw_their_own_numbers(client: Client) -> None:
    client.submit(make_submit([10, 11, 12], [4, 4], max_tokens=9, temperature=1.0, seed=77))
    rows = client.read_until_ended(10, 11, 12)
    for index, row in enumerate(rows):
        assert row.tokens == oracle([4, 4], 9, temperature=1.0, seed=77, sample_index=index)
    assert len({tuple(row.tokens) for row in rows}) == 3


def test_logprobs_stand_beside_their_tokens(client: Client) -> None:
    client.submit(make_submit([1], [8], max_tokens=6))
    client.submit(make_submit([2], [9], max_tokens=6, top_n=3))
    client.submit(make_submit([3], [7], max_tokens=6, top_n=0))
    silent, three, zero = client.read_until_ended(1, 2, 3)
    assert not silent.logprobs
    # FakeRunner makes the chosen id the most likely one.
    assert [[top_id for top_id, _ in top][:1] for _, top in three.logprobs] == [[t] for t in three.tokens]
    assert [len(top) for _, top in three.logprobs] == [3] * 6
    assert [len(top) for _, top in zero.logprobs] == [0] * 6


def test_an_aborted_row_gets_its_terminal_event(client: Client) -> None:
    client.submit(make_submit([1], max_tokens=None))
    while not client.fold.row(1).tokens:
        client.read()
    client.abort(1, 99)
    (row,) = client.read_until_ended(1)
    assert row.finished is not None
    # The whole context may have been generated before the abort arrived.
    assert row.finished.reason in (step_pb2.FINISH_REASON_CANCELLED, step_pb2.FINISH_REASON_LENGTH)
    assert row.tokens == oracle([1, 2, 3], 253)[: len(row.tokens)]


def test_a_waiting_row_can_be_aborted(engine: RunningEngine, client: Client) -> None:
    engine.runner.hold()
    client.submit(make_submit([1], max_tokens=2))
    assert engine.runner.inside.wait(CALL_TIMEOUT_S)
    client.submit(make_submit([2], max_tokens=2))
    client.abort(2)
    # The answer to the last frame shows that the engine has the ones before it.
    client.submit(make_submit([3], [VOCAB_SIZE]))
    client.read_until_ended(3)
    engine.runner.release()
    ran, aborted = client.read_until_ended(1, 2)
    assert ran.tokens == oracle([1, 2, 3], 2)
    assert aborted.finished is not None
    assert aborted.finished.reason == step_pb2.FINISH_REASON_CANCELLED
    assert aborted.finished.completion_tokens == 0


def test_aborts_of_unknown_and_ended_handles_are_ignored(client: Client) -> None:
    client.abort(1, 2, 3)
    client.submit(make_submit([1]))
    client.read_until_ended(1)
    client.abort(1)
    client.submit(make_submit([2]))
    (row,) = client.read_until_ended(2)
    assert row.tokens == oracle([1, 2, 3], 8)


@pytest.mark.parametrize(
    ("submit", "code", "said"),
    [
        (make_submit([1, 2], []), step_pb2.ENGINE_ERROR_CODE_INVALID_ARGUMENT, "empty"),
        (make_submit([1, 2], [VOCAB_SIZE]), step_pb2.ENGINE_ERROR_CODE_INVALID_ARGUMENT, "below 1000"),
        (make_submit([1, 2], [1] * 256), step_pb2.ENGINE_ERROR_CODE_CONTEXT_LENGTH, "256 tokens"),
        (make_submit([1, 2], max_tokens=0), step_pb2.ENGINE_ERROR_CODE_INVALID_ARGUMENT, "at least 1"),
        (make_submit([1, 2], top_p=0.0), step_pb2.ENGINE_ERROR_CODE_INVALID_ARGUMENT, "top_p"),
        (make_submit([1, 2], top_n=21), step_pb2.ENGINE_ERROR_CODE_INVALID_ARGUMENT, "20"),
    ],
)
def test_a_bad_request_is_rejected_with_all_its_handles(
    client: Client, submit: generation_pb2.Submit, code: int, said: str
) -> None:
    client.submit(submit)
    for row in client.read_until_ended(1, 2):
        assert row.rejected is not None
        assert row.rejected.code == code
        assert said in row.rejected.message
        assert not row.rejected.retryable
    client.submit(make_submit([3]))
    (row,) = client.read_until_ended(3)
    assert row.tokens == oracle([1, 2, 3], 8)


def test_max_tokens_is_clamped_to_the_room(client: Client) -> None:
    client.submit(make_submit([1], [3] * 250, max_tokens=100))
    (row,) = client.read_until_ended(1)
    assert row.tokens == oracle([3] * 250, 6)


def test_the_schedulers_refusal_reaches_the_session() -> None:
    facts = make_facts(max_num_seqs=1, max_waiting=2)
    with running_engine(facts) as running, Client(running.address) as client:
        running.runner.hold()
        client.submit(make_submit([1], max_tokens=2))
        assert running.runner.inside.wait(CALL_TIMEOUT_S)
        client.submit(make_submit([2, 3], max_tokens=2))
        # Three rows are all that one session may have open here.
        client.submit(make_submit([4], max_tokens=2))
        (refused,) = client.read_until_ended(4)
        assert refused.rejected is not None
        assert refused.rejected.code == step_pb2.ENGINE_ERROR_CODE_OVERLOADED
        assert refused.rejected.retryable
        with Client(running.address) as other:
            # The queue is full for everybody; the other session hears it from the scheduler.
            other.submit(make_submit([1], max_tokens=2))
            # Its answer to an earlier frame shows that the frame was taken in.
            other.submit(make_submit([2], []))
            other.read_until_ended(2)
            running.runner.release()
            (full,) = other.read_until_ended(1)
            assert full.rejected is not None
            assert full.rejected.code == step_pb2.ENGINE_ERROR_CODE_OVERLOADED
        assert all(row.tokens == oracle([1, 2, 3], 2) for row in client.read_until_ended(1, 2, 3))


def test_a_draining_session_refuses_requests_and_finishes_its_rows(
    engine: RunningEngine, client: Client
) -> None:
    client.submit(make_submit([1], max_tokens=30))
    client.send(engine_pb2.SessionRequest(drain=engine_pb2.Drain()))
    client.submit(make_submit([2]))
    live, refused = client.read_until_ended(1, 2)
    assert live.tokens == oracle([1, 2, 3], 30)
    assert refused.rejected is not None
    assert refused.rejected.code == step_pb2.ENGINE_ERROR_CODE_DRAINING
    with Client(engine.address) as other:
        other.submit(make_submit([1]))
        other.read_until_ended(1)


@pytest.mark.parametrize(
    "request_",
    [
        engine_pb2.SessionRequest(),
        engine_pb2.SessionRequest(submit=make_submit([])),
        engine_pb2.SessionRequest(submit=make_submit([5, 5])),
        engine_pb2.SessionRequest(submit=make_submit([1])),
        engine_pb2.SessionRequest(submit=make_submit([0])),
        engine_pb2.SessionRequest(abort=engine_pb2.Abort(handles=b"123")),
    ],
    ids=["nothing", "no handle", "handle twice", "live handle", "older handle", "ragged column"],
)
def test_a_frame_that_breaks_the_rules_ends_the_session_alone(
    engine: RunningEngine, client: Client, request_: engine_pb2.SessionRequest
) -> None:
    with Client(engine.address) as other:
        other.submit(make_submit([1], max_tokens=100))
        client.submit(make_submit([1], max_tokens=None))
        client.send(request_)
        code, details = client.status()
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert details
        (row,) = other.read_until_ended(1)
        assert row.tokens == oracle([1, 2, 3], 100)


def test_bytes_that_are_no_message_end_the_session_alone(engine: RunningEngine) -> None:
    with Client(engine.address) as client:
        raw = client.channel.stream_stream("/rung.engine.v1.EngineService/Session")
        with pytest.raises(grpc.RpcError) as raised:
            list(raw(iter([b"\xff" * 40]), timeout=CALL_TIMEOUT_S))
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        client.submit(make_submit([1]))
        client.read_until_ended(1)


def test_an_oversize_frame_ends_the_session_alone(engine: RunningEngine) -> None:
    with Client(engine.address) as other, Client(engine.address) as client:
        client.send(
            engine_pb2.SessionRequest(
                submit=generation_pb2.Submit(handles=[1], prompt_ids=bytes(MAX_MESSAGE_BYTES + 4))
            )
        )
        code, _ = client.status()
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        other.submit(make_submit([1]))
        (row,) = other.read_until_ended(1)
        assert row.tokens == oracle([1, 2, 3], 8)


def test_the_largest_frame_is_read(client: Client) -> None:
    description = client.stub.Describe(model_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S)
    submit = generation_pb2.Submit(handles=[1], prompt_ids=b"")
    size = (description.limits.max_submit_bytes - 64) // 4 * 4
    submit.prompt_ids = bytes(size)
    client.submit(submit)
    (row,) = client.read_until_ended(1)
    assert row.rejected is not None
    assert row.rejected.code == step_pb2.ENGINE_ERROR_CODE_CONTEXT_LENGTH
    assert str(size // 4) in row.rejected.message


def test_frontends_share_prefixes_of_one_salt_and_no_other() -> None:
    prompt = list(range(40))
    expected = oracle(prompt, 4)
    with running_engine() as engine:
        cached = []
        for salt in (b"", b"", b"tenant", b"tenant", b"other"):
            with Client(engine.address) as frontend:
                submit = make_submit([1], prompt, max_tokens=4)
                submit.cache_salt = salt
                frontend.submit(submit)
                (row,) = frontend.read_until_ended(1)
                assert row.tokens == expected
                assert row.started is not None
                cached.append(row.started.cached_tokens)
                assert row.finished.prompt_tokens == 40
        # Two full blocks lie before the last token. A frontend that connects anew starts with handle 1.
        assert cached == [0, 32, 0, 32, 0]
        assert engine.engine.heartbeat().stats.cached_tokens_total == 64


def test_samples_of_one_request_share_their_prompt() -> None:
    prompt = list(range(40))
    with running_engine() as engine, Client(engine.address) as frontend:
        frontend.submit(make_submit([1, 2, 3], prompt, max_tokens=6, temperature=1.0, seed=3))
        rows = frontend.read_until_ended(1, 2, 3)
        for index, row in enumerate(rows):
            assert row.tokens == oracle(prompt, 6, temperature=1.0, seed=3, sample_index=index)
        assert sorted(row.started.cached_tokens for row in rows) == [0, 39, 39]


def test_a_request_that_waits_too_long_ends_with_its_deadline() -> None:
    with running_engine(make_facts(max_num_seqs=1)) as engine, Client(engine.address) as frontend:
        engine.runner.hold()
        frontend.submit(make_submit([1], max_tokens=4))
        assert engine.runner.inside.wait(CALL_TIMEOUT_S)
        late = make_submit([2], max_tokens=4)
        late.deadline_ms = 0
        patient = make_submit([3], max_tokens=4)
        patient.deadline_ms = 2**64 - 1
        frontend.submit(late)
        frontend.submit(patient)
        # Its answer comes at once, and those before it have arrived by then.
        frontend.submit(make_submit([4], []))
        frontend.read_until_ended(4)
        engine.runner.release()
        _, late_row, patient_row = frontend.read_until_ended(1, 2, 3)
    assert late_row.finished.error.code == step_pb2.ENGINE_ERROR_CODE_DEADLINE
    assert late_row.started is None
    assert patient_row.finished.reason == step_pb2.FINISH_REASON_LENGTH


def test_sessions_share_the_engine_and_not_their_handles(engine: RunningEngine) -> None:
    with Client(engine.address) as one, Client(engine.address) as two:
        for handle in range(1, 9):
            one.submit(make_submit([handle], [handle], max_tokens=40))
            two.submit(make_submit([handle], [100 + handle], max_tokens=40, top_n=1))
        for handle, row in enumerate(one.read_until_ended(*range(1, 9)), start=1):
            assert row.tokens == oracle([handle], 40)
        for handle, row in enumerate(two.read_until_ended(*range(1, 9)), start=1):
            assert row.tokens == oracle([100 + handle], 40)
            assert len(row.logprobs) == 40


def test_heartbeats_come_while_idle(client: Client) -> None:
    first, second, third = (client.read_step() for _ in range(3))
    assert [step.step_age_ms for step in (first, second, third)] == [0, 0, 0]
    assert first.loop_seq == second.loop_seq == third.loop_seq
    assert first.emitted_unix_ns < second.emitted_unix_ns < third.emitted_unix_ns
    assert service.HEARTBEAT_S <= 0.25, "the promise of 500 ms needs some slack"
    assert third.stats.kv_blocks_used == 0
    assert third.stats.kv_blocks_total == 512


def test_heartbeats_come_inside_a_long_step(engine: RunningEngine, client: Client) -> None:
    client.submit(make_submit([1], max_tokens=3))
    client.read_until_ended(1)
    engine.runner.hold()
    client.submit(make_submit([2], max_tokens=3))
    assert engine.runner.inside.wait(CALL_TIMEOUT_S)
    ages = []
    while not ages or ages[-1] < 600:
        ages.append(client.read_step().step_age_ms)
    assert ages == sorted(ages)
    engine.runner.release()
    (row,) = client.read_until_ended(2)
    assert row.tokens == oracle([1, 2, 3], 3)
    step = client.fold.steps[-1]
    assert step.stats.running == 0
    assert step.step_age_ms == 0


def test_a_dropped_session_frees_its_rows(engine: RunningEngine, client: Client) -> None:
    dropped_before = engine.publisher.num_dropped_rows
    with Client(engine.address) as leaving:
        engine.runner.hold(after=1)
        leaving.submit(make_submit([1, 2, 3], max_tokens=None))
        assert engine.runner.inside.wait(CALL_TIMEOUT_S)
        while client.read_step().stats.kv_blocks_used == 0:
            pass
    engine.runner.release()
    # Its rows end without anybody to hear it; the other session sees the blocks come back.
    while client.read_step().stats.kv_blocks_used > 0:
        pass
    client.submit(make_submit([1]))
    (row,) = client.read_until_ended(1)
    assert row.tokens == oracle([1, 2, 3], 8)
    assert engine.publisher.num_dropped_rows >= dropped_before + 3


def test_a_reader_that_stops_gets_merged_steps_and_every_token() -> None:
    facts = make_facts(max_model_len=4096)
    with (
        running_engine(facts, num_blocks=8 * 256) as running,
        Client(running.address) as slow,
        Client(running.address) as watcher,
    ):
        for handle in range(1, 9):
            slow.submit(make_submit([handle], [handle], max_tokens=3000, top_n=handle % 2))
        while watcher.read_step().stats.generation_tokens_total < 8 * 3000:
            pass
        rows = slow.read_until_ended(*range(1, 9))
        for handle, row in enumerate(rows, start=1):
            assert row.tokens == oracle([handle], 3000)
            assert [len(top) for _, top in row.logprobs] == [handle % 2] * 3000
            if handle % 2:
                assert [top[0][0] for _, top in row.logprobs] == row.tokens
        # The engine took 3,000 steps; the transport asked for those that its window holds.
        assert len(slow.fold.steps) < 1500


@pytest.mark.parametrize("how", ["breaks a rule", "leaves"])
def test_a_reader_that_stopped_can_still_be_ended(engine: RunningEngine, how: str) -> None:
    with Client(engine.address) as watcher:
        before = watcher.read_step().stats.generation_tokens_total
        with Client(engine.address) as slow:
            # Enough answers to fill the window, none of which is read.
            handles = range(1, 65)
            for handle in handles:
                slow.submit(make_submit([handle], max_tokens=250, top_n=20))
            while watcher.read_step().stats.generation_tokens_total < before + 64 * 250:
                pass
            if how == "breaks a rule":
                slow.send(engine_pb2.SessionRequest())
                assert slow.status()[0] == grpc.StatusCode.INVALID_ARGUMENT
        watcher.submit(make_submit([1]))
        watcher.read_until_ended(1)


def test_a_half_closed_session_ends(engine: RunningEngine) -> None:
    with Client(engine.address) as client:
        client.submit(make_submit([1], max_tokens=None))
        client.half_close()
        assert client.status()[0] == grpc.StatusCode.OK


def test_describe_answers_while_all_sessions_are_taken(engine: RunningEngine) -> None:
    with Client(engine.address) as first:
        first.read_step()
        others = [Client(engine.address) for _ in range(service.MAX_SESSIONS - 1)]
        try:
            for other in others:
                other.read_step()
            with Client(engine.address) as late:
                code, details = late.status()
                assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert str(service.MAX_SESSIONS) in details
                late.stub.Describe(model_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S)
        finally:
            for other in others:
                other.__exit__()
        first.submit(make_submit([1]))
        first.read_until_ended(1)


def test_a_stopping_engine_ends_its_sessions_with_the_reason() -> None:
    with running_engine() as running, Client(running.address) as client:
        client.read_step()
        running.engine.stop()
        running.server.stop("maintenance")
        assert client.status() == (grpc.StatusCode.UNAVAILABLE, "maintenance")
