"""The engine loop: schedule, run, commit, publish, on a thread of its own.

It moves values between the scheduler, the runner and its callbacks, and keeps time. It decides
nothing about requests and knows no protocol.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rung.errors import ErrorCode, RequestError
from rung.scheduler.batch import StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rung.request import Request
    from rung.runner.protocol import PendingOutput, Runner
    from rung.scheduler import Scheduler
    from rung.scheduler.batch import SchedulerStats, StepEvents, StepPlan

T = TypeVar("T")

logger = logging.getLogger(__name__)

# A second failing step in a row means that the device, not a request, is broken.
MAX_CONSECUTIVE_FAILURES = 2


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one turn of the loop ran and took; `rows` is 0 for a turn that only delivers events.

    step_host_ns:      scheduling and commit.
    step_device_ns:    forward and sample.
    predicted_step_ms: what the step was expected to take; 0 when the engine could not tell.
    grammar_ns:        masks of the step, computed beside the forward pass.
    """

    loop_seq: int
    step_host_ns: int
    step_device_ns: int
    predicted_step_ms: int
    rows: int
    tokens: int
    grammar_ns: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A look at the loop from outside.

    loop_seq:          counts turns; moves only while there is work.
    step_age_ms:       how long the step that runs now has been running; 0 when none runs.
    predicted_step_ms: what that step is expected to take; 0 when none runs or nobody can tell.
    """

    loop_seq: int
    step_age_ms: int
    predicted_step_ms: int
    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class _Submission:
    requests: tuple[Request, ...]
    received_ns: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _RunningStep:
    started_ns: int
    predicted_ms: int


@dataclass(slots=True)
class _LaunchedStep:
    """A step that has not landed. `result`: its output to be waited for, or why there is none."""

    plan: StepPlan
    predicted_ms: int
    launched_ns: int
    host_ns: int
    result: PendingOutput | RequestError | None = None


class Engine:
    """Runs one scheduler on one runner.

    `run` is the body of the loop thread. `submit`, `abort`, `stop` and `heartbeat` may be called
    from any thread. Every accepted request gets exactly one `Finished` through `on_events`, also
    when the engine stops or dies.

    on_events:   called on the loop thread, in order.
    on_rejected: called with the ids of one `submit` that was refused as a whole; on the loop thread,
                 or on the submitting one when the engine is not taking requests at all.
    on_dead:     called once, on the loop thread, after the last events, when it cannot go on.
    check_integrity: whether to check the scheduler's bookkeeping each time it becomes idle.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        on_events: Callable[[StepEvents, StepTiming], None],
        *,
        on_rejected: Callable[[Sequence[int], RequestError], None],
        on_dead: Callable[[Exception], None],
        check_integrity: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._on_events = on_events
        self._on_rejected = on_rejected
        self._on_dead = on_dead
        self._check_integrity = check_integrity
        self._wake = threading.Condition()
        # Guarded by `_wake`.
        self._inbox: list[_Submission | _Abort] = []
        self._num_inbox_requests = 0
        self._refusal: RequestError | None = None
        self._stopping = False
        # Written by the loop alone, each in one assignment.
        self._loop_seq = 0
        self._step: _RunningStep | None = None
        self._stats = scheduler.stats()
        self._last_commit_ns = 0
        self._num_failures = 0
        self._launched: deque[_LaunchedStep] = deque()

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand in the samples of one request: all are accepted or all are rejected."""
        limit = self._scheduler.config.max_waiting
        with self._wake:
            refusal = self._refusal
            if refusal is None and self._num_inbox_requests > limit:
                refusal = RequestError(
                    ErrorCode.OVERLOADED,
                    f"More than {limit} requests arrived within one engine step, which is the limit; "
                    "try again later.",
                )
            if refusal is None:
                self._inbox.append(_Submission(tuple(requests), time.monotonic_ns()))
                self._num_inbox_requests += len(requests)
                self._wake.notify()
        if refusal is not None:
            self._on_rejected([request.request_id for request in requests], refusal)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Cancel requests; unknown and ended ids are ignored."""
        with self._wake:
            self._inbox.append(_Abort(tuple(request_ids)))
            self._wake.notify()

    def stop(self) -> None:
        """Make `run` return after its present turn; what has not ended then fails as draining."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def heartbeat(self) -> Heartbeat:
        """How the loop is doing now."""
        step = self._step
        if step is None:
            return Heartbeat(self._loop_seq, 0, 0, self._stats)
        age_ms = (time.monotonic_ns() - step.started_ns) // 1_000_000
        return Heartbeat(self._loop_seq, age_ms, step.predicted_ms, self._stats)

    def run(self) -> None:
        """Serve until `stop`, or until a second step in a row fails."""
        self._last_commit_ns = time.monotonic_ns()
        try:
            while self._receive():
                self._turn()
        except Exception as error:
            logger.critical("the engine is dead", exc_info=True)
            self._close(RequestError(ErrorCode.INTERNAL, "The engine has failed and is not coming back."))
            self._on_dead(error)
        else:
            self._close(RequestError(ErrorCode.DRAINING, "The engine is shutting down; try another one."))

    def _receive(self) -> bool:
        """Take in all that was handed in, waiting for something when idle; False to stop."""
        if not (self._scheduler.has_work or self._inbox):
            if self._check_integrity:
                self._scheduler.check_integrity()
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._stopping)
            self._last_commit_ns = time.monotonic_ns()
        with self._wake:
            inbox, self._inbox = self._inbox, []
            self._num_inbox_requests = 0
            stopping = self._stopping
        for message in inbox:
            if isinstance(message, _Abort):
                for request_id in message.request_ids:
                    self._scheduler.abort(request_id)
            else:
                self._add(message)
        return not stopping

    def _add(self, submission: _Submission) -> None:
        waited_s = (time.monotonic_ns() - submission.received_ns) / 1e9
        try:
            self._scheduler.add(*submission.requests, waited_s=waited_s)
        except RequestError as error:
            self._on_rejected([request.request_id for request in submission.requests], error)

    def _turn(self) -> None:
        """Plan and launch a step, and land what has to land for it.

        What a step's sampling needs of the step before is there in time: with depth 2 a step is
        launched before the one before it has landed, and its sampling after.
        """
        scheduler, depth = self._scheduler, self._runner.info.depth
        start_ns = time.monotonic_ns()
        plan = scheduler.schedule()
        self._loop_seq += 1
        if plan is None:
            if self._launched:
                self._land()
            else:
                self._publish(scheduler.take_events(), StepTiming(self._loop_seq, 0, 0, 0, 0, 0))
            return
        predicted_ms = round(scheduler.predicted_s(plan) * 1e3)
        launch_ns = time.monotonic_ns()
        step = _LaunchedStep(plan, predicted_ms, launch_ns, launch_ns - start_ns)
        if not self._launched:
            self._step = _RunningStep(launch_ns, predicted_ms)
        step.result = self._try(plan, lambda: self._runner.forward(plan))
        while len(self._launched) > max(depth - 2, 0):
            self._land()
            step.plan = scheduler.refresh(plan)
        if step.result is None:
            step.result = self._try(plan, lambda: self._runner.sample(step.plan))
        self._launched.append(step)
        while len(self._launched) >= depth:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest step, and tell the scheduler and the world what came of it."""
        step = self._launched.popleft()
        result = step.result
        if result is not None and not isinstance(result, RequestError):
            pending = result
            result = self._try(step.plan, lambda: _checked(step.plan, pending.wait()))
        done_ns = time.monotonic_ns()
        elapsed_s = (done_ns - self._last_commit_ns) / 1e9
        device_ns = done_ns - max(step.launched_ns, self._last_commit_ns)
        self._last_commit_ns = done_ns
        grammar_ns = 0
        if isinstance(result, StepOutput):
            self._num_failures = 0
            grammar_ns = result.grammar_ns
            events = self._scheduler.commit(step.plan, result, elapsed_s)
        else:
            assert isinstance(result, RequestError), "a step that did not fail has an output"
            events = self._scheduler.fail(step.plan, result, elapsed_s)
        host_ns = step.host_ns + time.monotonic_ns() - done_ns
        rows, tokens = step.plan.num_rows, step.plan.num_tokens
        timing = StepTiming(self._loop_seq, host_ns, device_ns, step.predicted_ms, rows, tokens, grammar_ns)
        self._publish(events, timing)

    def _try(self, plan: StepPlan, action: Callable[[], T]) -> T | RequestError:
        """Do something for a step. The first failure in a row ends its rows, the second raises."""
        try:
            return action()
        except Exception:
            self._num_failures += 1
            if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
                raise
            logger.exception("a step failed and its requests with it: %s", _summary(plan))
            return RequestError(
                ErrorCode.INTERNAL, "The engine failed in the step that computed this request; try again."
            )

    def _publish(self, events: StepEvents, timing: StepTiming) -> None:
        self._stats = self._scheduler.stats()
        self._step = None
        if self._launched:
            self._step = _RunningStep(time.monotonic_ns(), self._launched[0].predicted_ms)
        self._on_events(events, timing)

    def _close(self, error: RequestError) -> None:
        """Refuse what comes, and end what is here, with `error`."""
        with self._wake:
            self._refusal = error
            inbox, self._inbox = self._inbox, []
        self._launched.clear()
        events = self._scheduler.fail_all(error)
        self._publish(events, StepTiming(self._loop_seq, 0, 0, 0, 0, 0))
        for message in inbox:
            if isinstance(message, _Submission):
                self._on_rejected([request.request_id for request in message.requests], error)


def _checked(plan: StepPlan, output: StepOutput) -> StepOutput:
    if len(output.token_ids) != len(plan.sample_rows):
        raise RuntimeError(
            f"the runner chose {len(output.token_ids)} tokens for {len(plan.sample_rows)} rows"
        )
    return output


def _summary(plan: StepPlan) -> str:
    shown = plan.request_ids[:8].tolist()
    more = f" and {plan.num_rows - len(shown)} more" if plan.num_rows > len(shown) else ""
    return (
        f"step {plan.step_id}, {plan.num_rows} rows, {plan.num_tokens} tokens, "
        f"{len(plan.sample_rows)} sampled, requests {shown}{more}"
    )
