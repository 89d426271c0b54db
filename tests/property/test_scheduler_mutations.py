"""The state machine can fail: each of these faults in the scheduler must make it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from rung.kv.kv_cache import KvCache
from rung.scheduler.prefixes import PrefixIndex
from rung.scheduler.rows import RunningRows
from tests.property.test_scheduler_machine import SchedulerMachine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.request import Request
    from rung.scheduler.batch import I32
    from rung.scheduler.rows import Start

# One of these runs at least must see the fault; they are the same ones every time.
SETTINGS = settings(
    max_examples=400,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def no_copy_on_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningRows, "take_copies", lambda _: np.empty((0, 2), dtype=np.int32))


def named_one_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a prompt can be found as soon as the step that computes them is planned."""
    enter = RunningRows.enter

    def enter_and_name(self: RunningRows, request: Request, start: Start, num_blocks: int) -> int:
        row = enter(self, request, start, num_blocks)
        num_full = len(request.token_ids) // self.table.block_size
        blocks = self.table.blocks(row)[len(start.blocks) : num_full]
        self.prefixes.expect_nothing(request)
        self.prefixes.add(request, len(start.blocks), blocks, request.token_ids)
        return row

    monkeypatch.setattr(RunningRows, "enter", enter_and_name)


def names_say_nothing_of_what_is_before(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = PrefixIndex._extend

    def extend_from_nothing(self: PrefixIndex, request: Request, count: int, token_ids: I32) -> None:
        while len(request.block_names) < count:
            before = list(request.block_names)
            request.block_names.clear()
            extend(self, request, 1, token_ids[len(before) * self._block_size :])
            request.block_names[:0] = before

    monkeypatch.setattr(PrefixIndex, "_extend", extend_from_nothing)


def blocks_are_free_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that one of several holders lets go of is given back."""
    release = KvCache.release

    def release_all(self: KvCache, blocks: Sequence[int], num_tokens: int) -> None:
        shared = [block for block in blocks if self.pool.ref_counts[block] > 1]
        release(self, blocks, num_tokens)
        if shared and self.prefixes.name_of(shared[-1]) is None:
            self.pool.give_back(shared[-1:])

    monkeypatch.setattr(KvCache, "release", release_all)


def frees_are_not_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are given back while a step in flight still uses them."""
    leave = RunningRows.leave

    def leave_at_once(self: RunningRows, request: Request) -> None:
        last_step, self.last_step = self.last_step, None
        leave(self, request)
        self.last_step = last_step

    monkeypatch.setattr(RunningRows, "leave", leave_at_once)


@pytest.mark.parametrize(
    "fault",
    [
        no_copy_on_write,
        named_one_step_early,
        names_say_nothing_of_what_is_before,
        blocks_are_free_too_early,
        frees_are_not_fenced,
    ],
)
def test_machine_notices(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is that goes wrong
        run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)
