"""A runner whose rows follow grammars: masks are computed on a worker while the runner behind computes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from rung.grammar.states import NO_MASKS, GrammarStates, StepMasks

if TYPE_CHECKING:
    from rung.runner.protocol import PendingOutput, Runner, RunnerInfo
    from rung.scheduler.batch import StepPlan


class GrammarRunner:
    """Implements `Runner` over another one. Steps without grammars go through as they are.

    The masks of a step need the tokens of the step before. So they are begun with `forward` when
    that step has been sampled, and else right after it has been.
    """

    def __init__(self, runner: Runner, states: GrammarStates) -> None:
        self._runner = runner
        self._states = states
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rung-masks")
        # Plans between `forward` and `sample`, and the masks of the first of them.
        self._launched: deque[StepPlan] = deque()
        self._masks: Future[StepMasks] | None = None

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
            # It will not be sampled.
            self._launched.pop()
            raise

    def sample(self, plan: StepPlan) -> PendingOutput:
        """See `Runner.sample`. Rows whose grammar fails end with its error."""
        self._launched.popleft()
        try:
            return self._sample(plan, self._take_masks())
        finally:
            if self._launched:
                self._begin()

    def close(self) -> None:
        """Release the worker, then the runner behind."""
        self._worker.shutdown()
        self._runner.close()

    def _begin(self) -> None:
        plan = self._launched[0]
        self._masks = self._worker.submit(self._states.masks, plan) if self._states.has_rows(plan) else None

    def _take_masks(self) -> StepMasks:
        masks, self._masks = self._masks, None
        return NO_MASKS if masks is None else masks.result()

    def _sample(self, plan: StepPlan, masks: StepMasks) -> PendingOutput:
        if masks.masks is None:
            return self._runner.sample(plan)
        masked = replace(plan, sampling=replace(plan.sampling, masks=masks.masks))
        # The next step's masks follow from these tokens, so they are waited for here.
        output = self._runner.sample(masked).wait()
        self._states.take_tokens(plan, output.token_ids.tolist())
        failed = {int(plan.sample_rows[index]): error for index, error in masks.failed.items()}
        return replace(output, failed=output.failed | failed, grammar_ns=masks.elapsed_ns)
