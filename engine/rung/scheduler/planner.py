"""What the next step runs: who gets a token, who reads on, who starts and who has to give way.

It asks the policies and moves rows and blocks; how a request comes and ends is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from rung.scheduler.predictor import StepShape
from rung.scheduler.table import blocks_for
from rung.scheduler.victims import Candidates

if TYPE_CHECKING:
    from rung.request import Request
    from rung.scheduler.batch import I32
    from rung.scheduler.limits import SchedulerConfig
    from rung.scheduler.policies import Policies
    from rung.scheduler.rows import RunningRows
    from rung.scheduler.starts import Start, StartFinder
    from rung.scheduler.waiting import WaitingQueue

# Waiting requests that are looked at in one step; those behind have their turn when these have started.
MAX_SCANNED = 64


@dataclass(slots=True)
class _Step:
    """A step in the making.

    decodes:   [D] rows that get their next token.
    chunks:    tokens of their prompts that other rows compute.
    left:      tokens that prompts may still have, of which long ones `left_long` at most.
    longs:     rows of long prompts that could take more.
    """

    decodes: I32
    chunks: dict[int, int] = field(default_factory=dict)
    left: int = 0
    left_long: int = 0
    longs: list[int] = field(default_factory=list)

    def columns(self) -> tuple[I32, I32]:
        """Rows [R] and query lengths [R]."""
        ones = np.ones(len(self.decodes), dtype=np.int32)
        if not self.chunks:
            return self.decodes, ones
        rows = np.fromiter(self.chunks.keys(), dtype=np.int32, count=len(self.chunks))
        lens = np.fromiter(self.chunks.values(), dtype=np.int32, count=len(self.chunks))
        return np.concatenate([self.decodes, rows]), np.concatenate([ones, lens])


class Planner:
    """Rows that are one token behind first, then prompts by lane, then those that start.

    Blocks that run out are taken from a victim, but never from the request that came first among
    those of the highest priority: so that one ends, and then the next.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        rows: RunningRows,
        waiting: WaitingQueue,
        starts: StartFinder,
        policies: Policies,
    ) -> None:
        self._config = config
        self._rows = rows
        self._table = rows.table
        self._waiting = waiting
        self._starts = starts
        self._policies = policies
        self._now_s = 0.0
        self.preemptions_total = 0
        self.recomputed_tokens_total = 0
        self.cached_tokens_total = 0

    def plan(self, now_s: float) -> tuple[I32, I32]:
        """Rows [R] and how many tokens each computes [R]; they have the blocks for them."""
        self._now_s = now_s
        kv, may_start = self._rows.kv, True
        while True:
            step = self._spend()
            rows, lens = step.columns()
            missing = self._table.missing_blocks(rows, lens)
            shortage = int(missing.sum()) - kv.num_free
            if shortage <= 0:
                break
            may_start = False
            # Blocks that come free when the steps in flight have landed are worth a step's wait.
            if shortage <= self._rows.num_coming or not self._preempt(shortage):
                served = (missing == 0) | (np.cumsum(missing) <= kv.num_free)
                rows, lens, missing = rows[served], lens[served], missing[served]
                break
        self._rows.grow(rows, missing)
        if not may_start or not (step.longs or self._waiting):
            return rows, lens
        if self._waiting:
            self._start_waiting(step)
        self._top_up(step)
        return step.columns()

    def _spend(self) -> _Step:
        """Divide the step's tokens among the rows that run."""
        table, running = self._table, self._rows.order
        behind = table.num_tokens[running] + table.num_pending[running] - table.num_computed[running]
        if self._config.depth > 1:
            # Of some rows the last token is being computed.
            going_on = table.num_tokens[running] + table.num_pending[running] < table.max_total[running]
            running, behind = running[going_on], behind[going_on]
        is_decode = behind == 1
        if is_decode.all():
            step = _Step(running)
            if not self._waiting:
                return step
            prompts: list[int] = []
        else:
            step = _Step(running[is_decode])
            prompts = running[~is_decode].tolist()
        room = self._config.max_num_batched_tokens - len(step.decodes)
        prompts.sort(key=lambda row: (-table.priority[row], table.arrival[row]))
        position = int(table.num_computed[prompts[0]]) if prompts else 0
        decodes = StepShape(
            num_tokens=len(step.decodes),
            num_samples=len(step.decodes),
            decode_context=int(table.num_computed[step.decodes].sum()),
        )
        step.left = step.left_long = self._policies.chunks.limit(decodes, position, room)
        self._spend_on_prompts(step, prompts)
        return step

    def _spend_on_prompts(self, step: _Step, prompts: list[int]) -> None:
        lanes = self._policies.lanes
        missing = {row: self._behind(row) for row in prompts}
        longs = [row for row in prompts if lanes.is_long(missing[row])]
        shorts = [row for row in prompts if not lanes.is_long(missing[row])]
        if longs and (shorts or self._short_waits()):
            oldest_s = min(self._rows.request(row).queued_at_s for row in longs)
            step.left_long = lanes.long_share(step.left, self._now_s - oldest_s)
        kept = min(step.left_long, sum(missing[row] for row in longs))
        for row in shorts:
            self._chunk(step, row, step.left - kept)
        for row in longs:
            step.left_long -= self._chunk(step, row, min(step.left, step.left_long))
        step.longs = longs

    def _behind(self, row: int) -> int:
        return int(self._table.num_tokens[row] - self._table.num_computed[row])

    def _chunk(self, step: _Step, row: int, most: int) -> int:
        """Let a row compute up to `most` tokens (more) of its prompt; how many it is."""
        given = step.chunks.get(row, 0)
        missing = self._behind(row) - given
        num_tokens = min(missing, most)
        if num_tokens <= 0:
            return 0
        if num_tokens < missing:
            num_tokens = self._whole_blocks(int(self._table.num_computed[row]) + given, num_tokens)
        step.chunks[row] = given + num_tokens
        step.left -= num_tokens
        return num_tokens

    def _whole_blocks(self, position: int, num_tokens: int) -> int:
        """As many tokens as end at a block's edge; all if there is none among them."""
        beyond = (position + num_tokens) % self._config.block_size
        return num_tokens - beyond if num_tokens > beyond else num_tokens

    def _short_waits(self) -> bool:
        is_long = self._policies.lanes.is_long
        return self._rows.num_empty > 0 and any(
            not is_long(len(request.token_ids)) for request in islice(self._waiting, MAX_SCANNED)
        )

    def _preempt(self, shortage: int) -> bool:
        """Throw a row that the policy chooses back into the queue, answer kept; False if none may go."""
        table, rows, running = self._table, self._rows, self._rows.order
        if len(running) < 2:
            return False
        first = np.lexsort((table.arrival[running], -table.priority[running]))[0]
        running = np.delete(running, first)
        exclusive, shared = rows.count_blocks(running)
        stored = table.num_stored[running]
        candidates = Candidates(
            priority=table.priority[running],
            exclusive=exclusive,
            recompute=np.maximum(stored - shared * self._config.block_size, 0),
            remaining=table.max_total[running] - table.num_tokens[running],
        )
        row = int(running[self._policies.victims.choose(candidates, shortage + len(running))])
        request = rows.request(row)
        request.token_ids = table.token_ids[row, : table.num_tokens[row]].copy()
        request.num_lost = int(table.num_stored[row])
        rows.leave(request)
        rows.drop_left()
        self._waiting.add(request)
        self.preemptions_total += 1
        return True

    def _start_waiting(self, step: _Step) -> None:
        """Start waiting requests while rows, tokens and blocks last.

        One that waits for a prefix in the making holds nobody up. A long one that finds no room
        lets short ones pass for a while.
        """
        lanes, kv = self._policies.lanes, self._rows.kv
        over_commit = int((self._policies.admission.over_commit - 1) * kv.num_blocks)
        available = kv.num_free + self._rows.num_coming + over_commit - self._owed_blocks()
        self._rows.prefixes.start_step(is_idle=len(self._rows.order) == 0)
        is_long_stuck = False
        started: list[Request] = []
        for request in islice(self._waiting, MAX_SCANNED):
            if self._rows.num_empty == 0 or step.left <= 0:
                break
            start = self._starts.find(request)
            if start is None:
                continue
            missing = len(request.token_ids) - start.num_stored
            is_long = lanes.is_long(missing)
            most = min(step.left, step.left_long) if is_long else step.left
            if most <= 0 or (is_long and is_long_stuck):
                continue
            num_tokens = missing if missing <= most else self._whole_blocks(start.num_stored, most)
            waited_s = self._now_s - request.queued_at_s
            kept = int(lanes.kept_memory(waited_s) * kv.num_blocks) if is_long else 0
            taken = self._start(request, start, num_tokens, available - kept)
            if taken is None:
                if not (is_long and lanes.may_overtake(waited_s)):
                    break
                is_long_stuck = True
                continue
            available -= taken
            started.append(request)
            step.chunks[request.row] = num_tokens
            step.left -= num_tokens
            if is_long:
                step.left_long -= num_tokens
                step.longs.append(request.row)
        for request in started:
            self._waiting.remove(request)

    def _start(self, request: Request, start: Start, num_tokens: int, available: int) -> int | None:
        """Give a request a row and the blocks of its first chunk.

        Returns the blocks that are planned for it; None if it has to wait.
        """
        kv, block_size = self._rows.kv, self._config.block_size
        num_blocks = blocks_for(start.num_stored + num_tokens, block_size)
        num_held = kv.num_held(start.blocks)
        if num_blocks - num_held > kv.num_free:
            return None
        planned = self._policies.admission.planned_tokens(request, start.num_stored + num_tokens)
        demand = blocks_for(planned, block_size) - num_held
        if demand > available and len(self._rows.order):
            return None
        if request.scheduled_at_s is None:
            request.scheduled_at_s = self._now_s
            request.num_cached = start.num_stored
            self.cached_tokens_total += start.num_stored
        self.recomputed_tokens_total += max(0, request.num_lost - start.num_stored)
        request.num_lost = 0
        self._rows.enter(request, start, num_blocks, planned)
        return demand

    def _owed_blocks(self) -> int:
        """Blocks that running rows are still to be given, as planned."""
        table, running = self._table, self._rows.order
        reach = np.maximum(
            table.planned[running], table.num_tokens[running] + self._policies.admission.headroom
        )
        reach = np.minimum(reach, table.max_total[running])
        owed = -(-reach // self._config.block_size) - table.num_blocks[running]
        return int(np.maximum(owed, 0).sum())

    def _top_up(self, step: _Step) -> None:
        """What short prompts have left over goes to long ones, as far as there are free blocks."""
        table, kv = self._table, self._rows.kv
        for row in step.longs:
            if step.left <= 0:
                break
            capacity = int(table.num_blocks[row]) + kv.num_free
            reachable = capacity * self._config.block_size - int(table.num_computed[row])
            self._chunk(step, row, min(step.left, reachable - step.chunks.get(row, 0)))
            if row in step.chunks:
                rows, lens = np.array([row]), np.array([step.chunks[row]])
                self._rows.grow(rows, table.missing_blocks(rows, lens))
