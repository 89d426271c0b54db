"""The default model under a JSON schema: its answers parse, satisfy the schema and end by themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from rung.grammar.compiler import GrammarCompiler
from rung.grammar.runner import GrammarRunner
from rung.grammar.states import GrammarStates
from rung.request import FinishReason, Request, SamplingParams, StoppingParams
from rung.runner.native import NativeRunner
from tests.models.driver import drive

if TYPE_CHECKING:
    from rung.models.loader import OpenModel

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "<|im_start|>user\nDescribe a person as JSON.<|im_end|>\n<|im_start|>assistant\n"


def test_answers_satisfy_the_schema_and_end(smollm2: OpenModel) -> None:
    metadata = smollm2.metadata
    text = metadata.tokenizer.files["tokenizer.json"].decode()
    tokenizer = Tokenizer.from_str(text)
    vocab_size, eos = metadata.config.vocab_size, metadata.tokenizer.eos_token_ids
    grammar = json.dumps({"grammars": [{"json_schema": PERSON}]})
    prompt_ids = np.array(tokenizer.encode(PROMPT).ids, dtype=np.int32)
    stopping = StoppingParams(max_tokens=160, stop_token_ids=frozenset(eos))
    sampling = SamplingParams(temperature=0.0, grammar=grammar)
    requests = [
        Request(index, prompt_ids, replace(sampling, temperature=temperature, seed=index), stopping)
        for index, temperature in enumerate((0.0, 0.8, 0.8, 1.2))
    ]
    states = GrammarStates(vocab_size)
    states.add(requests, GrammarCompiler(text, vocab_size, eos).compile(grammar))
    runner = GrammarRunner(
        NativeRunner(metadata.config, smollm2.weights, num_blocks=64, block_size=16, num_threads=2), states
    )
    for answer in drive(runner, requests).answers:
        assert answer.reason is FinishReason.STOP
        person = json.loads(tokenizer.decode(answer.token_ids))
        assert set(person) == set(PERSON["required"])
        assert len(person["name"]) <= 20
        assert 0 <= person["age"] <= 120
        assert all(len(tag) <= 10 for tag in person["tags"])
        assert len(person["tags"]) <= 3
    runner.close()
