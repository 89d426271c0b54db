"""Decides which tokens run in each step and when a request ends: a pure state machine.

It owns the requests; their state rows and KV blocks are `rows`'. It computes nothing, knows no
device and reads no clock: durations enter through `commit`.
"""

from __future__ import annotations

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
from rung.scheduler.rows import RunningRows, Start
from rung.scheduler.table import blocks_for
from rung.scheduler.waiting import WaitingQueue

# Waiting requests that are looked at in one step; those behind have their turn when these have started.
MAX_SCANNED = 64


class Scheduler:
    """First come, first served continuous batching with chunked prefill over paged KV.

    There is no prefill and no decode: a row's `num_computed` chases its `num_tokens`, and a row
    that has caught up gets its next token. Running rows are the oldest requests, in the order in
    which they came; blocks that run out are taken from the youngest, so the oldest always ends.

    One plan is in flight at a time: `schedule`, then `commit` or `fail` with that plan. `add` and
    `abort` are welcome between the two.

    cache_key: secret of the prefix cache's names; what differs between processes and is known to none.
    """

    def __init__(self, config: SchedulerConfig, cache_key: bytes = b"") -> None:
        self.config = config
        self._rows = RunningRows(config, cache_key)
        self._table = self._rows.table
        self._live: dict[int, Request] = {}
        self._waiting = WaitingQueue()
        # Samples of one prompt that have not ended, by group.
        self._groups: dict[int, dict[int, Request]] = {}
        self._in_flight: StepPlan | None = None
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._clock_s = 0.0
        self._step_id = 0
        self._num_added = 0
        self._preemptions_total = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._recomputed_tokens_total = 0
        self._cached_tokens_total = 0

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
            request.arrival = self._num_added
            self._num_added += 1
            self._live[request.request_id] = request
            self._waiting.add(request)
            if request.group_id >= 0:
                self._groups.setdefault(request.group_id, {})[request.request_id] = request

    def abort(self, request_id: int) -> None:
        """End a request as cancelled. Unknown and ended ids are ignored."""
        request = self._live.get(request_id)
        if request is not None:
            self._end(request, FinishReason.CANCELLED)
            self._rows.drop_left()

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to run."""
        if self._in_flight is not None:
            raise RuntimeError(f"plan {self._in_flight.step_id} is in flight and has to land first")
        self._end_overdue()
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
        # The runner may have raised before it wiped them.
        self._rows.kv.drop_again(plan.freed_blocks.tolist())
        for index in range(plan.num_rows):
            request = self._request_of(plan, index)
            if request is not None:
                self._end(request, FinishReason.ERROR, error=error)
        self._rows.drop_left()
        return self.take_events()

    def fail_all(self, error: RequestError) -> StepEvents:
        """End every request with `error`, whatever is in flight: the engine stops here."""
        if self._in_flight is not None:
            self._rows.land(self._in_flight.step_id)
            self._in_flight = None
        for request in list(self._live.values()):
            self._end(request, FinishReason.ERROR, error=error)
        self._rows.drop_left()
        return self.take_events()

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
            preemptions_total=self._preemptions_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            recomputed_tokens_total=self._recomputed_tokens_total,
            cached_tokens_total=self._cached_tokens_total,
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` when blocks, rows and requests contradict each other."""
        self._rows.check_integrity()
        running = {request_id for request_id, request in self._live.items() if request.row >= 0}
        waiting = {request.request_id for request in self._waiting}
        if running | waiting != self._live.keys() or running & waiting:
            raise IntegrityError("the live requests are not those that run and those that wait")
        if running != set(self._table.request_id[self._rows.order].tolist()):
            raise IntegrityError("the requests that run are not those in the state rows")

    def _select_running(self) -> tuple[I32, I32, bool]:
        """Spend the budget on running rows and give them blocks.

        Returns the rows [R], their query lengths [R], and whether anything was preempted.
        """
        preempted = False
        while True:
            rows, query_lens = self._spend_budget()
            missing = self._table.missing_blocks(rows, query_lens)
            if missing.sum() <= self._rows.kv.num_free:
                break
            self._preempt_youngest()
            preempted = True
        self._rows.grow(rows, missing)
        return rows, query_lens, preempted

    def _spend_budget(self) -> tuple[I32, I32]:
        """Rows that are one token behind first, then chunks of the others, oldest first."""
        table, running = self._table, self._rows.order
        behind = table.num_tokens[running] - table.num_computed[running]
        is_chunk = behind != 1
        if not is_chunk.any():
            return running, behind
        order = np.argsort(is_chunk, kind="stable")
        spent = np.minimum(np.cumsum(behind[order]), self.config.max_num_batched_tokens)
        query_lens = np.diff(spent, prepend=0).astype(np.int32)
        served = query_lens > 0
        return running[order][served], query_lens[served]

    def _admit(self, rows: I32, query_lens: I32) -> tuple[I32, I32]:
        """Start waiting requests while budget, rows and blocks last; returns all rows of the step.

        A request gets blocks for all its known tokens at once, not for its first chunk alone, and
        only if every row that may still grow could get one block more: a prompt that is let in to
        be thrown out halfway would be computed twice.
        """
        if not self._waiting:
            return rows, query_lens
        config, table, running = self.config, self._table, self._rows.order
        budget = config.max_num_batched_tokens - int(query_lens.sum())
        num_growing = int(np.count_nonzero(table.num_blocks[running] < table.max_blocks[running]))
        self._rows.prefixes.start_step(is_idle=len(running) == 0)
        new_rows: list[int] = []
        new_lens: list[int] = []
        entered: list[Request] = []
        for request in islice(self._waiting, MAX_SCANNED):
            if self._rows.num_empty == 0 or budget <= 0:
                break
            start = self._find_start(request)
            if start is None:
                continue
            num_blocks = blocks_for(len(request.token_ids), config.block_size)
            num_growing += num_blocks < blocks_for(request.max_total_tokens, config.block_size)
            is_alone = len(running) == 0 and not new_rows
            needed = num_blocks - self._rows.kv.num_held(start.blocks)
            if needed + (0 if is_alone else num_growing) > self._rows.kv.num_free:
                break
            new_rows.append(self._enter(request, start, num_blocks))
            new_lens.append(min(len(request.token_ids) - start.num_stored, budget))
            budget -= new_lens[-1]
            entered.append(request)
        for request in entered:
            self._waiting.remove(request)
        return (
            np.concatenate([rows, np.array(new_rows, dtype=np.int32)]),
            np.concatenate([query_lens, np.array(new_lens, dtype=np.int32)]),
        )

    def _find_start(self, request: Request) -> Start | None:
        """What a waiting request can take over; None while what it could take over is in the making."""
        start = self._fork_start(request)
        if start is not None:
            return start if start.num_stored >= 0 else None
        blocks = self._rows.prefixes.look_up(request)
        return None if blocks is None else Start(blocks, len(blocks) * self.config.block_size)

    def _fork_start(self, request: Request) -> Start | None:
        """The prompt of a sample of the same group; `num_stored` is -1 while that is being read.

        All of it but the last token, which is computed again for the logits. The block in which the
        owner goes on writing is copied.
        """
        siblings = self._groups.get(request.group_id)
        if siblings is None or not request.reads_cache or len(request.token_ids) > request.num_prompt_tokens:
            return None
        num_shared = request.num_prompt_tokens - 1
        is_reading = False
        for sibling in siblings.values():
            if sibling.row < 0:
                continue
            if self._table.num_stored[sibling.row] >= num_shared:
                num_full, rest = divmod(num_shared, self.config.block_size)
                blocks = self._table.blocks(sibling.row)
                return Start(blocks[:num_full], num_shared, blocks[num_full] if rest else None)
            is_reading = True
        return Start((), -1) if is_reading else None

    def _enter(self, request: Request, start: Start, num_blocks: int) -> int:
        if request.scheduled_at_s is None:
            request.scheduled_at_s = self._clock_s
            request.num_cached = start.num_stored
            self._cached_tokens_total += start.num_stored
        self._recomputed_tokens_total += max(0, request.num_lost - start.num_stored)
        return self._rows.enter(request, start, num_blocks)

    def _make_plan(self, rows: I32, query_lens: I32) -> StepPlan:
        table = self._table
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        num_computed = table.num_computed[rows]
        sample_rows = np.flatnonzero(num_computed + query_lens == table.num_tokens[rows]).astype(np.int32)
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
        return plan

    def _land(self, plan: StepPlan, elapsed_s: float) -> None:
        """The plan is no longer in flight, and time passes."""
        if plan is not self._in_flight:
            raise RuntimeError(f"plan {plan.step_id} is not in flight")
        self._in_flight = None
        self._clock_s += elapsed_s
        self._rows.land(plan.step_id)

    def _request_of(self, plan: StepPlan, index: int) -> Request | None:
        """Whose row of the plan that is; None when it is not running any more."""
        request = self._live.get(int(plan.request_ids[index]))
        return request if request is not None and request.row == plan.rows[index] else None

    def _take_prompts(self, plan: StepPlan, output: StepOutput) -> tuple[tuple[int, PromptLogprobs], ...]:
        """Logprobs of prompts, of the requests that live; each id's are delivered once in its life."""
        delivered = []
        for index, logprobs in output.prompts.items():
            request = self._request_of(plan, index)
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
            self._start(self._rows.request(row))
        stopped = table.is_stop(rows, token_ids)
        ended = stopped | (table.num_tokens[rows] >= table.max_total[rows])
        for index in np.flatnonzero(ended).tolist():
            request = self._rows.request(int(rows[index]))
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

    def _preempt_youngest(self) -> None:
        """Throw the youngest running request back into the queue, answer kept."""
        row = int(self._rows.order[-1])
        request = self._rows.request(row)
        request.token_ids = self._table.token_ids[row, : self._table.num_tokens[row]].copy()
        request.num_lost = int(self._table.num_stored[row])
        self._leave(request)
        self._rows.drop_left()
        self._waiting.add(request)
        self._preemptions_total += 1

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
        siblings = self._groups.get(request.group_id)
        if siblings is not None:
            del siblings[request.request_id]
            if not siblings:
                del self._groups[request.group_id]
        num_tokens = len(request.token_ids)
        if request.row >= 0:
            num_tokens = int(self._table.num_tokens[request.row])
            self._leave(request)
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

    def _leave(self, request: Request) -> None:
        self._rows.leave(request, None if self._in_flight is None else self._in_flight.step_id)

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
