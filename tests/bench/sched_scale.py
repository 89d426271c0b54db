"""What a step costs on the host: `python -m tests.bench.sched_scale`.

Scheduling and commit of steady decode steps beside a bare Python loop over as many rows, and the
whole scheduler under a crowd: 256 running, 2,000 waiting, a million blocks, requests that come and
go, prefixes that are found and such that are not. No runner. Times are those that this thread had
the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from rung.request import Request, SamplingParams, StoppingParams
from rung.scheduler import Scheduler, SchedulerConfig
from rung.scheduler.batch import StepOutput, StepPlan

ROWS = (1, 16, 64, 256)
STEADY_STEPS = 600
CROWD_STEPS = 2000
CROWD_BLOCKS, CROWD_WAITING = 1 << 20, 2000


@dataclass(slots=True)
class _Row:
    request_id: int
    num_tokens: int
    num_computed: int
    last_token: int


def output(plan: StepPlan) -> StepOutput:
    """Any tokens."""
    return StepOutput(np.full(len(plan.sample_rows), 7, dtype=np.int32), {}, {})


def request(request_id: int, rng: np.random.Generator, prompt: int, answer: int, head: int = 0) -> Request:
    """A greedy request whose prompt may begin with a common head."""
    ids = rng.integers(0, 30_000, prompt).astype(np.int32)
    ids[:head] = np.arange(head)
    return Request(request_id, ids, SamplingParams(temperature=0.0), StoppingParams(answer))


def bare_loop_us(num_rows: int) -> float:
    """Microseconds of the shortest Python loop that makes four columns of a plan, row by row.

    Nothing is decided, checked or sampled: it is what a scheduler without columns could not go below.
    """
    rows = [_Row(index, 40 + index, 39 + index, 7) for index in range(num_rows)]
    times = []
    for _ in range(200):
        start = time.thread_time()
        ids, tokens, computed, lens = [], [], [], []
        for row in rows:
            missing = row.num_tokens - row.num_computed
            if missing <= 0:
                continue
            ids.append(row.request_id)
            tokens.append(row.last_token)
            computed.append(row.num_computed)
            lens.append(missing)
            row.num_computed += missing
        for column in (ids, tokens, computed, lens):
            np.array(column, dtype=np.int32)
        for row in rows:
            row.last_token = 7
            row.num_tokens += 1
        times.append(time.thread_time() - start)
    return float(np.mean(times)) * 1e6


@dataclass(frozen=True)
class HostCost:
    """Microseconds per step, means; `slow`: the slowest hundredth of all three together.

    plan:    deciding what the step holds. prepare: the columns of the plan. commit: taking the tokens in.
    """

    plan: float
    prepare: float
    commit: float
    slow: float

    @property
    def total(self) -> float:
        """All three."""
        return self.plan + self.prepare + self.commit


def timed_step(scheduler: Scheduler, elapsed_s: float) -> tuple[int, float, float]:
    """Rows of one step, and seconds of the thread in `schedule` and in `commit`."""
    start = time.thread_time()
    plan = scheduler.schedule()
    scheduled = time.thread_time()
    assert plan is not None
    chosen = output(plan)
    commit_start = time.thread_time()
    scheduler.commit(plan, chosen, elapsed_s)
    return plan.num_rows, scheduled - start, time.thread_time() - commit_start


def steady(num_rows: int, *, prefix_cache: bool = True) -> HostCost:
    """Rows that decode, of lengths that cross block edges in different steps."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=1 << 16,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(8192, num_rows),
            max_waiting=num_rows,
            max_model_len=4096,
            prefix_cache=prefix_cache,
        )
    )
    rng = np.random.default_rng(0)
    scheduler.add(*(request(row, rng, 16 + row % 16, STEADY_STEPS + 100) for row in range(num_rows)))
    make_plan, prepared = scheduler._make_plan, [0.0]

    def timed(*columns: Any) -> StepPlan:
        start = time.thread_time()
        plan = make_plan(*columns)
        prepared[0] = time.thread_time() - start
        return plan

    scheduler._make_plan = timed  # type: ignore[method-assign]
    costs = []
    for _ in range(STEADY_STEPS):
        _, schedule, commit = timed_step(scheduler, 0.01)
        costs.append((schedule - prepared[0], prepared[0], commit))
    columns = np.array(costs[5:]) * 1e6
    plan_us, prepare_us, commit_us = columns.mean(axis=0).tolist()
    return HostCost(plan_us, prepare_us, commit_us, float(np.quantile(columns.sum(axis=1), 0.99)))


def crowd() -> dict[str, float]:
    """Milliseconds of `schedule` and `commit` under a crowd that never ends."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=CROWD_BLOCKS,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_waiting=CROWD_WAITING + 256,
            max_model_len=32_768,
        ),
        cache_key=b"bench",
    )
    rng = np.random.default_rng(1)
    added = 0
    schedule, commit, running = [], [], []
    for step in range(CROWD_STEPS):
        while scheduler.stats().num_waiting < CROWD_WAITING:
            prompt, answer = int(rng.integers(16, 1500)), int(rng.integers(4, 300))
            scheduler.add(request(added, rng, prompt, answer, head=min(prompt, 512) * (added % 2)))
            added += 1
        num_rows, schedule_s, commit_s = timed_step(scheduler, 0.02)
        if step >= 200:
            commit.append(commit_s)
            schedule.append(schedule_s)
            running.append(num_rows)
    return {
        "rows": float(np.mean(running)),
        "schedule p50": float(np.quantile(schedule, 0.5)) * 1e3,
        "schedule p99": float(np.quantile(schedule, 0.99)) * 1e3,
        "commit p50": float(np.quantile(commit, 0.5)) * 1e3,
        "commit p99": float(np.quantile(commit, 0.99)) * 1e3,
    }


def main() -> None:
    """Prints two tables."""
    print("steady decode, microseconds per step")
    names = ("rows", "bare loop", "plan", "prepare", "commit", "all/loop", "p99 all", "no cache")
    print("  ".join(f"{name:>9}" for name in names))
    for num_rows in ROWS:
        loop, cost = bare_loop_us(num_rows), steady(num_rows)
        without = steady(num_rows, prefix_cache=False).total
        values = (loop, cost.plan, cost.prepare, cost.commit, cost.total / loop, cost.slow, without)
        print("  ".join([f"{num_rows:>9}", *(f"{value:>9.1f}" for value in values)]))
    print(f"\na crowd: {CROWD_WAITING} waiting, {CROWD_BLOCKS} blocks, milliseconds")
    print("  ".join(f"{name} {value:.2f}" for name, value in crowd().items()))


if __name__ == "__main__":
    main()
