"""Rules, grammars, prompt logprobs and plain rows in one engine, with steps in flight, aborts and preemption:
each request gets what it gets alone."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rung.engine import Engine, StepTiming
from rung.errors import ErrorCode, RequestError
from rung.grammar.runner import GrammarRunner
from rung.grammar.states import GrammarStates
from rung.request import FinishReason, Request, SamplingParams, StoppingParams
from rung.runner.fake import FakeRunner, expected_prompt_logprobs
from rung.scheduler.batch import StepEvents
from tests.grammar_files import EOS, VOCAB_SIZE, byte_compiler, lark, schema
from tests.sampling_oracle import PlainRules
from tests.scheduling import CARELESS, Answers, make_scheduler

GRAMMARS = [
    schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    lark('start: ("red" | "green" | "blue") /[0-9]{4}/'),
    # Runs into the limits of a step.
    lark('start: "a" start'),
]
RULES = [
    PlainRules(repetition_penalty=1.5, frequency_penalty=0.5),
    PlainRules(bad_words=((7,), (1, 2)), presence_penalty=1.0, allowed_ids=tuple(range(40))),
]
TIMEOUT_S = 60


def kinds() -> list[SamplingParams]:
    """One of each, and some at once."""
    plain = SamplingParams(temperature=0.0)
    random = SamplingParams(temperature=1.0, seed=3)
    return [
        plain,
        replace(random, top_logprobs=2),
        replace(plain, rules=RULES[0].built()),
        replace(random, grammar=GRAMMARS[0]),
        replace(plain, prompt_top_logprobs=1),
        replace(random, rules=RULES[1].built(), prompt_top_logprobs=0),
        replace(plain, grammar=GRAMMARS[1], rules=RULES[0].built(), prompt_top_logprobs=2),
        replace(random, grammar=GRAMMARS[2]),
    ]


def make_request(request_id: int) -> Request:
    sampling = kinds()[request_id % len(kinds())]
    prompt = [(request_id * 11 + place * 5) % 256 for place in range(3 + request_id % 9)]
    stopping = StoppingParams(max_tokens=24, min_tokens=2 * (request_id % 3), stop_token_ids=frozenset({EOS}))
    return Request(request_id, np.array(prompt, dtype=np.int32), sampling, stopping)


class Listener:
    """What an engine tells; aborts some requests on the way."""

    def __init__(self, num_requests: int, aborts: dict[int, int]) -> None:
        self.answers = Answers()
        self.prompts: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.aborts = aborts
        self.num_requests = num_requests
        self.done = threading.Event()
        self.engine: Engine | None = None

    def take(self, events: StepEvents, _: StepTiming) -> None:
        for request_id, part in events.prompts:
            assert request_id not in self.answers.tokens, "prompts come before the first token"
            self.prompts[request_id] += zip(part.chosen.tolist(), part.ranks.tolist(), strict=True)
        self.answers.take(events)
        for request_id in set(events.request_ids.tolist()):
            if len(self.answers.tokens[request_id]) == self.aborts.get(request_id):
                assert self.engine is not None
                self.engine.abort([request_id])
        if len(self.answers.finished) == self.num_requests:
            self.done.set()


def run(requests: list[Request], aborts: dict[int, int], **limits: int) -> tuple[Listener, int]:
    """All requests through a real engine; returns what it told, and how often it preempted."""
    scheduler = make_scheduler(policies=CARELESS, max_num_seqs=6, max_num_batched_tokens=12, **limits)
    config = scheduler.config
    states = GrammarStates(VOCAB_SIZE)
    inner = FakeRunner(config.num_blocks, config.block_size, VOCAB_SIZE, depth=config.depth)
    runner = GrammarRunner(inner, states)
    listener = Listener(len(requests), aborts)
    deaths: list[Exception] = []
    engine = Engine(
        scheduler,
        runner,
        states.forgetting_ended(listener.take),
        on_rejected=lambda *rejected: deaths.append(AssertionError(rejected)),
        on_dead=deaths.append,
        check_integrity=True,
    )
    listener.engine = engine
    compiler = byte_compiler()
    for request in requests:
        if request.sampling.grammar is not None:
            states.add([request], compiler.compile(request.sampling.grammar))
        engine.submit([request])
    loop = threading.Thread(target=engine.run)
    loop.start()
    assert listener.done.wait(TIMEOUT_S), deaths
    engine.stop()
    loop.join()
    runner.close()
    assert deaths == []
    assert len(states) == 0
    return listener, scheduler.stats().preemptions_total


@pytest.mark.parametrize("depth", [1, 2])
def test_each_request_gets_what_it_gets_alone(depth: int) -> None:
    requests = [make_request(index) for index in range(24)]
    aborts = {index: 1 + index % 4 for index in (1, 6, 11, 13)}
    crowd, preemptions = run(requests, aborts, depth=depth, num_blocks=18, max_waiting=64)
    assert preemptions > 0
    for index, request in enumerate(requests):
        single, _ = run([make_request(index)], {})
        tokens, alone = crowd.answers.tokens.get(index, []), single.answers.tokens.get(index, [])
        end, end_alone = crowd.answers.finished[index], single.answers.finished[index]
        if index in aborts and end.reason is FinishReason.CANCELLED:
            assert tokens == alone[: len(tokens)]
            assert len(tokens) >= aborts[index]
        else:
            assert tokens == alone
            assert end.reason is end_alone.reason
        expected = expected_prompt_logprobs(request.prompt_ids.tolist(), VOCAB_SIZE)
        wanted = request.sampling.prompt_top_logprobs is not None
        assert crowd.prompts[index] == (expected if wanted else [])
        if request.sampling.grammar == GRAMMARS[2]:
            assert isinstance(end.error, RequestError)
            assert end.error.code is ErrorCode.INVALID_ARGUMENT
