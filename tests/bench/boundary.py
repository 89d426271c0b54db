"""What a step costs on the host beside the model: `python -m tests.bench.boundary`.

First all of it for steady decode: planning, the plan's columns, sampling from host logits,
committing, and the message; beside a bare Python loop over as many rows. Then the message alone
per step and for one session: what the loop thread spends on publishing, and what the I/O thread
spends on building and encoding the Step. No socket, no runner.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from rung.engine import Heartbeat
from rung.sampling.sampler import sample
from rung.scheduler import Scheduler, SchedulerConfig
from rung.scheduler.batch import LogprobRow, SchedulerStats, StepEvents
from rung.server.outbox import NO_STEP, Publisher, request_id
from rung.server.session import Session
from tests.bench.sched_scale import bare_loop_us, request, steady
from tests.unit.engine_fixture import make_facts

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB_SIZE = 4096
ROWS = (1, 16, 64, 256)
STEPS = 300
REPEATS = 5


class StillEngine:
    """Answers heartbeats only."""

    def submit(self, requests: object) -> None:
        """Never called here."""

    def abort(self, request_ids: object) -> None:
        """Never called here."""

    def heartbeat(self) -> Heartbeat:
        """A constant."""
        return Heartbeat(1, 2, 3, SchedulerStats(1, 2, 3, 4, 5, 6, 7))


def best_us(work: Callable[[], object]) -> float:
    """Microseconds per call, the best of several runs: the machine's other work only adds."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        for _ in range(STEPS):
            work()
        best = min(best, (time.thread_time() - start) / STEPS)
    return best * 1e6


def measure(num_rows: int, top_n: int | None) -> tuple[float, float, float]:
    """Microseconds per step: publish; publish, build and encode; the same with 10 steps merged."""
    publisher = Publisher()
    session = Session(1, StillEngine(), make_facts(), publisher, lambda: None)
    row = LogprobRow(-0.5, np.arange(top_n or 0, dtype=np.int32), np.zeros(top_n or 0, dtype=np.float32))
    events = StepEvents(
        request_ids=np.array([request_id(1, handle) for handle in range(num_rows)], dtype=np.int64),
        token_ids=np.arange(num_rows, dtype=np.int32),
        logprobs={} if top_n is None else dict.fromkeys(range(num_rows), row),
        started=(),
        finished=(),
    )
    sizes = []

    def write() -> None:
        for response in session.responses():
            sizes.append(len(response.SerializeToString()))

    def publish() -> None:
        publisher.publish(events, NO_STEP)

    def publish_and_write() -> None:
        publish()
        write()

    def merge_ten() -> None:
        for _ in range(10):
            publish()
        write()

    both = best_us(publish_and_write)
    merged = best_us(merge_ten) / 10
    start = time.thread_time()
    for _ in range(STEPS):
        publish()
    alone = (time.thread_time() - start) / STEPS * 1e6
    return alone, both, merged


def sampling_us(num_rows: int) -> float:
    """Microseconds to choose greedy tokens from logits on the host."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_rows,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows,
            max_waiting=num_rows,
            max_model_len=16,
        )
    )
    rng = np.random.default_rng(0)
    scheduler.add(*(request(row, rng, 1, 4) for row in range(num_rows)))
    plan = scheduler.schedule()
    assert plan is not None
    logits = rng.standard_normal((num_rows, VOCAB_SIZE)).astype(np.float32)
    start = time.thread_time()
    for _ in range(REPEATS):
        sample(logits.copy(), plan.sampling)
    return (time.thread_time() - start) / REPEATS * 1e6


def main() -> None:
    """Prints two tables."""
    names = ("rows", "plan", "prepare", "sample", "commit", "message", "bare loop")
    print(f"microseconds per step; sampling from {VOCAB_SIZE} logits a row")
    print("  ".join(f"{name:>9}" for name in names))
    for num_rows in ROWS:
        cost = steady(num_rows)
        values = (cost.plan, cost.prepare, sampling_us(num_rows), cost.commit, measure(num_rows, None)[1])
        print("  ".join(f"{value:>9.1f}" for value in (num_rows, *values, bare_loop_us(num_rows))))
    print()
    print(f"{'rows':>5} {'logprobs':>9} {'publish us':>11} {'+ build us':>11} {'merged by 10, us':>17}")
    for top_n in (None, 5):
        for num_rows in ROWS:
            publish, both, merged = measure(num_rows, top_n)
            shown = "-" if top_n is None else f"top {top_n}"
            print(f"{num_rows:>5} {shown:>9} {publish:>11.1f} {both:>11.1f} {merged:>17.1f}")


if __name__ == "__main__":
    main()
