"""Decides which tokens run in each step and when a request ends: a pure state machine.

It owns the requests, their state rows and their KV blocks. It computes nothing, knows no device
and reads no clock: durations enter through `commit`.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from rung.errors import ErrorCode, RequestError
from rung.kv.block_pool import BlockPool
from rung.kv.integrity import IntegrityError, check_blocks, check_coverage
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
from rung.scheduler.table import StateTable, blocks_for


class Scheduler:
    """First come, first served continuous batching with chunked prefill over paged KV.

    There is no prefill and no decode: a row's `num_computed` chases its `num_tokens`, and a row
    that has caught up gets its next token. Running rows are the oldest requests, in the order in
    which they came; blocks that run out are taken from the youngest, so the oldest always ends.

    One plan is in flight at a time: `schedule`, then `commit` or `fail` with that plan. `add` and
    `abort` are welcome between the two.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pool = BlockPool(config.num_blocks)
        self._table = StateTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
        )
        self._live: dict[int, Request] = {}
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        # Rows in the order of admission, and the empty ones, next to be used last.
        self._running: I32 = np.empty(0, dtype=np.int32)
        self._empty_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: StepPlan | None = None
        # Aborted while a plan was in flight: their blocks may be in use until it lands.
        self._cancelled: dict[int, None] = {}
        # Blocks released since the last plan, in order and once each.
        self._freed: dict[int, None] = {}
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._clock_s = 0.0
        self._step_id = 0
        self._preemptions_total = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended."""
        return bool(self._live)

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
            self._live[request.request_id] = request
            self._waiting[request.request_id] = request

    def abort(self, request_id: int) -> None:
        """End a request as cancelled. Unknown and ended ids are ignored."""
        request = self._live.get(request_id)
        if request is None:
            return
        if request.row >= 0 and self._in_flight is not None:
            self._cancelled[request_id] = None
            return
        self._end(request, FinishReason.CANCELLED)
        self._drop_ended_rows()

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to run."""
        if self._in_flight is not None:
            raise RuntimeError(f"plan {self._in_flight.step_id} is in flight and has to land first")
        rows, query_lens, preempted = self._select_running()
        if not preempted:
            rows, query_lens = self._admit(rows, query_lens)
        if len(rows) == 0:
            return None
        self._in_flight = self._make_plan(rows, query_lens)
        return self._in_flight

    def commit(self, plan: StepPlan, output: StepOutput, elapsed_s: float) -> StepEvents:
        """Take in what the runner computed for the plan in flight.

        elapsed_s: since the last commit, or since the engine woke up.
        """
        self._land(plan, elapsed_s)
        table = self._table
        table.num_computed[plan.rows] += plan.query_lens
        for index, error in output.failed.items():
            request = self._live.get(int(plan.request_ids[index]))
            if request is not None:
                self._end(request, FinishReason.ERROR, error=error)
        sampled_rows = plan.rows[plan.sample_rows]
        request_ids = plan.request_ids[plan.sample_rows]
        token_ids, logprobs = output.token_ids, output.logprobs
        alive = table.request_id[sampled_rows] == request_ids
        if not alive.all():
            kept = np.flatnonzero(alive)
            sampled_rows, request_ids, token_ids = sampled_rows[kept], request_ids[kept], token_ids[kept]
            logprobs = {new: logprobs[old] for new, old in enumerate(kept.tolist()) if old in logprobs}
        prompts = self._take_prompts(plan, output) if output.prompts else ()
        self._append(sampled_rows, token_ids)
        self._drop_ended_rows()
        return self._events(request_ids, token_ids, logprobs, prompts)

    def fail(self, plan: StepPlan, error: RequestError, elapsed_s: float = 0.0) -> StepEvents:
        """Take in that the step of the plan in flight raised: the rows it ran end with `error`."""
        self._land(plan, elapsed_s)
        # The runner may have raised before it wiped them.
        self._freed = dict.fromkeys(plan.freed_blocks.tolist()) | self._freed
        for request_id in plan.request_ids.tolist():
            request = self._live.get(request_id)
            if request is not None:
                self._end(request, FinishReason.ERROR, error=error)
        self._drop_ended_rows()
        return self.take_events()

    def fail_all(self, error: RequestError) -> StepEvents:
        """End every request with `error`, whatever is in flight: the engine stops here."""
        self._in_flight = None
        self._end_cancelled()
        for request in list(self._live.values()):
            self._end(request, FinishReason.ERROR, error=error)
        self._drop_ended_rows()
        return self.take_events()

    def take_events(self) -> StepEvents:
        """Events that no commit has delivered: what aborts ended while nothing was in flight."""
        return self._events(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), {})

    def stats(self) -> SchedulerStats:
        """Counts as of now."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks_used=self._pool.num_used,
            num_blocks_total=self._pool.num_blocks,
            preemptions_total=self._preemptions_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` when blocks, rows and requests contradict each other."""
        table = self._table
        held = {int(table.request_id[row]): table.blocks(row) for row in self._running.tolist()}
        check_blocks(self._pool, held)
        for row in self._running.tolist():
            check_coverage(
                int(table.request_id[row]),
                num_computed=int(table.num_computed[row]),
                num_tokens=int(table.num_tokens[row]),
                num_blocks=int(table.num_blocks[row]),
                block_size=self.config.block_size,
            )
        if held.keys() | self._waiting.keys() != self._live.keys() or held.keys() & self._waiting.keys():
            raise IntegrityError("the live requests are not those that run and those that wait")
        if sorted([*self._empty_rows, *self._running.tolist()]) != list(range(self.config.max_num_seqs)):
            raise IntegrityError("the state rows are not those in use and those that are empty")

    def _select_running(self) -> tuple[I32, I32, bool]:
        """Spend the budget on running rows and give them blocks.

        Returns the rows [R], their query lengths [R], and whether anything was preempted.
        """
        pool, table = self._pool, self._table
        preempted = False
        while True:
            rows, query_lens = self._spend_budget()
            missing = table.missing_blocks(rows, query_lens)
            if missing.sum() <= pool.num_free:
                break
            self._preempt_youngest()
            preempted = True
        for index in np.flatnonzero(missing).tolist():
            table.add_blocks(rows[index], pool.allocate(int(missing[index])))
        return rows, query_lens, preempted

    def _spend_budget(self) -> tuple[I32, I32]:
        """Rows that are one token behind first, then chunks of the others, oldest first."""
        table = self._table
        behind = table.num_tokens[self._running] - table.num_computed[self._running]
        is_chunk = behind != 1
        if not is_chunk.any():
            return self._running, behind
        order = np.argsort(is_chunk, kind="stable")
        spent = np.minimum(np.cumsum(behind[order]), self.config.max_num_batched_tokens)
        query_lens = np.diff(spent, prepend=0).astype(np.int32)
        served = query_lens > 0
        return self._running[order][served], query_lens[served]

    def _admit(self, rows: I32, query_lens: I32) -> tuple[I32, I32]:
        """Start waiting requests while budget, rows and blocks last; returns all rows of the step.

        A request gets blocks for all its known tokens at once, not for its first chunk alone, and
        only if every row that may still grow could get one block more: a prompt that is let in to
        be thrown out halfway would be computed twice.
        """
        if not self._waiting:
            return rows, query_lens
        config, table = self.config, self._table
        budget = config.max_num_batched_tokens - int(query_lens.sum())
        num_growing = int(np.count_nonzero(table.num_blocks[self._running] < table.max_blocks[self._running]))
        new_rows: list[int] = []
        new_lens: list[int] = []
        while self._waiting and self._empty_rows and budget > 0:
            request = next(iter(self._waiting.values()))
            needed = blocks_for(len(request.token_ids), config.block_size)
            num_growing += needed < blocks_for(request.max_total_tokens, config.block_size)
            alone = len(self._running) == 0 and not new_rows
            if needed + (0 if alone else num_growing) > self._pool.num_free:
                break
            del self._waiting[request.request_id]
            request.row = self._empty_rows.pop()
            if request.scheduled_at_s is None:
                request.scheduled_at_s = self._clock_s
            table.enter(request.row, request)
            table.add_blocks(request.row, self._pool.allocate(needed))
            new_rows.append(request.row)
            new_lens.append(min(len(request.token_ids), budget))
            budget -= new_lens[-1]
        if not new_rows:
            return rows, query_lens
        admitted = np.array(new_rows, dtype=np.int32)
        admitted_lens = np.array(new_lens, dtype=np.int32)
        self._running = np.concatenate([self._running, admitted])
        return np.concatenate([rows, admitted]), np.concatenate([query_lens, admitted_lens])

    def _make_plan(self, rows: I32, query_lens: I32) -> StepPlan:
        table = self._table
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        num_computed = table.num_computed[rows]
        sample_rows = np.flatnonzero(num_computed + query_lens == table.num_tokens[rows]).astype(np.int32)
        freed_blocks = np.fromiter(self._freed, dtype=np.int32, count=len(self._freed))
        self._freed = {}
        self._step_id += 1
        return StepPlan(
            step_id=self._step_id,
            rows=rows,
            request_ids=table.request_id[rows],
            query_start=query_start,
            token_ids=table.query_token_ids(rows, query_lens, query_start),
            num_computed=num_computed,
            block_tables=table.block_tables[rows, : table.num_blocks[rows].max()],
            sample_rows=sample_rows,
            sampling=table.sampling_columns(rows[sample_rows]),
            freed_blocks=freed_blocks,
            prompts=table.prompt_columns(rows, query_lens, query_start),
        )

    def _land(self, plan: StepPlan, elapsed_s: float) -> None:
        """The plan is no longer in flight: time passes and what was aborted meanwhile ends."""
        if plan is not self._in_flight:
            raise RuntimeError(f"plan {plan.step_id} is not in flight")
        self._in_flight = None
        self._clock_s += elapsed_s
        self._end_cancelled()

    def _take_prompts(self, plan: StepPlan, output: StepOutput) -> tuple[tuple[int, PromptLogprobs], ...]:
        """Logprobs of prompts, of the requests that live; each id's are delivered once in its life."""
        delivered = []
        for index, logprobs in output.prompts.items():
            request = self._live.get(int(plan.request_ids[index]))
            if request is not None:
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
            self._start(self._request_at(row))
        stopped = table.is_stop(rows, token_ids)
        ended = stopped | (table.num_tokens[rows] >= table.max_total[rows])
        for index in np.flatnonzero(ended).tolist():
            request = self._request_at(int(rows[index]))
            if stopped[index]:
                self._end(request, FinishReason.STOP, stop_token_id=int(token_ids[index]))
            else:
                self._end(request, FinishReason.LENGTH)

    def _request_at(self, row: int) -> Request:
        return self._live[int(self._table.request_id[row])]

    def _start(self, request: Request) -> None:
        scheduled_at_s = self._clock_s if request.scheduled_at_s is None else request.scheduled_at_s
        request.started = True
        self._started.append(
            Started(
                request_id=request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=0,
                queue_s=scheduled_at_s - request.queued_at_s,
                prefill_s=self._clock_s - scheduled_at_s,
            )
        )

    def _preempt_youngest(self) -> None:
        """Throw the youngest running request back to the front of the queue, answer kept."""
        table = self._table
        row = int(self._running[-1])
        request = self._request_at(row)
        request.token_ids = table.token_ids[row, : table.num_tokens[row]].copy()
        self._release_row(request)
        self._running = self._running[:-1]
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        self._preemptions_total += 1

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: RequestError | None = None,
    ) -> None:
        """The one place where a request ends. `_drop_ended_rows` has to follow."""
        del self._live[request.request_id]
        num_tokens = len(request.token_ids)
        if request.row >= 0:
            num_tokens = int(self._table.num_tokens[request.row])
            self._release_row(request)
        else:
            del self._waiting[request.request_id]
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

    def _end_cancelled(self) -> None:
        for request_id in self._cancelled:
            self._end(self._live[request_id], FinishReason.CANCELLED)
        self._cancelled = {}

    def _release_row(self, request: Request) -> None:
        self._freed |= dict.fromkeys(self._pool.free(self._table.leave(request.row)))
        self._empty_rows.append(request.row)
        request.row = -1

    def _drop_ended_rows(self) -> None:
        self._running = self._running[self._table.request_id[self._running] >= 0]

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
