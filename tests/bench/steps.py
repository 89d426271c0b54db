"""Times steps of the native runner on plans of the real scheduler: no engine loop, no sockets."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from rung.scheduler import Scheduler, SchedulerConfig
from rung.scheduler.batch import StepOutput
from rung.scheduler.policies import PolicyConfig
from tests.models.driver import request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.runner.native import NativeRunner
    from rung.scheduler.batch import StepPlan

MAX_NUM_BATCHED_TOKENS = 512
# Requests that the scheduler starts in one step, at most.
TOUCHED_PER_STEP = 64
WARM_STEPS = 2
MIN_STEPS = 5
MAX_STEPS = 64


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by where they went.

    linear, attention, head, rest: inside the kernels.
    sampling: `sample` without the head: its Python, the boundary, and drawing on the host.
    calls:    `forward` without its kernels: its Python and the boundary.
    schedule: `schedule` and `commit` of the scheduler.
    """

    linear: float
    attention: float
    head: float
    rest: float
    sampling: float
    calls: float
    schedule: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.linear + self.attention + self.head + self.rest + self.host

    @property
    def host(self) -> float:
        """Outside the kernels."""
        return self.sampling + self.calls + self.schedule


@dataclass(frozen=True)
class PrefillTime:
    """Medians over `num_runs` prompts."""

    time: StepTime
    num_runs: int


@dataclass(frozen=True)
class DecodeTime:
    """Medians over `num_steps` steps; `num_keys`: positions whose KV a step read, all rows together."""

    time: StepTime
    num_steps: int
    num_keys: float


def median_time(times: Sequence[StepTime]) -> StepTime:
    """The median of each part."""
    return StepTime(**{item.name: median(getattr(t, item.name) for t in times) for item in fields(StepTime)})


def run_step(runner: NativeRunner, scheduler: Scheduler) -> tuple[StepTime, StepPlan]:
    """The next step, timed."""
    runner.take_times()
    start = time.perf_counter()
    plan = scheduler.schedule()
    scheduled = time.perf_counter()
    if plan is None:
        raise RuntimeError("the scheduler has nothing left to run")
    runner.forward(plan)
    forwarded = time.perf_counter()
    kernels = runner.take_times()
    sample_start = time.perf_counter()
    output = runner.sample(plan)
    sampled = time.perf_counter()
    head = runner.take_times()
    commit_start = time.perf_counter()
    scheduler.commit(plan, output, elapsed_s=0.0)
    committed = time.perf_counter()
    if output.failed:
        raise next(iter(output.failed.values()))
    step = StepTime(
        linear=kernels["linear"] / 1e9,
        attention=kernels["attention"] / 1e9,
        head=(kernels["head"] + head["head"]) / 1e9,
        rest=kernels["rest"] / 1e9,
        sampling=sampled - sample_start - sum(head.values()) / 1e9,
        calls=forwarded - scheduled - sum(kernels.values()) / 1e9,
        schedule=scheduled - start + committed - commit_start,
    )
    return step, plan


def time_prefill(runner: NativeRunner, prompt_ids: Sequence[int], *, seconds: float) -> PrefillTime:
    """One prompt alone in chunks of `MAX_NUM_BATCHED_TOKENS`, to its first token."""
    prefill_once(runner, prompt_ids[:MAX_NUM_BATCHED_TOKENS])
    times: list[StepTime] = []
    while sum(run.total for run in times) < seconds and len(times) < MAX_STEPS:
        times.append(prefill_once(runner, prompt_ids))
    return PrefillTime(median_time(times), len(times))


def prefill_once(runner: NativeRunner, prompt_ids: Sequence[int]) -> StepTime:
    """The sum of a prompt's steps."""
    scheduler = make_scheduler(runner, 1, len(prompt_ids) + 1, MAX_NUM_BATCHED_TOKENS)
    scheduler.add(request(0, prompt_ids, max_tokens=1, top_logprobs=None))
    steps = []
    while scheduler.has_work:
        steps.append(run_step(runner, scheduler)[0])
    return StepTime(**{item.name: sum(getattr(t, item.name) for t in steps) for item in fields(StepTime)})


def time_decode(
    runner: NativeRunner, prompts: Sequence[Sequence[int]], *, temperature: float, seconds: float
) -> DecodeTime:
    """Steps of one token per row behind prompts of one length.

    The prompts are planned and not computed: what a key or a value is does not change how long a
    step takes, as long as `touch_blocks` has given it memory. Every timed step runs in full.
    """
    num_rows, context = len(prompts), len(prompts[0])
    max_tokens = 1 + WARM_STEPS + MAX_STEPS
    scheduler = make_scheduler(runner, num_rows, context + max_tokens, num_rows * context)
    scheduler.add(
        *(
            request(row, ids, max_tokens=max_tokens, top_logprobs=None, temperature=temperature, seed=row)
            for row, ids in enumerate(prompts)
        )
    )
    plan = scheduler.schedule()
    if plan is None or len(plan.sample_rows) != num_rows:
        raise RuntimeError("the KV memory does not hold these rows at once")
    scheduler.commit(plan, StepOutput(np.zeros(num_rows, dtype=np.int32), {}, {}), elapsed_s=0.0)
    for _ in range(WARM_STEPS):
        run_step(runner, scheduler)
    times: list[StepTime] = []
    num_keys: list[int] = []
    start = time.perf_counter()
    while len(times) < MAX_STEPS and (len(times) < MIN_STEPS or time.perf_counter() - start < seconds):
        step, plan = run_step(runner, scheduler)
        times.append(step)
        num_keys.append(int(plan.num_computed.sum()) + plan.num_tokens)
    return DecodeTime(median_time(times), len(times), median(num_keys))


def touch_blocks(runner: NativeRunner) -> None:
    """Write a token into every KV block: memory that was never written is read from one page."""
    scheduler = make_scheduler(runner, TOUCHED_PER_STEP, 2, TOUCHED_PER_STEP)
    scheduler.add(*(request(row, [row], max_tokens=1) for row in range(TOUCHED_PER_STEP)))
    plan = scheduler.schedule()
    if plan is None or plan.num_rows != TOUCHED_PER_STEP:
        raise RuntimeError("the KV memory does not hold a block for each token of a step")
    num_blocks = runner.info.num_blocks
    for first in range(0, num_blocks, plan.num_rows):
        blocks = np.arange(first, first + plan.num_rows, dtype=np.int32) % num_blocks
        runner.forward(replace(plan, block_tables=blocks[:, None]))


def make_scheduler(
    runner: NativeRunner, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
) -> Scheduler:
    """A scheduler over all of the runner's blocks."""
    return Scheduler(
        SchedulerConfig(
            num_blocks=runner.info.num_blocks,
            block_size=runner.info.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_num_seqs,
            max_model_len=max_model_len,
            # Steps as large as they are asked for: what is measured is the runner.
            policies=PolicyConfig(
                chunks="fixed", lanes="one", admission="first-chunk", fixed_step_tokens=1 << 30
            ),
        )
    )
