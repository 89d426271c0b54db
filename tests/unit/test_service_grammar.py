"""Grammars and prompt logprobs over a real connection: bad ones refused, neighbours untouched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rung.runner.fake import expected_prompt_logprobs, expected_tokens
from rung.server.gen import generation_pb2, step_pb2
from tests.grammar_files import EOS, lark, schema
from tests.unit.engine_fixture import VOCAB_SIZE, Client, make_facts, make_submit, running_engine

SMALL = schema(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        running_engine(replace(make_facts(), supports_grammar=True)) as running,
        Client(running.address) as one,
    ):
        yield one


def following(handles: list[int], grammar: str, **changes: object) -> generation_pb2.Submit:
    submit = make_submit(handles, stop_token_ids=[EOS], max_tokens=60, **changes)  # type: ignore[arg-type]
    submit.grammar.llguidance = grammar
    return submit


def test_answers_follow_their_grammar_beside_free_ones(client: Client) -> None:
    client.submit(following([1, 2], SMALL, temperature=1.0, seed=6))
    client.submit(make_submit([3], [5, 6], max_tokens=9))
    first, second, free = client.read_until_ended(1, 2, 3)
    for row in (first, second):
        assert row.tokens[-1] == EOS
        assert json.loads(bytes(row.tokens[:-1])) in ({"a": "x"}, {"a": "y"})
    assert free.tokens == expected_tokens([5, 6], 9, vocab_size=VOCAB_SIZE)


def test_b01_a_bad_grammar_is_rejected_and_its_neighbours_go_on(client: Client) -> None:
    client.submit(make_submit([1], [5, 6], max_tokens=9))
    client.submit(following([2], schema({"type": "strnig"})))
    client.submit(following([3], "not even JSON"))
    client.submit(following([4], lark('start: "ok"')))
    rows = client.read_until_ended(1, 2, 3, 4)
    assert rows[0].tokens == expected_tokens([5, 6], 9, vocab_size=VOCAB_SIZE)
    for row in rows[1:3]:
        assert row.rejected is not None
        assert row.rejected.code == step_pb2.ENGINE_ERROR_CODE_INVALID_ARGUMENT
        assert not row.rejected.retryable
    assert bytes(rows[3].tokens[:-1]) == b"ok"


def test_a_request_that_is_aborted_while_its_grammar_compiles_still_gets_its_end(client: Client) -> None:
    properties = {f"field_{index}": {"type": "string", "pattern": "^[a-z]{2,9}$"} for index in range(300)}
    client.submit(following([1], schema({"type": "object", "properties": properties})))
    client.abort(1)
    (row,) = client.read_until_ended(1)
    assert row.finished is not None
    assert row.finished.reason == step_pb2.FINISH_REASON_CANCELLED


def test_b21_a_pathological_grammar_costs_its_own_request_alone(client: Client) -> None:
    client.submit(make_submit([1], [5, 6], max_tokens=40))
    properties = {f"field_{index}": {"type": "string"} for index in range(3500)}
    pathological = [
        lark("start: /((a?){30}){30}(a{1,500}){1,500}/"),
        lark('start: "a" start'),
        schema({"type": "object", "properties": properties}),
        schema({"$ref": "#"}),
        schema({"type": "string", "minLength": 1_000_000}),
    ]
    handles = list(range(2, 2 + len(pathological)))
    for handle, grammar in zip(handles, pathological, strict=True):
        client.submit(following([handle], grammar))
    client.submit(following([20], SMALL))
    rows = client.read_until_ended(1, *handles, 20)
    assert rows[0].tokens == expected_tokens([5, 6], 40, vocab_size=VOCAB_SIZE)
    assert json.loads(bytes(rows[-1].tokens[:-1]))["a"] in {"x", "y"}
    for row in rows[1:-1]:
        error = row.rejected
        if row.finished is not None and row.finished.HasField("error"):
            error = row.finished.error
        assert error is None or error.message.endswith(".")


def test_prompt_logprobs_come_under_the_first_handle(client: Client) -> None:
    prompt = [place * 3 % 256 for place in range(150)]
    submit = make_submit([1, 2], prompt, max_tokens=3, top_n=0)
    submit.logprobs.prompt_top_n = 2
    client.submit(submit)
    client.read_until_ended(1, 2)
    told: list[tuple[float, int]] = []
    for step in client.fold.steps:
        columns = step.prompt_logprobs
        if not step.HasField("prompt_logprobs"):
            continue
        assert np.frombuffer(columns.handles, "<u4").tolist() == [1]
        (count,) = np.frombuffer(columns.counts, "<u4").tolist()
        chosen, ranks = np.frombuffer(columns.chosen, "<f4"), np.frombuffer(columns.ranks, "<u4")
        assert len(chosen) == count
        assert np.frombuffer(columns.top_counts, "<u4").tolist() == [2] * count
        told += zip(chosen.tolist(), ranks.tolist(), strict=True)
    assert told == expected_prompt_logprobs(prompt, VOCAB_SIZE)
