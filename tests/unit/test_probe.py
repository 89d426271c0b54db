"""The start probe: a few steps are timed on any runner, and the scheduler knows something at once."""

from __future__ import annotations

import numpy as np
import pytest

from rung.runner.fake import FakeRunner
from rung.scheduler import Scheduler, SchedulerConfig
from rung.server.probe import probe
from tests.scheduling import VOCAB_SIZE, alone, make_request, run_all


def config(**changes: int) -> SchedulerConfig:
    limits = {
        "num_blocks": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_waiting": 4,
        "max_model_len": 256,
    }
    return SchedulerConfig(**{**limits, **changes})


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_and_the_tokens_after_it_are_timed(depth: int) -> None:
    timed = probe(FakeRunner(32, 16, VOCAB_SIZE, depth=depth), config(depth=depth))
    assert [(shape.num_tokens, shape.num_samples) for shape, _ in timed] == [(64, 1), (1, 1), (1, 1)]
    assert all(elapsed_s > 0 for _, elapsed_s in timed)


@pytest.mark.parametrize("max_model_len", [2, 3, 4, 16])
def test_the_shortest_context_is_enough(max_model_len: int) -> None:
    assert probe(FakeRunner(1, 16, VOCAB_SIZE), config(num_blocks=1, max_model_len=max_model_len))


def test_what_it_leaves_in_memory_is_never_read() -> None:
    runner, limits = FakeRunner(32, 16, VOCAB_SIZE), config()
    scheduler = Scheduler(limits)
    for shape, elapsed_s in probe(runner, limits):
        scheduler.learn(shape, elapsed_s)
    request = make_request(1, np.zeros(40, dtype=np.int32).tolist(), max_tokens=5)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert scheduler.predicted_s(plan) > 0
    scheduler.fail_all(ValueError("not run"))
    again = make_request(2, [0] * 40, max_tokens=5)
    scheduler.add(again)
    answers = run_all(scheduler, runner)
    assert answers.tokens[2] == alone(again)
    assert answers.started[2].num_cached_tokens == 0
