"""A real engine and service over FakeRunner, a client that checks the stream's rules, and small helpers."""

from __future__ import annotations

import queue
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np

from rung.config import ListenAddress
from rung.engine import Engine
from rung.grammar.compiler import GrammarCompiler
from rung.grammar.gate import GrammarGate
from rung.grammar.runner import GrammarRunner
from rung.grammar.states import GrammarStates
from rung.models.config import ModelConfig, ModelMetadata, TokenizerBundle
from rung.runner.fake import FakeRunner
from rung.scheduler import Scheduler, SchedulerConfig
from rung.server.convert import MAX_MESSAGE_BYTES, EngineFacts
from rung.server.gen import engine_pb2, engine_pb2_grpc, generation_pb2, step_pb2
from rung.server.outbox import Publisher
from rung.server.service import EngineServer
from tests.grammar_files import EOS as GRAMMAR_EOS
from tests.grammar_files import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rung.scheduler.batch import StepPlan

VOCAB_SIZE = 1000
EOS = 999
# Bounds a test that would otherwise hang; nothing depends on how long anything takes.
CALL_TIMEOUT_S = 120.0


def make_model(vocab_size: int = VOCAB_SIZE, tokenizer_json: bytes = b"{}") -> ModelMetadata:
    """A model that exists only as facts."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return ModelMetadata(
        name="tiny",
        config=config,
        tokenizer=TokenizerBundle({"tokenizer.json": tokenizer_json}, bos_token_id=1, eos_token_ids=(EOS,)),
        weight_format="F32",
        num_parameters=1234,
    )


def make_facts(max_model_len: int = 256, max_num_seqs: int = 8, max_waiting: int = 64) -> EngineFacts:
    """Facts with small limits."""
    return EngineFacts(
        model=make_model(),
        runner="fake",
        batch_invariant=True,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
    )


class GatedRunner(FakeRunner):
    """A FakeRunner that can be held inside a step."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size)
        self._gate = threading.Condition()
        self._allowed: int | None = None
        self.inside = threading.Event()

    def hold(self, after: int = 0) -> None:
        """Lets `after` more steps through; `inside` is set when the one after them is held."""
        self.inside.clear()
        with self._gate:
            self._allowed = after

    def release(self) -> None:
        """Lets steps go on."""
        with self._gate:
            self._allowed = None
            self._gate.notify()

    def forward(self, plan: StepPlan) -> None:
        with self._gate:
            if self._allowed == 0:
                self.inside.set()
                held = self._gate.wait_for(lambda: self._allowed != 0, CALL_TIMEOUT_S)
                assert held, "a test held a step and never released it"
            if self._allowed is not None:
                self._allowed -= 1
        super().forward(plan)


@dataclass
class RunningEngine:
    """What a test may look at."""

    engine: Engine
    runner: GatedRunner
    publisher: Publisher
    server: EngineServer
    address: str
    facts: EngineFacts


@contextmanager
def running_engine(facts: EngineFacts | None = None, num_blocks: int = 512) -> Iterator[RunningEngine]:
    """An engine on a Unix socket, stopped at the end; its bookkeeping is checked when idle."""
    facts = facts or make_facts()
    runner = GatedRunner(num_blocks, 16, facts.vocab_size)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=max(64, facts.max_num_seqs),
            max_waiting=facts.max_waiting,
            max_model_len=facts.max_model_len,
        )
    )
    publisher = Publisher()
    deaths: list[Exception] = []
    grammars = GrammarStates(facts.vocab_size)
    engine = Engine(
        scheduler,
        GrammarRunner(runner, grammars),
        grammars.forgetting_ended(publisher.publish),
        on_rejected=grammars.forgetting_rejected(publisher.reject),
        on_dead=deaths.append,
        check_integrity=True,
    )
    with tempfile.TemporaryDirectory(prefix="rung") as folder:
        listen = ListenAddress(unix_path=Path(folder) / "engine.sock")
        compiler = GrammarCompiler(byte_tokenizer(), facts.vocab_size, [GRAMMAR_EOS])
        gate = GrammarGate(engine, compiler, grammars, publisher.reject)
        server = EngineServer(gate, facts, publisher, listen)
        address = server.start()
        loop = threading.Thread(target=engine.run, name="rung-loop")
        loop.start()
        try:
            yield RunningEngine(engine, runner, publisher, server, address, facts)
        finally:
            runner.release()
            engine.stop()
            loop.join()
            gate.close()
            server.stop("the test is over")
    assert not deaths
    assert len(grammars) == 0


@dataclass
class Row:
    """What one handle was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    started: step_pb2.Started | None = None
    finished: step_pb2.Finished | None = None
    rejected: step_pb2.EngineError | None = None

    @property
    def ended(self) -> bool:
        """Whether its terminal event came."""
        return self.finished is not None or self.rejected is not None


class Fold:
    """Folds a session's messages into rows and checks every rule of the stream on the way."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.seq = 0
        self.steps: list[step_pb2.Step] = []

    def row(self, handle: int) -> Row:
        """What a handle was told so far."""
        return self.rows.setdefault(handle, Row())

    def take(self, response: engine_pb2.SessionResponse) -> None:
        """Adds one message."""
        if response.WhichOneof("message") == "rejected":
            for handle in np.frombuffer(response.rejected.handles, "<u4").tolist():
                row = self.row(handle)
                assert not row.ended
                assert not row.tokens
                row.rejected = response.rejected.error
            return
        step = response.step
        self.seq += 1
        assert step.seq == self.seq
        self.steps.append(step)
        for started in step.started:
            row = self.row(started.handle)
            assert row.started is None
            assert not row.tokens
            row.started = started
        self._take_tokens(step)
        for finished in step.finished:
            row = self.row(finished.handle)
            assert not row.ended
            assert finished.HasField("error") == (finished.reason == step_pb2.FINISH_REASON_ERROR)
            assert finished.completion_tokens == len(row.tokens)
            row.finished = finished

    def _take_tokens(self, step: step_pb2.Step) -> None:
        handles = np.frombuffer(step.handles, "<u4").tolist()
        counts = np.frombuffer(step.token_counts, "<u4").tolist()
        ids = np.frombuffer(step.token_ids, "<u4").tolist()
        assert len(handles) == len(counts) == len(set(handles))
        assert sum(counts) == len(ids)
        start = 0
        for handle, count in zip(handles, counts, strict=True):
            row = self.row(handle)
            assert not row.ended
            assert row.started is not None
            row.tokens += ids[start : start + count]
            start += count
        if step.HasField("logprobs"):
            self._take_logprobs(step.logprobs, dict(zip(handles, counts, strict=True)))

    def _take_logprobs(self, columns: step_pb2.LogprobColumns, counts: dict[int, int]) -> None:
        chosen = np.frombuffer(columns.chosen, "<f4").tolist()
        top_counts = np.frombuffer(columns.top_counts, "<u4").tolist()
        top = list(
            zip(
                np.frombuffer(columns.top_ids, "<u4").tolist(),
                np.frombuffer(columns.top_logprobs, "<f4").tolist(),
                strict=True,
            )
        )
        assert len(chosen) == len(top_counts)
        assert sum(top_counts) == len(top)
        asked = np.frombuffer(columns.handles, "<u4").tolist()
        assert asked == [handle for handle in counts if handle in set(asked)], "in the order of the rows"
        token = alternative = 0
        for handle in asked:
            for _ in range(counts[handle]):
                count = top_counts[token]
                self.row(handle).logprobs.append((chosen[token], top[alternative : alternative + count]))
                token += 1
                alternative += count
        assert token == len(chosen)


class Client:
    """One frontend: a session over a real socket."""

    def __init__(self, address: str) -> None:
        limits = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            # A channel of its own connects anew, as another process would.
            ("grpc.use_local_subchannel_pool", 1),
            # A window that does not grow, so that a test can fill it.
            ("grpc.http2.lookahead_bytes", 65_536),
            ("grpc.http2.bdp_probe", 0),
        ]
        self.channel = grpc.insecure_channel(address, options=limits)
        self.stub = engine_pb2_grpc.EngineServiceStub(self.channel)
        self._requests: queue.SimpleQueue[engine_pb2.SessionRequest | None] = queue.SimpleQueue()
        self.call = self.stub.Session(iter(self._requests.get, None), timeout=CALL_TIMEOUT_S)
        self.fold = Fold()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.call.cancel()
        self._requests.put(None)
        self.channel.close()

    def submit(self, submit: generation_pb2.Submit) -> None:
        """Sends a Submit."""
        self._requests.put(engine_pb2.SessionRequest(submit=submit))

    def abort(self, *handles: int) -> None:
        """Sends an Abort."""
        self._requests.put(engine_pb2.SessionRequest(abort=engine_pb2.Abort(handles=u32(handles))))

    def send(self, request: engine_pb2.SessionRequest) -> None:
        """Sends anything."""
        self._requests.put(request)

    def half_close(self) -> None:
        """Says that no more requests come."""
        self._requests.put(None)

    def read(self) -> engine_pb2.SessionResponse:
        """Waits for one message and folds it."""
        response = next(self.call)
        self.fold.take(response)
        return response

    def read_step(self) -> step_pb2.Step:
        """Waits for the next Step."""
        while True:
            response = self.read()
            if response.WhichOneof("message") == "step":
                return response.step

    def read_until_ended(self, *handles: int) -> list[Row]:
        """Waits for the terminal events of these handles."""
        while not all(self.fold.row(handle).ended for handle in handles):
            self.read()
        return [self.fold.row(handle) for handle in handles]

    def status(self) -> tuple[grpc.StatusCode, str]:
        """Waits for the end of the session and says how it ended."""
        try:
            while True:
                self.read()
        except grpc.RpcError as error:
            return error.code(), error.details()
        except StopIteration:
            return self.call.code(), self.call.details()


def u32(values: Sequence[int]) -> bytes:
    """A little-endian u32 column."""
    return np.array(values, dtype="<u4").tobytes()


def make_submit(
    handles: Sequence[int],
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int | None = 8,
    top_n: int | None = None,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = True,
    **sampling: float,
) -> generation_pb2.Submit:
    """A Submit, greedy unless told otherwise."""
    return generation_pb2.Submit(
        handles=handles,
        prompt_ids=u32(prompt),
        sampling=generation_pb2.Sampling(**({"temperature": 0.0} | sampling)),
        stopping=generation_pb2.Stopping(
            max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        ),
        logprobs=None if top_n is None else generation_pb2.LogprobRequest(top_n=top_n),
    )
