"""Answers follow their grammar through chunks, preemption and mixed batches; a bad one fails alone."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rung.errors import ErrorCode, RequestError
from rung.grammar import compiler as compiler_module
from rung.grammar.gate import MAX_COMPILING, GrammarGate
from rung.grammar.runner import GrammarRunner
from rung.grammar.states import GrammarStates
from rung.request import FinishReason, Request, SamplingParams, StoppingParams
from rung.runner.fake import FakeRunner
from rung.sampling.rules import TokenRules
from rung.scheduler import Scheduler
from rung.scheduler.batch import TokenMasks
from tests.grammar_files import EOS, VOCAB_SIZE, byte_compiler, lark, schema
from tests.sampling_oracle import PlainRules
from tests.scheduling import CARELESS, Answers, make_scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.scheduler.batch import StepEvents, StepPlan

PERSON = schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
COLOUR = lark('start: "red" | "green" | "blue"')
DIGITS = lark("start: /[0-9]{3,5}/")
# Legal, and grows without end: it runs into the limits of a step.
ENDLESS = lark('start: "a" start')


def make_request(
    request_id: int, grammar: str | None, *, prompt: int = 5, max_tokens: int = 40, **sampling: object
) -> Request:
    prompt_ids = np.array(
        [(request_id * 7 + position * 3) % 256 for position in range(prompt)], dtype=np.int32
    )
    return Request(
        request_id,
        prompt_ids,
        SamplingParams(**{"temperature": 0.0, "grammar": grammar, **sampling}),  # type: ignore[arg-type]
        StoppingParams(max_tokens, 0, frozenset({EOS})),
    )


class Direct:
    """Engine, gate and loop in one thread: what a test needs of them."""

    def __init__(self, **limits: int) -> None:
        self.scheduler: Scheduler = make_scheduler(policies=CARELESS, **limits)
        self.compiler = byte_compiler()
        self.states = GrammarStates(VOCAB_SIZE)
        config = self.scheduler.config
        self.runner = GrammarRunner(FakeRunner(config.num_blocks, config.block_size, VOCAB_SIZE), self.states)
        self.answers = Answers()
        self.errors: dict[int, RequestError] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            if request.sampling.grammar is not None:
                self.states.add([request], self.compiler.compile(request.sampling.grammar))
        self.scheduler.add(*requests)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.runner.forward(plan)
        self.take(self.scheduler.commit(plan, self.runner.sample(plan), 0.0))
        return plan

    def take(self, events: StepEvents) -> None:
        self.answers.take(events)
        self.states.forget(finished.request_id for finished in events.finished)
        for finished in events.finished:
            if finished.error is not None:
                self.errors[finished.request_id] = finished.error

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def text(self, request_id: int) -> str:
        ids = [token for token in self.answers.tokens[request_id] if token != EOS]
        return bytes(ids).decode()


def alone(request: Request) -> list[int]:
    engine = Direct(max_num_batched_tokens=64)
    engine.add(Request(request.request_id, request.prompt_ids, request.sampling, request.stopping))
    engine.run()
    return engine.answers.tokens[request.request_id]


def test_answers_follow_their_grammars_and_end_where_these_end() -> None:
    engine = Direct()
    engine.add(*(make_request(i, grammar) for i, grammar in enumerate((PERSON, COLOUR, DIGITS, None))))
    engine.run()
    person = json.loads(engine.text(0))
    assert set(person) == {"name", "age"}
    assert engine.text(1) in {"red", "green", "blue"}
    assert engine.text(2).isdigit()
    assert 3 <= len(engine.text(2)) <= 5
    for request_id in (0, 1, 2):
        assert engine.answers.tokens[request_id][-1] == EOS
        assert engine.answers.finished[request_id].reason is FinishReason.STOP  # type: ignore[attr-defined]
    assert len(engine.states) == 0


def test_a_storm_with_preemption_gives_each_request_its_own_answer() -> None:
    engine = Direct(num_blocks=40, max_num_batched_tokens=9)
    grammars = [PERSON, None, COLOUR, DIGITS]
    requests = [
        make_request(i, grammars[i % 4], prompt=4 + i, temperature=float(i % 3 > 0), seed=i)
        for i in range(16)
    ]
    engine.add(*requests)
    engine.run()
    assert engine.scheduler.stats().preemptions_total > 0
    for request in requests:
        assert engine.answers.tokens[request.request_id] == alone(request)
    assert engine.errors == {}


def test_samples_of_one_prompt_have_states_of_their_own() -> None:
    engine = Direct()
    first = make_request(0, PERSON, temperature=1.0, seed=5)
    samplings = [replace(first.sampling, sample_index=index) for index in range(6)]
    engine.add(*(Request(k, first.prompt_ids, samplings[k], first.stopping) for k in range(6)))
    engine.run()
    texts = {engine.text(k) for k in range(6)}
    assert len(texts) > 1
    assert all(set(json.loads(text)) == {"name", "age"} for text in texts)


def test_rules_and_grammar_hold_together() -> None:
    engine = Direct()
    rules = byte_rules(banned=b"rg")
    engine.add(make_request(0, COLOUR, rules=rules), make_request(1, COLOUR, rules=byte_rules(banned=b"rgb")))
    engine.run()
    assert engine.text(0) == "blue"
    assert engine.errors[1].code is ErrorCode.INVALID_ARGUMENT
    assert "forbidden" in engine.errors[1].message or "banned" in engine.errors[1].message


def byte_rules(banned: bytes) -> TokenRules:
    return PlainRules(bad_words=tuple((byte,) for byte in banned)).built()


def test_a_grammar_that_cannot_go_on_fails_its_own_request() -> None:
    engine = Direct()
    engine.add(make_request(0, ENDLESS), make_request(1, COLOUR), make_request(2, None, max_tokens=5))
    engine.run()
    assert list(engine.errors) == [0]
    assert engine.errors[0].code is ErrorCode.INVALID_ARGUMENT
    assert "grammar" in engine.errors[0].message
    assert engine.text(1) in {"red", "green", "blue"}
    assert len(engine.answers.tokens[2]) == 5


def test_an_answer_that_is_taken_back_is_followed_again_from_its_ids() -> None:
    states = GrammarStates(VOCAB_SIZE)
    compiler = byte_compiler()
    engine = Direct()
    request = make_request(0, COLOUR)
    states.add([request], compiler.compile(COLOUR))
    engine.scheduler.add(request)
    plan = engine.scheduler.schedule()
    assert plan is not None

    def allowed(answer: bytes) -> set[int]:
        position = np.array([request.num_prompt_tokens + len(answer)])
        shown = replace(plan, sampling=replace(plan.sampling, position=position))
        masks = states.masks(shown)
        assert masks.failed == {}
        assert masks.masks is not None
        bits = np.unpackbits(masks.masks.bits.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    def choose(answer: bytes, token: int) -> None:
        position = np.array([request.num_prompt_tokens + len(answer)])
        states.take_tokens(replace(plan, sampling=replace(plan.sampling, position=position)), [token])

    assert allowed(b"") == set(b"rgb")
    for length in range(5):
        choose(b"green"[:length], b"green"[length])
    assert allowed(b"green") == {EOS}
    assert allowed(b"gr") == set(b"e"), "a matcher that is too far starts again"
    choose(b"", ord("b"))
    assert allowed(b"b") == set(b"l")
    lost = replace(plan, sampling=replace(plan.sampling, position=np.array([request.num_prompt_tokens + 7])))
    assert states.masks(lost).failed[0].code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("{", "cannot be used"),
        ("[]", "cannot be used"),
        (schema({"type": "strnig"}), "strnig"),
        (schema({"type": "string", "enum": []}), "cannot be used"),
        (lark("start: /(/"), "cannot be used"),
        (lark('start: "a" nosuch'), "cannot be used"),
    ],
)
def test_bad_grammars_are_refused_in_a_sentence(grammar: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        byte_compiler().compile(grammar)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
    assert raised.value.message.endswith(".")
    assert "\n<non" not in raised.value.message


def test_grammars_are_kept_by_text_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    compiler = byte_compiler()
    first = compiler.compile(COLOUR)
    assert compiler.compile(COLOUR) is first
    compiler.compile(DIGITS)
    compiler.compile(COLOUR)
    compiler.compile(PERSON)
    assert compiler.compile(COLOUR) is first, "the one used last stays"
    assert len(compiler._kept) == 2


class Inbox:
    """An engine that notes what reaches it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.news = threading.Condition()

    def submit(self, requests: Sequence[Request]) -> None:
        self._note("submit", [request.request_id for request in requests])

    def abort(self, request_ids: Sequence[int]) -> None:
        self._note("abort", list(request_ids))

    def reject(self, request_ids: Sequence[int], error: RequestError) -> None:
        self._note(error.code.value, list(request_ids))

    def _note(self, name: str, request_ids: list[int]) -> None:
        with self.news:
            self.calls.append((name, request_ids))
            self.news.notify_all()

    def wait_for(self, count: int) -> list[tuple[str, list[int]]]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.calls) >= count, 60)
            return list(self.calls)


def make_gate(inbox: Inbox, states: GrammarStates) -> GrammarGate:
    return GrammarGate(inbox, byte_compiler(), states, inbox.reject)  # type: ignore[arg-type]


def test_the_gate_compiles_first_and_refuses_what_does_not_compile() -> None:
    inbox, states = Inbox(), GrammarStates(VOCAB_SIZE)
    gate = make_gate(inbox, states)
    gate.submit([make_request(1, None), make_request(2, None)])
    assert inbox.calls == [("submit", [1, 2])], "free text does not wait"
    gate.submit([make_request(3, COLOUR), make_request(4, COLOUR)])
    assert inbox.wait_for(2)[1] == ("submit", [3, 4])
    assert len(states) == 2
    gate.submit([make_request(5, "{")])
    assert inbox.wait_for(3)[2] == ("invalid_argument", [5])
    assert len(states) == 2
    gate.close()


def hold_compiler(gate: GrammarGate) -> threading.Event:
    """Nothing is compiled until the event is set."""
    held, compile_now = threading.Event(), gate._compiler.compile

    def compile_later(text: str) -> object:
        assert held.wait(60)
        return compile_now(text)

    gate._compiler.compile = compile_later  # type: ignore[method-assign,assignment]
    return held


def test_what_is_aborted_while_it_compiles_is_aborted_after_its_submission() -> None:
    inbox, states = Inbox(), GrammarStates(VOCAB_SIZE)
    gate = make_gate(inbox, states)
    held = hold_compiler(gate)
    gate.submit([make_request(7, COLOUR), make_request(8, COLOUR)])
    gate.abort([8, 9])
    assert inbox.calls == [("abort", [8, 9])]
    held.set()
    assert inbox.wait_for(3)[1:] == [("submit", [7, 8]), ("abort", [8])]
    gate.close()


def test_no_more_than_a_limit_compile_at_once() -> None:
    inbox, states = Inbox(), GrammarStates(VOCAB_SIZE)
    gate = make_gate(inbox, states)
    held = hold_compiler(gate)
    for request_id in range(MAX_COMPILING + 1):
        gate.submit([make_request(request_id, COLOUR)])
    assert inbox.calls == [("overloaded", [MAX_COMPILING])]
    held.set()
    assert len(inbox.wait_for(MAX_COMPILING + 1)) == MAX_COMPILING + 1
    gate.close()


def test_a_failing_step_leaves_nothing_behind() -> None:
    engine = Direct()
    engine.add(make_request(0, COLOUR))
    inner = engine.runner._runner
    plan = engine.scheduler.schedule()
    assert plan is not None

    class Broken:
        info = inner.info

        def forward(self, _: StepPlan) -> None:
            raise RuntimeError("broken")

    engine.runner._runner = Broken()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="broken"):
        engine.runner.forward(plan)
    engine.take(engine.scheduler.fail(plan, RequestError(ErrorCode.INTERNAL, "broken")))
    engine.runner._runner = inner
    engine.add(make_request(1, COLOUR))
    engine.run()
    assert engine.text(1) in {"red", "green", "blue"}


def test_masks_move_with_their_rows() -> None:
    engine = Direct()
    engine.add(*(make_request(i, None, prompt=2) for i in range(4)))
    plan = engine.scheduler.schedule()
    assert plan is not None
    masks = TokenMasks(np.array([1, 3]), np.array([[1], [2]], dtype=np.uint32))
    columns = replace(plan.sampling, masks=masks)
    assert columns.edited_rows().tolist() == [1, 3]
    taken = columns.take(np.array([0, 3])).masks
    assert taken is not None
    assert (taken.rows.tolist(), taken.bits.tolist()) == ([1], [[2]])


def test_masks_of_a_step_launched_ahead_wait_for_the_tokens_of_the_step_before() -> None:
    engine = Direct()
    engine.add(make_request(0, COLOUR), make_request(1, DIGITS))
    first = engine.scheduler.schedule()
    assert first is not None
    # The step after it as a deeper runner would get it: planned before the tokens of the first are known.
    position = first.sampling.position + 1
    second = replace(first, step_id=2, sampling=replace(first.sampling, position=position))
    engine.runner.forward(first)
    engine.runner.forward(second)
    tokens = engine.runner.sample(first).token_ids.tolist()
    following = engine.runner.sample(second).token_ids.tolist()
    words = {b"red", b"green", b"blue"}
    assert bytes([tokens[0], following[0]]) in {word[:2] for word in words}
    assert bytes([tokens[1], following[1]]).isdigit()


def test_a_grammar_that_ends_before_min_tokens_ends_the_answer() -> None:
    engine = Direct()
    long = make_request(0, DIGITS)
    stopping = replace(long.stopping, min_tokens=30)
    engine.add(Request(0, long.prompt_ids, long.sampling, stopping))
    engine.run()
    assert engine.errors == {}
    assert len(engine.text(0)) == 5, "it went on for as long as the grammar let it"
    assert engine.answers.tokens[0][-1] == EOS
