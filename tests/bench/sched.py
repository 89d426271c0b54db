"""The scheduler's policies against the usual ones, simulated: `python -m tests.bench.sched`.

Traces are drawn from seeds; the policies were tuned on seeds 0 to 4 and are reported on 5 to 9
(`--tuning` for the former). It prints the tables of docs/scheduling.md, in which each figure is the
mean over the seeds and, behind ±, half of what lies between the lowest and the highest.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np

from rung.scheduler.policies import PolicyConfig
from tests.bench.sched_sim import CPU, GPU, Device, Outcome, simulate
from tests.bench.sched_traces import SHORT_TOKENS, TRACES, make_trace

TUNING_SEEDS, REPORT_SEEDS = range(5), range(5, 10)
POLICIES = {
    "ours": PolicyConfig(),
    # First come, first served; the last one in gives way; 2,048 tokens a step; a first chunk's room.
    "usual": PolicyConfig(chunks="fixed", lanes="one", admission="first-chunk", victims="youngest"),
    # The same, with room for the longest answer allowed, so that nobody gives way.
    "reserve all": PolicyConfig(chunks="fixed", lanes="one", admission="reserve", victims="youngest"),
}
COLUMNS = (
    ("TTFT p50", lambda o: np.quantile(o.ttft, 0.5) * 1e3),
    ("TTFT p99", lambda o: np.quantile(o.ttft, 0.99) * 1e3),
    ("short p99", lambda o: np.quantile(o.ttft_short, 0.99) * 1e3),
    ("ITL p50", lambda o: np.quantile(o.itl, 0.5) * 1e3),
    ("ITL p99", lambda o: np.quantile(o.itl, 0.99) * 1e3),
    ("tok/s", lambda o: o.output_rate),
    ("recomputed", lambda o: o.recomputed),
    ("KV use %", lambda o: o.kv_use * 100),
)


def run(device: Device, policies: PolicyConfig, make: object, seeds: range) -> list[Outcome]:
    """One outcome per seed."""
    policies = replace(policies, itl_target_s=device.itl_target)
    short_tokens = SHORT_TOKENS if device is GPU else SHORT_TOKENS // 8
    outcomes = []
    for seed in seeds:
        trace = make_trace(make, seed, device.scale)
        if device is CPU:
            trace = replace(
                trace,
                num_blocks=trace.num_blocks // 8,
                asks=[replace(a, prompt_ids=a.prompt_ids[: -(-len(a.prompt_ids) // 8)]) for a in trace.asks],
            )
        outcomes.append(simulate(trace, device, policies, short_tokens=short_tokens))
    return outcomes


def shown(values: list[float]) -> str:
    """A mean and its spread, three digits each."""
    mean, spread = float(np.mean(values)), (max(values) - min(values)) / 2
    digits = max(0, 2 - int(np.floor(np.log10(mean)))) if mean > 0 else 0
    return f"{mean:.{digits}f} ±{spread:.{digits}f}"


def main() -> None:
    """Prints one table per device."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tuning", action="store_true", help="the seeds that the policies were tuned on")
    parser.add_argument("--seeds", type=int, default=5, help="how many of them")
    parser.add_argument("--device", choices=["gpu", "cpu"], help="one device alone")
    parser.add_argument("--trace", help="one trace alone")
    arguments = parser.parse_args()
    seeds = (TUNING_SEEDS if arguments.tuning else REPORT_SEEDS)[: arguments.seeds]
    devices = {"gpu": [GPU], "cpu": [CPU], None: [GPU, CPU]}[arguments.device]
    start = time.perf_counter()
    for device in devices:
        print(
            f"\n{device.name}: ms, {len(seeds)} seeds, ITL target {device.itl_target * 1e3:.0f} ms, "
            f"up to {device.max_num_seqs} rows and {device.step_tokens} tokens a step\n"
        )
        print(f"| trace | policies | {' | '.join(name for name, _ in COLUMNS)} |")
        print("|---|---|" + "---|" * len(COLUMNS))
        for make in TRACES:
            if arguments.trace not in (None, make.__name__):
                continue
            for name, policies in POLICIES.items():
                outcomes = run(device, policies, make, seeds)
                cells = [shown([float(value(outcome)) for outcome in outcomes]) for _, value in COLUMNS]
                print(f"| {make.__name__} | {name} | {' | '.join(cells)} |", flush=True)
    print(f"\nsimulated in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
