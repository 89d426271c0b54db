"""What a step costs on the host: `python -m tests.bench.sched_scale`.

Scheduling and commit of steady decode steps beside a bare Python loop over as many rows, and the
whole scheduler under a crowd: 256 running, 2,000 waiting, a million blocks, requests that come and
go, prefixes that are found and such that are not. No runner.
"""

from __future__ import annotations

import time

import numpy as np

from rung.request import Request, SamplingParams, StoppingParams
from rung.scheduler import Scheduler, SchedulerConfig
from rung.scheduler.batch import StepOutput, StepPlan

ROWS = (1, 16, 64, 256)
STEADY_STEPS = 600
CROWD_STEPS = 2000
CROWD_BLOCKS, CROWD_WAITING = 1 << 20, 2000


def output(plan: StepPlan) -> StepOutput:
    """Any tokens."""
    return StepOutput(np.full(len(plan.sample_rows), 7, dtype=np.int32), {}, {})


def request(request_id: int, rng: np.random.Generator, prompt: int, answer: int, head: int = 0) -> Request:
    """A greedy request whose prompt may begin with a common head."""
    ids = rng.integers(0, 30_000, prompt).astype(np.int32)
    ids[:head] = np.arange(head)
    return Request(request_id, ids, SamplingParams(temperature=0.0), StoppingParams(answer))


def bare_loop_us(num_rows: int) -> float:
    """Microseconds of a Python loop that does next to nothing for each row: the unit of the others."""
    rows = [{"computed": index, "tokens": index + 1, "blocks": []} for index in range(num_rows)]
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        planned = []
        for row in rows:
            missing = row["tokens"] - row["computed"]
            if row["tokens"] // 16 > len(row["blocks"]) + 1_000_000:
                row["blocks"].append(0)
            row["computed"] += missing
            row["tokens"] += 1
            planned.append((row["tokens"], missing))
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def steady_us(num_rows: int, *, prefix_cache: bool) -> tuple[float, float, float]:
    """Microseconds of schedule and of commit while rows decode: means and the slowest hundredth of both."""
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
    schedule, commit = [], []
    for _ in range(STEADY_STEPS):
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        chosen = output(plan)
        commit_start = time.perf_counter()
        scheduler.commit(plan, chosen, 0.01)
        commit.append(time.perf_counter() - commit_start)
        schedule.append(scheduled - start)
    both = np.array(schedule[5:]) + np.array(commit[5:])
    return (
        float(np.mean(schedule[5:])) * 1e6,
        float(np.mean(commit[5:])) * 1e6,
        float(np.quantile(both, 0.99)) * 1e6,
    )


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
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        chosen = output(plan)
        commit_start = time.perf_counter()
        scheduler.commit(plan, chosen, 0.02)
        if step >= 200:
            commit.append(time.perf_counter() - commit_start)
            schedule.append(scheduled - start)
            running.append(plan.num_rows)
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
    print(
        f"{'rows':>5} {'bare loop':>10} {'schedule':>9} {'commit':>8} {'both/loop':>10} {'p99':>7} {'no cache':>9}"
    )
    for num_rows in ROWS:
        loop = bare_loop_us(num_rows)
        schedule, commit, slow = steady_us(num_rows, prefix_cache=True)
        without = sum(steady_us(num_rows, prefix_cache=False)[:2])
        print(
            f"{num_rows:>5} {loop:>10.1f} {schedule:>9.1f} {commit:>8.1f} {(schedule + commit) / loop:>10.2f} "
            f"{slow:>7.0f} {without:>9.1f}"
        )
    print(f"\na crowd: {CROWD_WAITING} waiting, {CROWD_BLOCKS} blocks, milliseconds")
    print("  ".join(f"{name} {value:.2f}" for name, value in crowd().items()))


if __name__ == "__main__":
    main()
