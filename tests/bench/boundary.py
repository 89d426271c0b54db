"""Host cost of the engine's side of the boundary: `python -m tests.bench.boundary`.

Per engine step and for one session: what the loop thread spends on publishing, and what the I/O
thread spends on building and encoding the Step. No socket, no runner.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from rung.engine import Heartbeat
from rung.scheduler.batch import LogprobRow, SchedulerStats, StepEvents
from rung.server.outbox import NO_STEP, Publisher, request_id
from rung.server.session import Session
from tests.unit.engine_fixture import make_facts

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = (1, 16, 64, 256)
STEPS = 1000
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
        start = time.perf_counter()
        for _ in range(STEPS):
            work()
        best = min(best, (time.perf_counter() - start) / STEPS)
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
    start = time.perf_counter()
    for _ in range(STEPS):
        publish()
    alone = (time.perf_counter() - start) / STEPS * 1e6
    return alone, both, merged


def main() -> None:
    """Prints one table."""
    print(f"{'rows':>5} {'logprobs':>9} {'publish us':>11} {'+ build us':>11} {'merged by 10, us':>17}")
    for top_n in (None, 5):
        for num_rows in ROWS:
            publish, both, merged = measure(num_rows, top_n)
            shown = "-" if top_n is None else f"top {top_n}"
            print(f"{num_rows:>5} {shown:>9} {publish:>11.1f} {both:>11.1f} {merged:>17.1f}")


if __name__ == "__main__":
    main()
