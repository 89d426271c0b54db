"""Small makers and comparisons for tests that drive a scheduler with the fake runner."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rung.errors import RequestError
from rung.request import Request, SamplingParams, StoppingParams
from rung.runner.fake import FakeRunner, expected_tokens
from rung.scheduler import Scheduler, SchedulerConfig
from rung.scheduler.batch import StepOutput
from rung.scheduler.policies import PolicyConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rung.scheduler.batch import StepEvents, StepPlan

VOCAB_SIZE = 61
# Lets in whatever begins to fit, so that rows that grow have to displace others.
CARELESS = PolicyConfig(admission="first-chunk", victims="youngest", lanes="one", chunks="fixed")
MAX_STEPS = 10_000


def make_request(
    request_id: int,
    prompt: int | Iterable[int] = 5,
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    stop: Iterable[int] = (),
    priority: int = 0,
    deadline_s: float | None = None,
    salt: bytes = b"",
    group: int = -1,
    **sampling: float | int | None,
) -> Request:
    """A greedy request; a number as `prompt` makes that many ids, different for each request id."""
    if isinstance(prompt, int):
        prompt = [(request_id * 7 + position * 3) % VOCAB_SIZE for position in range(prompt)]
    return Request(
        request_id,
        np.array(list(prompt), dtype=np.int32),
        SamplingParams(**{"temperature": 0.0, **sampling}),
        StoppingParams(max_tokens, min_tokens, frozenset(stop)),
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=salt,
        group_id=group,
    )


def make_scheduler(**changes: Any) -> Scheduler:
    """A scheduler of 32 blocks of 4 tokens, with the named limits changed."""
    limits = {
        "num_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_waiting": 32,
        "max_model_len": 64,
    }
    return Scheduler(SchedulerConfig(**{**limits, **changes}))


def make_runner(scheduler: Scheduler) -> FakeRunner:
    """A fake runner with the scheduler's blocks."""
    config = scheduler.config
    return FakeRunner(config.num_blocks, config.block_size, VOCAB_SIZE, depth=config.depth)


def alone(request: Request) -> list[int]:
    """The answer that the request must get, whatever else runs."""
    return expected_tokens(
        request.prompt_ids.tolist(),
        request.stopping.max_tokens,
        vocab_size=VOCAB_SIZE,
        seed=request.sampling.seed,
        sample_index=request.sampling.sample_index,
        temperature=request.sampling.temperature,
        stop_token_ids=request.stopping.stop_token_ids,
        min_tokens=request.stopping.min_tokens,
    )


def step(scheduler: Scheduler, runner: FakeRunner, elapsed_s: float = 1.0) -> tuple[StepPlan, StepEvents]:
    """Plan, run and commit one step of a scheduler that has work."""
    plan = scheduler.schedule()
    assert plan is not None
    runner.forward(plan)
    events = scheduler.commit(plan, runner.sample(plan), elapsed_s)
    scheduler.check_integrity()
    return plan, events


class Answers:
    """Collects events per request and checks their order: started, tokens, one finished."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.started: dict[int, object] = {}
        self.finished: dict[int, object] = {}

    def take(self, events: StepEvents) -> None:
        for started in events.started:
            assert started.request_id not in self.started
            assert started.request_id not in self.finished
            self.started[started.request_id] = started
        for request_id, token_id in zip(events.request_ids.tolist(), events.token_ids.tolist(), strict=True):
            assert request_id in self.started
            assert request_id not in self.finished
            self.tokens.setdefault(request_id, []).append(token_id)
        for finished in events.finished:
            assert finished.request_id not in self.finished
            self.finished[finished.request_id] = finished


def run_all(scheduler: Scheduler, runner: FakeRunner, answers: Answers | None = None) -> Answers:
    """Step until nothing is left, adding to `answers` if there were steps before."""
    answers = answers or Answers()
    for _ in range(MAX_STEPS):
        if not scheduler.has_work:
            return answers
        answers.take(step(scheduler, runner)[1])
    raise AssertionError(f"requests were still unfinished after {MAX_STEPS} steps")


def assert_same(one: object, other: object) -> None:
    """Deep equality of the plain values over arrays that schedulers and runners exchange."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    elif is_dataclass(one):
        for item in fields(one):
            assert_same(getattr(one, item.name), getattr(other, item.name))
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, RequestError):
        assert (one.code, one.message) == (other.code, other.message)
    else:
        assert one == other


def lens(plan: StepPlan) -> dict[int, int]:
    """Tokens that each request computes in a plan."""
    return dict(zip(plan.request_ids.tolist(), plan.query_lens.tolist(), strict=True))


def sampled(plan: StepPlan) -> list[int]:
    """Requests that get a token in a plan."""
    return plan.request_ids[plan.sample_rows].tolist()


def output(plan: StepPlan, token_id: int = 1, **parts: Any) -> StepOutput:
    """What a runner that chooses the same id for every row gives."""
    token_ids = np.full(len(plan.sample_rows), token_id, dtype=np.int32)
    return StepOutput(**{"token_ids": token_ids, "logprobs": {}, "failed": {}, **parts})
