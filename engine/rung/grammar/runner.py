"""A runner whose rows follow grammars: masks are computed on a worker while the runner behind computes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rung.grammar.states import NO_MASKS, GrammarStates, StepMasks
from rung.scheduler.batch import StepOutput

if TYPE_CHECKING:
    from rung.runner.protocol import PendingOutput, Runner, RunnerInfo
    from rung.scheduler.batch import StepPlan


class GrammarRunner:
    """Implements `Runner` over another one, of any depth.

    The masks of a step need the tokens of the step before. So they are begun with `forward` when
    these are there already, and else as soon as they are.
    """

    def __init__(self, runner: Runner, states: GrammarStates) -> None:
        self._runner = runner
        self._states = states
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rung-masks")
        # Plans from `forward` until their tokens are known, and the masks of the first of them.
        self._launched: deque[StepPlan] = deque()
        self._begun: tuple[int, Future[StepMasks]] | None = None

    @property
    def info(self) -> RunnerInfo:
        """That of the runner behind."""
        return self._runner.info

    def forward(self, plan: StepPlan) -> None:
        """See `Runner.forward`."""
        self._launched.append(plan)
        if len(self._launched) == 1:
            self._begin()
        try:
            self._runner.forward(plan)
        except BaseException:
            self._forget(plan)
            raise

    def sample(self, plan: StepPlan) -> PendingOutput:
        """See `Runner.sample`. Rows whose grammar fails end with its error."""
        try:
            masks = self._masks(plan)
            if masks.masks is not None:
                plan = replace(plan, sampling=replace(plan.sampling, masks=masks.masks))
            pending = self._runner.sample(plan)
        except BaseException:
            self._forget(plan)
            raise
        waiting = _Sampling(self, plan, masks, pending)
        return waiting.wait() if isinstance(pending, StepOutput) else waiting

    def finish(self, plan: StepPlan, masks: StepMasks, pending: PendingOutput) -> StepOutput:
        """Wait for a plan's tokens, note them, and begin what waited for them."""
        try:
            output = pending.wait()
            if masks.masks is None:
                return output
            self._states.take_tokens(plan, output.token_ids.tolist())
        finally:
            self._forget(plan)
        failed = {int(plan.sample_rows[index]): error for index, error in masks.failed.items()}
        return replace(output, failed=output.failed | failed, grammar_ns=masks.elapsed_ns)

    def close(self) -> None:
        """Release the worker, then the runner behind."""
        self._worker.shutdown()
        self._runner.close()

    def _begin(self) -> None:
        plan = self._launched[0]
        if self._states.has_rows(plan):
            self._begun = (plan.step_id, self._worker.submit(self._states.masks, plan))

    def _masks(self, plan: StepPlan) -> StepMasks:
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == plan.step_id:
            return begun[1].result()
        return self._states.masks(plan) if self._states.has_rows(plan) else NO_MASKS

    def _forget(self, plan: StepPlan) -> None:
        """Nothing waits for this plan any more; the next one may begin if it did."""
        was_first = self._launched[0].step_id == plan.step_id
        self._launched = deque(other for other in self._launched if other.step_id != plan.step_id)
        if was_first and self._launched:
            self._begin()


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The tokens of a plan that has been sampled under its masks."""

    runner: GrammarRunner
    plan: StepPlan
    masks: StepMasks
    pending: PendingOutput

    def wait(self) -> StepOutput:
        """See `PendingOutput`."""
        return self.runner.finish(self.plan, self.masks, self.pending)
