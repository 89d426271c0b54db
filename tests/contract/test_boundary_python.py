"""Every field of the protocol does something on the engine's side: read where it comes in, filled where
it goes out. A field that is added to the .proto files fails here until it does.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rung.engine import Heartbeat, StepTiming
from rung.errors import ErrorCode, RequestError
from rung.models.config import DefaultSampling
from rung.request import Finished, FinishReason, Started
from rung.scheduler.batch import LogprobRow, PromptLogprobs, SchedulerStats, StepEvents
from rung.server import convert
from rung.server.gen import engine_pb2, generation_pb2, model_pb2, step_pb2
from rung.server.outbox import Publisher, Rejection, request_id
from rung.server.session import Session
from tests.unit.engine_fixture import make_facts, u32

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

    from rung.request import Request

FACTS = replace(make_facts(), supports_grammar=True)

# One other value per field of a Submit, and what of the request must show it.
SUBMIT_CHANGES = {
    "handles": [9],
    "prompt_ids": u32([5, 6]),
    "sampling.temperature": 0.5,
    "sampling.top_k": 3,
    "sampling.top_p": 0.5,
    "sampling.seed": 8,
    "sampling.min_p": 0.5,
    "sampling.typical_p": 0.5,
    "sampling.repetition_penalty": 1.5,
    "sampling.frequency_penalty": 0.5,
    "sampling.presence_penalty": 0.5,
    "sampling.logit_bias_ids": u32([3]),
    "sampling.logit_bias_values": np.array([2.0], dtype="<f4").tobytes(),
    "sampling.allowed_token_ids": u32([3]),
    "sampling.bad_words.token_ids": u32([3]),
    "grammar.llguidance": "{}",
    "stopping.max_tokens": 5,
    "stopping.min_tokens": 2,
    "stopping.stop_token_ids": [4],
    "stopping.ignore_eos": True,
    "logprobs.top_n": 3,
    "logprobs.prompt_top_n": 2,
    "priority": 2,
    "deadline_ms": 1500,
    "cache_salt": b"tenant",
}


def leaf_fields(message: Descriptor, prefix: str = "") -> set[str]:
    """Dotted names of all fields below a message that hold no message themselves."""
    names = set()
    for field in message.fields:
        if field.message_type is not None:
            names |= leaf_fields(field.message_type, f"{prefix}{field.name}.")
        else:
            names.add(prefix + field.name)
    return names


def filled_fields(message: Message, prefix: str = "") -> set[str]:
    """Dotted names of the leaf fields that hold anything but their default."""
    names = set()
    for field, value in message.ListFields():
        if field.message_type is None:
            names.add(prefix + field.name)
            continue
        for item in value if isinstance(value, (list, tuple)) or hasattr(value, "append") else [value]:
            names |= filled_fields(item, f"{prefix}{field.name}.")
    return names


def base_submit() -> generation_pb2.Submit:
    return generation_pb2.Submit(
        handles=[1],
        prompt_ids=u32([1, 2, 3]),
        sampling=generation_pb2.Sampling(seed=1),
        stopping=generation_pb2.Stopping(max_tokens=10),
    )


def shown(request: Request) -> tuple[object, ...]:
    rules = request.sampling.rules
    return (
        request.request_id,
        request.prompt_ids.tolist(),
        replace(request.sampling, rules=None),
        None if rules is None else [str(getattr(rules, item.name)) for item in fields(rules)],
        request.stopping,
        request.priority,
        request.deadline_s,
        request.cache_salt,
    )


def test_the_table_names_every_field_of_a_submit() -> None:
    assert leaf_fields(generation_pb2.Submit.DESCRIPTOR) == set(SUBMIT_CHANGES)


@pytest.mark.parametrize("field", SUBMIT_CHANGES)
def test_no_field_of_a_submit_is_ignored(field: str) -> None:
    submit = base_submit()
    if field.startswith("sampling.logit_bias"):
        # One is nothing without the other.
        submit.sampling.logit_bias_ids = u32([1])
        submit.sampling.logit_bias_values = np.array([1.0], dtype="<f4").tobytes()
    (before,) = convert.to_requests(submit, [1], 1, FACTS)
    target: Message = submit
    *parents, name = field.split(".")
    for parent in parents:
        target = getattr(target, parent)
        if hasattr(target, "add"):
            target = target.add()
    value = SUBMIT_CHANGES[field]
    if isinstance(value, list):
        del getattr(target, name)[:]
        getattr(target, name).extend(value)
    else:
        setattr(target, name, value)
    (after,) = convert.to_requests(submit, convert.submit_handles(submit), 1, FACTS)
    assert shown(before) != shown(after)


class StillEngine:
    """An engine that takes everything and does nothing."""

    def submit(self, requests: object) -> None:
        pass

    def abort(self, request_ids: object) -> None:
        pass

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(1, 2, 3, SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9))


def test_every_field_of_an_answer_is_filled_by_something() -> None:
    publisher = Publisher()
    session = Session(1, StillEngine(), FACTS, publisher, lambda: None)
    row = LogprobRow(-0.5, np.array([3], dtype=np.int32), np.array([-0.5], dtype=np.float32))
    prompt = PromptLogprobs(row.top_logprobs, row.top_ids, row.top_ids[None], row.top_logprobs[None])
    error = RequestError(ErrorCode.OVERLOADED, "Full.")
    publisher.reject([request_id(1, 9)], error)
    publisher.publish(
        StepEvents(
            request_ids=np.array([request_id(1, 5)], dtype=np.int64),
            token_ids=np.array([3], dtype=np.int32),
            logprobs={0: row},
            started=(Started(request_id(1, 5), 4, 2, 0.5, 0.25),),
            finished=(
                Finished(request_id(1, 5), FinishReason.STOP, 4, 1, stop_token_id=3),
                Finished(request_id(1, 6), FinishReason.ERROR, 4, 0, error=error),
            ),
            prompts=((request_id(1, 5), prompt),),
        ),
        StepTiming(1, 2, 3, 4, 5, 6, 7),
    )
    filled = set().union(*(filled_fields(response) for response in session.responses()))
    assert filled == leaf_fields(engine_pb2.SessionResponse.DESCRIPTOR)


def test_every_field_of_the_description_is_filled() -> None:
    facts = make_facts()
    default = DefaultSampling(0.5, top_k=4, top_p=0.9, min_p=0.1, typical_p=0.8, repetition_penalty=1.1)
    object.__setattr__(facts.model, "default_sampling", default)
    recommended = {f"model.default_sampling.{item.name}" for item in fields(default)}
    expected = {
        name
        for name in leaf_fields(model_pb2.DescribeResponse.DESCRIPTOR)
        if not name.startswith("model.default_sampling.") or name in recommended
    }
    assert filled_fields(convert.describe(facts)) == expected


def test_capabilities_say_what_the_runner_can() -> None:
    facts = replace(FACTS)
    switched = {"batch_invariant": model_pb2.CAPABILITY_BATCH_INVARIANT}
    switched |= {"prefix_cache": model_pb2.CAPABILITY_PREFIX_CACHE}
    switched |= {"supports_grammar": model_pb2.CAPABILITY_GRAMMAR}
    everything = set(convert.describe(facts).capabilities)
    assert everything >= {model_pb2.CAPABILITY_LOGPROBS, model_pb2.CAPABILITY_PRIORITY, *switched.values()}
    for field, capability in switched.items():
        object.__setattr__(facts, field, False)
        assert set(convert.describe(facts).capabilities) == everything - {capability}
        object.__setattr__(facts, field, True)


def test_a_rejection_names_its_handles() -> None:
    response = convert.rejected(Rejection((1, 2**32 - 1), RequestError(ErrorCode.DRAINING, "No.")))
    assert response.rejected.handles == u32([1, 2**32 - 1])
    assert response.rejected.error == step_pb2.EngineError(
        code=step_pb2.ENGINE_ERROR_CODE_DRAINING, message="No.", retryable=True
    )
