"""Decides which tokens run in each step and when a request ends: a pure state machine.

It owns the requests; their state rows and KV blocks are `rows`'. It computes nothing, knows no
device and reads no clock: durations enter through `commit`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from rung.errors import ErrorCode, RequestError
from rung.kv.integrity import IntegrityError
from rung.request import Finished, FinishReason, Request, Started
from rung.scheduler.batch import (
    I32,
    I64,
    LogprobRow,
    PromptLogprobs,
    SchedulerStats,
    StepEvents,
    StepOutput,
    StepPlan,
)
from rung.scheduler.limits import SchedulerConfig, check_fits
from rung.scheduler.planner import Planner
from rung.scheduler.policies import build_policies
from rung.scheduler.predictor import StepShape, StepTimePredictor
from rung.scheduler.rows import RunningRows
from rung.scheduler.starts import StartFinder
from rung.scheduler.waiting import WaitingQueue

# Requests of each kind in a description.
NUM_DESCRIBED = 16


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A plan that has not landed, and what decides how long it takes."""

    step_id: int
    shape: StepShape


class Scheduler:
    """Continuous batching with chunked prefill over paged KV that is shared where it is the same.

    There is no prefill and no decode: a row's `num_computed` chases its `num_tokens`, and a row
    that has caught up gets its next token. `Planner` says what each step holds.

    At most `config.depth` plans are in flight: `schedule`, then `commit` or `fail` with each plan in
    turn. `add` and `abort` are welcome at any time. What a plan may use stays as it is until it has
    landed.

    cache_key: secret of the prefix cache's names; what differs between processes and is known to none.
    """

    def __init__(self, config: SchedulerConfig, cache_key: bytes = b"") -> None:
        self.config = config
        self._rows = RunningRows(config, cache_key)
        self._table = self._rows.table
        self._live: dict[int, Request] = {}
        self._waiting = WaitingQueue()
        self._starts = StartFinder(self._table, self._rows.prefixes)
        self._predictor = StepTimePredictor()
        self._policies = build_policies(
            config.policies,
            self._predictor,
            block_size=config.block_size,
            step_tokens=config.max_num_batched_tokens,
        )
        self._planner = Planner(config, self._rows, self._waiting, self._starts, self._policies)
        self._in_flight: deque[_InFlight] = deque()
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._clock_s = 0.0
        self._step_id = 0
        self._num_added = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended or some plan has not landed."""
        return bool(self._live or self._in_flight)

    def add(self, *requests: Request, waited_s: float = 0.0) -> None:
        """Accept these requests, all or none; raises `RequestError` when they are refused.

        waited_s: how long they have been on their way inside the engine; counts as queueing.
        """
        seen: set[int] = set()
        for request in requests:
            check_fits(request, self.config)
            if request.request_id in self._live or request.request_id in seen:
                raise RequestError(
                    ErrorCode.INVALID_ARGUMENT, f"Request id {request.request_id} is already in use."
                )
            seen.add(request.request_id)
        limit = self.config.max_waiting
        if len(requests) > limit:
            raise RequestError(
                ErrorCode.CAPACITY,
                f"The request asks for {len(requests)} samples and at most {limit} can wait at once; "
                "ask for fewer.",
            )
        if len(self._waiting) + len(requests) > limit:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"The engine's queue is full: {len(self._waiting)} requests wait and the limit is {limit}; "
                "try again later.",
            )
        for request in requests:
            request.queued_at_s = self._clock_s - waited_s
            request.arrival = self._num_added
            self._num_added += 1
            self._live[request.request_id] = request
            self._waiting.add(request)
            self._starts.add(request)

    def abort(self, request_id: int) -> None:
        """End a request as cancelled. Unknown and ended ids are ignored."""
        request = self._live.get(request_id)
        if request is not None:
            self._end(request, FinishReason.CANCELLED)
            self._rows.drop_left()

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to run."""
        if len(self._in_flight) >= self.config.depth:
            raise RuntimeError(f"plan {self._in_flight[0].step_id} is in flight and has to land first")
        self._end_overdue()
        rows, query_lens = self._planner.plan(self._clock_s)
        if len(rows) == 0:
            return None
        plan = self._make_plan(rows, query_lens)
        self._in_flight.append(_InFlight(plan.step_id, shape_of(plan)))
        self._rows.last_step = plan.step_id
        return plan

    def refresh(self, plan: StepPlan) -> StepPlan:
        """The plan with sampling columns that know every token of the steps before it, which have landed."""
        rows = plan.rows[plan.sample_rows]
        # As they were when the plan was made.
        self._table.num_pending[rows] -= 1
        sampling = self._table.sampling_columns(rows)
        self._table.num_pending[rows] += 1
        return replace(plan, sampling=sampling)

    def commit(self, plan: StepPlan, output: StepOutput, elapsed_s: float) -> StepEvents:
        """Take in what the runner computed for the plan in flight.

        elapsed_s: since the last commit, or since the engine woke up.
        """
        self._predictor.observe(self._land(plan, elapsed_s), elapsed_s)
        for index, error in output.failed.items():
            request = self._request_of(plan, index)
            if request is not None:
                self._rows.distrust(request)
                self._end(request, FinishReason.ERROR, error=error)
        alive = self._table.request_id[plan.rows] == plan.request_ids
        rows, num_stored = plan.rows, plan.num_computed + plan.query_lens
        sampled_rows, request_ids = rows[plan.sample_rows], plan.request_ids[plan.sample_rows]
        token_ids, logprobs = output.token_ids, output.logprobs
        if not alive.all():
            rows, num_stored = rows[alive], num_stored[alive]
            kept = np.flatnonzero(alive[plan.sample_rows])
            sampled_rows, request_ids, token_ids = sampled_rows[kept], request_ids[kept], token_ids[kept]
            logprobs = {new: logprobs[old] for new, old in enumerate(kept.tolist()) if old in logprobs}
        self._rows.store(rows, num_stored)
        prompts = self._take_prompts(plan, output) if output.prompts else ()
        self._append(sampled_rows, token_ids)
        self._rows.drop_left()
        return self._events(request_ids, token_ids, logprobs, prompts)

    def fail(self, plan: StepPlan, error: RequestError, elapsed_s: float = 0.0) -> StepEvents:
        """Take in that the step of the plan in flight raised: the rows it ran end with `error`."""
        self._land(plan, elapsed_s)
        for index in range(plan.num_rows):
            request = self._request_of(plan, index)
            if request is not None:
                self._end(request, FinishReason.ERROR, error=error)
        self._rows.drop_left()
        # The runner may have raised before it wiped them.
        self._rows.kv.drop_again(plan.freed_blocks.tolist())
        return self.take_events()

    def fail_all(self, error: RequestError) -> StepEvents:
        """End every request with `error`, whatever is in flight: the engine stops here."""
        while self._in_flight:
            self._rows.land(self._in_flight.popleft().step_id)
        for request in list(self._live.values()):
            self._end(request, FinishReason.ERROR, error=error)
        self._rows.drop_left()
        return self.take_events()

    def predicted_s(self, plan: StepPlan) -> float:
        """How long a plan in flight should take; 0 while nothing is known."""
        return next(self._predictor.predict(it.shape) for it in self._in_flight if it.step_id == plan.step_id)

    def learn(self, shape: StepShape, elapsed_s: float) -> None:
        """A step of this shape took so long on this machine."""
        self._predictor.observe(shape, elapsed_s)

    def take_events(self) -> StepEvents:
        """Events that no commit has delivered: what aborts ended while nothing was in flight."""
        return self._events(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), {})

    def stats(self) -> SchedulerStats:
        """Counts as of now."""
        return SchedulerStats(
            num_running=len(self._rows.order),
            num_waiting=len(self._waiting),
            num_blocks_used=self._rows.kv.num_used,
            num_blocks_total=self.config.num_blocks,
            preemptions_total=self._planner.preemptions_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            recomputed_tokens_total=self._planner.recomputed_tokens_total,
            cached_tokens_total=self._planner.cached_tokens_total,
        )

    def describe(self) -> str:
        """Its state for people, in some lines: what is in flight, what runs and what waits."""
        stats, table = self.stats(), self._table
        lines = [
            f"{stats.num_running} running, {stats.num_waiting} waiting, {stats.num_blocks_used} of "
            f"{stats.num_blocks_total} blocks in use, plans in flight: "
            f"{[it.step_id for it in self._in_flight]}"
        ]
        for row in self._rows.order[:NUM_DESCRIBED].tolist():
            lines.append(
                f"  running {table.request_id[row]}: {table.num_computed[row]} of {table.num_tokens[row]} "
                f"tokens computed, at most {table.max_total[row]}, {table.num_blocks[row]} blocks"
            )
        for request in islice(self._waiting, NUM_DESCRIBED):
            lines.append(
                f"  waiting {request.request_id}: {len(request.token_ids)} tokens, priority "
                f"{request.priority}, for {self._clock_s - request.queued_at_s:.1f} s"
            )
        return "\n".join(lines)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` when blocks, rows and requests contradict each other."""
        self._rows.check_integrity()
        running = {request_id for request_id, request in self._live.items() if request.row >= 0}
        waiting = {request.request_id for request in self._waiting}
        if running | waiting != self._live.keys() or running & waiting:
            raise IntegrityError("the live requests are not those that run and those that wait")
        if running != set(self._table.request_id[self._rows.order].tolist()):
            raise IntegrityError("the requests that run are not those in the state rows")

    def _make_plan(self, rows: I32, query_lens: I32) -> StepPlan:
        table = self._table
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        num_computed = table.num_computed[rows]
        known = table.num_tokens[rows] + table.num_pending[rows]
        sample_rows = np.flatnonzero(num_computed + query_lens == known).astype(np.int32)
        self._step_id += 1
        plan = StepPlan(
            step_id=self._step_id,
            rows=rows,
            request_ids=table.request_id[rows],
            query_start=query_start,
            token_ids=table.query_token_ids(rows, query_lens, query_start),
            num_computed=num_computed,
            block_tables=table.block_tables[rows, : table.num_blocks[rows].max()],
            sample_rows=sample_rows,
            sampling=table.sampling_columns(rows[sample_rows]),
            freed_blocks=np.array(self._rows.kv.take_dropped(), dtype=np.int32),
            block_copies=self._rows.take_copies(),
            prompts=table.prompt_columns(rows, query_lens, query_start),
        )
        table.num_computed[rows] = num_computed + query_lens
        table.expect_tokens(rows[sample_rows])
        return plan

    def _land(self, plan: StepPlan, elapsed_s: float) -> StepShape:
        """The plan is no longer in flight, and time passes; returns the plan's shape."""
        if not self._in_flight or plan.step_id != self._in_flight[0].step_id:
            raise RuntimeError(f"plan {plan.step_id} is not in flight, or not the first to land")
        landed = self._in_flight.popleft()
        self._clock_s += elapsed_s
        self._rows.land(plan.step_id)
        return landed.shape

    def _request_of(self, plan: StepPlan, index: int) -> Request | None:
        """Whose row of the plan that is; None when it is not running any more."""
        request = self._live.get(int(plan.request_ids[index]))
        return request if request is not None and request.row == plan.rows[index] else None

    def _take_prompts(self, plan: StepPlan, output: StepOutput) -> tuple[tuple[int, PromptLogprobs], ...]:
        """Logprobs of prompts, of the requests that run; each id's are delivered once in its life."""
        assert plan.prompts is not None, "nobody asked for what the runner gives"
        delivered = []
        firsts = dict(zip(plan.prompts.rows.tolist(), plan.prompts.first_ids(plan).tolist(), strict=True))
        for index, logprobs in output.prompts.items():
            request = self._request_of(plan, index)
            # A prompt that was thrown out while a part of it was in flight asks for that part again.
            if request is not None and firsts[index] == request.num_scored + 1:
                request.num_scored = self._table.add_scored(int(plan.rows[index]), len(logprobs.chosen))
                delivered.append((request.request_id, logprobs))
        return tuple(delivered)

    def _append(self, rows: I32, token_ids: I32) -> None:
        """Give each row its new token and end those for which it was the last."""
        table = self._table
        table.append_tokens(rows, token_ids)
        self._generation_tokens_total += len(rows)
        for row in rows[~table.started[rows]].tolist():
            table.started[row] = True
            self._prompt_tokens_total += int(table.num_prompt[row])
            self._start(self._rows.request(row))
        stopped = table.is_stop(rows, token_ids)
        ended = stopped | (table.num_tokens[rows] >= table.max_total[rows])
        for index in np.flatnonzero(ended).tolist():
            request = self._rows.request(int(rows[index]))
            self._policies.admission.observe(
                int(table.num_tokens[rows[index]] - table.num_prompt[rows[index]])
            )
            if stopped[index]:
                self._end(request, FinishReason.STOP, stop_token_id=int(token_ids[index]))
            else:
                self._end(request, FinishReason.LENGTH)

    def _start(self, request: Request) -> None:
        scheduled_at_s = self._clock_s if request.scheduled_at_s is None else request.scheduled_at_s
        request.started = True
        self._started.append(
            Started(
                request_id=request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached,
                queue_s=scheduled_at_s - request.queued_at_s,
                prefill_s=self._clock_s - scheduled_at_s,
            )
        )

    def _end_overdue(self) -> None:
        for request in self._waiting.take_overdue(self._clock_s):
            waited_s = self._clock_s - request.queued_at_s
            error = RequestError(
                ErrorCode.DEADLINE,
                f"The request waited {waited_s:.3g} s without being started, and its deadline is "
                f"{request.deadline_s:.3g} s; allow it more time or try again later.",
            )
            self._end(request, FinishReason.ERROR, error=error)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: RequestError | None = None,
    ) -> None:
        """The one place where a request ends. The rows' `drop_left` has to follow."""
        del self._live[request.request_id]
        self._starts.remove(request)
        num_tokens = len(request.token_ids)
        if request.row >= 0:
            num_tokens = int(self._table.num_tokens[request.row])
            self._rows.leave(request)
        else:
            self._waiting.remove(request)
        if request.scheduled_at_s is not None and not request.started:
            self._start(request)
        self._finished.append(
            Finished(
                request_id=request.request_id,
                reason=reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=num_tokens - request.num_prompt_tokens,
                stop_token_id=stop_token_id,
                error=error,
            )
        )

    def _events(
        self,
        request_ids: I64,
        token_ids: I32,
        logprobs: dict[int, LogprobRow],
        prompts: tuple[tuple[int, PromptLogprobs], ...] = (),
    ) -> StepEvents:
        events = StepEvents(
            request_ids, token_ids, logprobs, tuple(self._started), tuple(self._finished), prompts
        )
        self._started, self._finished = [], []
        return events


def shape_of(plan: StepPlan) -> StepShape:
    """What decides how long a plan takes."""
    lens = plan.query_lens
    is_chunk = lens > 1
    if not is_chunk.any():
        return StepShape(plan.num_tokens, len(plan.sample_rows), int(plan.num_computed.sum()))
    chunks = lens[is_chunk].astype(np.float64)
    return StepShape(
        num_tokens=plan.num_tokens,
        num_samples=len(plan.sample_rows),
        decode_context=int(plan.num_computed[~is_chunk].sum()),
        prefill_work=float((chunks * (plan.num_computed[is_chunk] + chunks / 2)).sum()),
    )
