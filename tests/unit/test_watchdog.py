"""When a step counts as hung, and that this is said once per step."""

from __future__ import annotations

from rung.engine import Heartbeat
from rung.scheduler.batch import SchedulerStats
from rung.server.process import Watchdog, is_hung


def beat(loop_seq: int, age_ms: int, predicted_ms: int = 0) -> Heartbeat:
    return Heartbeat(loop_seq, age_ms, predicted_ms, SchedulerStats(0, 0, 0, 0, 0, 0, 0))


def test_a_long_step_that_was_foreseen_does_not_hang() -> None:
    assert not is_hung(beat(1, 10_000))
    assert is_hung(beat(1, 10_001))
    assert not is_hung(beat(1, 60_000, predicted_ms=6_000))
    assert is_hung(beat(1, 60_001, predicted_ms=6_000))


def test_each_hung_step_is_dumped_once() -> None:
    beats = [beat(1, 0), beat(2, 11_000), beat(2, 12_000), beat(3, 5), beat(4, 11_000)]
    coming = iter(beats)
    dumped: list[Heartbeat] = []
    watchdog = Watchdog(lambda: next(coming), dumped.append)
    for _ in beats:
        watchdog.look()
    assert dumped == [beats[1], beats[4]]
