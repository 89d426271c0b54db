"""Times a few steps before anybody waits for them: what the scheduler knows of the machine at first."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rung.request import Request, SamplingParams, StoppingParams
from rung.scheduler import Scheduler
from rung.scheduler.scheduler import shape_of

if TYPE_CHECKING:
    from rung.runner.protocol import Runner
    from rung.scheduler import SchedulerConfig
    from rung.scheduler.predictor import StepShape

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 3


def probe(runner: Runner, config: SchedulerConfig) -> list[tuple[StepShape, float]]:
    """Steps that the runner has run, and the seconds that each took.

    One short prompt and a few tokens after it, through a scheduler of its own. Nothing of it is left
    but numbers in blocks that belong to nobody.
    """
    scheduler = Scheduler(replace(config, prefix_cache=False, depth=1))
    room = min(config.max_model_len, config.num_blocks * config.block_size)
    num_prompt = max(1, min(PROMPT_TOKENS, room - OUTPUT_TOKENS))
    scheduler.add(
        Request(
            0,
            np.zeros(num_prompt, dtype=np.int32),
            SamplingParams(temperature=0.0),
            StoppingParams(max_tokens=min(OUTPUT_TOKENS, room - num_prompt)),
        )
    )
    timed = []
    while (plan := scheduler.schedule()) is not None:
        start_s = time.monotonic()
        runner.forward(plan)
        output = runner.sample(plan).wait()
        timed.append((shape_of(plan), time.monotonic() - start_s))
        scheduler.commit(plan, output, timed[-1][1])
    return timed
