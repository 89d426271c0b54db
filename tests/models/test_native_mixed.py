"""The native runner under rules, grammars and filters: the same bits alone, in a crowd, after preemption."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rung.grammar.runner import GrammarRunner
from rung.grammar.states import GrammarStates
from rung.request import Request, SamplingParams, StoppingParams
from rung.runner.native import NativeRunner
from tests.grammar_files import EOS, VOCAB_SIZE, byte_compiler, lark, schema
from tests.models.driver import Answer, Run, drive
from tests.native_models import RandomWeights, shaped
from tests.sampling_oracle import PlainRules

CONFIG = shaped(vocab_size=VOCAB_SIZE)
WEIGHTS = RandomWeights(CONFIG, "Q8_0")
COMPILER = byte_compiler()
PLAIN = SamplingParams(temperature=0.0, top_logprobs=2)
RANDOM = SamplingParams(temperature=0.8, seed=4, top_p=0.95, top_logprobs=0)
KINDS = [
    PLAIN,
    RANDOM,
    replace(RANDOM, min_p=0.05),
    replace(RANDOM, typical_p=0.7, top_k=40),
    replace(PLAIN, rules=PlainRules(repetition_penalty=1.4, frequency_penalty=0.3).built()),
    replace(RANDOM, rules=PlainRules(bias={65: 5.0}, bad_words=((66,), (65, 65))).built()),
    replace(RANDOM, grammar=schema({"type": "object", "additionalProperties": {"type": "integer"}})),
    replace(PLAIN, grammar=lark("start: /[a-z]{4,9}( [0-9]{2,5}){1,3}/"), prompt_top_logprobs=1),
]


def make_request(request_id: int) -> Request:
    generator = np.random.default_rng(request_id)
    prompt_ids = generator.integers(0, 256, 5 + 9 * (request_id % 5)).astype(np.int32)
    stopping = StoppingParams(max_tokens=30, stop_token_ids=frozenset({EOS}))
    return Request(request_id, prompt_ids, KINDS[request_id % len(KINDS)], stopping)


def run(request_ids: list[int], **schedule: int) -> Run:
    states = GrammarStates(VOCAB_SIZE)
    runner = GrammarRunner(
        NativeRunner(CONFIG, WEIGHTS, num_blocks=128, block_size=16, num_threads=2, poison_freed=True), states
    )
    requests = [make_request(request_id) for request_id in request_ids]
    for request in requests:
        if request.sampling.grammar is not None:
            states.add([request], COMPILER.compile(request.sampling.grammar))
    done = drive(runner, requests, **schedule)
    runner.close()
    return done


def bits(answer: Answer) -> tuple[object, ...]:
    assert answer.error is None
    rows = [(row.chosen, row.top_ids.tobytes(), row.top_logprobs.tobytes()) for row in answer.logprobs]
    prompts = b"".join(part.chosen.tobytes() + part.top_logprobs.tobytes() for part in answer.prompts)
    return answer.token_ids, rows, prompts, answer.reason


def test_a_crowd_of_all_kinds_gets_the_bits_that_each_gets_alone() -> None:
    request_ids = list(range(16))
    alone = [bits(run([request_id]).answers[0]) for request_id in request_ids]
    crowd = run(request_ids, max_num_batched_tokens=64)
    assert [bits(answer) for answer in crowd.answers] == alone
    cramped = run(request_ids, max_num_batched_tokens=64, num_blocks=14)
    assert [bits(answer) for answer in cramped.answers] == alone
    texts = [bytes(answer.token_ids[:-1]) for answer in crowd.answers[7::8] if answer.token_ids[-1] == EOS]
    assert all(text[:4].isalpha() for text in texts)
