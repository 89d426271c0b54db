"""Drives a runner with the real scheduler, without engine loop, clock or sockets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rung.request import FinishReason, Request, SamplingParams, StoppingParams
from rung.scheduler import Scheduler, SchedulerConfig
from tests.scheduling import CARELESS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.errors import RequestError
    from rung.runner.protocol import Runner, RunnerInfo
    from rung.scheduler.batch import LogprobRow, PromptLogprobs, StepOutput, StepPlan


@dataclass
class Answer:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    error: RequestError | None = None


@dataclass
class Run:
    """All answers, in the order of the requests, and how often a row was preempted."""

    answers: list[Answer]
    num_preemptions: int


def request(
    request_id: int,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
    top_logprobs: int | None = 5,
    temperature: float = 0.0,
    seed: int = 0,
    prompt_top_logprobs: int | None = None,
) -> Request:
    """A request, greedy with five logprobs unless told otherwise."""
    return Request(
        request_id,
        np.array(prompt_ids, dtype=np.int32),
        SamplingParams(
            temperature=temperature,
            seed=seed,
            top_logprobs=top_logprobs,
            prompt_top_logprobs=prompt_top_logprobs,
        ),
        StoppingParams(max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids)),
    )


def drive(
    runner: Runner,
    requests: Sequence[Request],
    *,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 64,
    num_blocks: int | None = None,
) -> Run:
    """Run all requests to their end; `num_blocks` hides some of the runner's blocks."""
    info = runner.info
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks or info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max(len(requests), 1),
            max_model_len=info.num_blocks * info.block_size,
            # Chunks as large as the budget, and preemption where it is asked for.
            policies=CARELESS,
        )
    )
    answers = {request.request_id: Answer() for request in requests}
    scheduler.add(*requests)
    # Whatever an earlier run left behind must never be read.
    stale = np.arange(info.num_blocks, dtype=np.int32)
    while (plan := scheduler.schedule()) is not None:
        # The runner gets its own view of a plan; the scheduler wants its plan back as it was.
        shown = replace(plan, freed_blocks=np.union1d(stale, plan.freed_blocks).astype(np.int32))
        stale = stale[:0]
        runner.forward(shown)
        events = scheduler.commit(plan, runner.sample(shown), elapsed_s=0.0)
        for request_id, part in events.prompts:
            answers[request_id].prompts.append(part)
        for index, request_id in enumerate(events.request_ids.tolist()):
            answers[request_id].token_ids.append(int(events.token_ids[index]))
            if index in events.logprobs:
                answers[request_id].logprobs.append(events.logprobs[index])
        for finished in events.finished:
            answers[finished.request_id].reason = finished.reason
            answers[finished.request_id].error = finished.error
    scheduler.check_integrity()
    return Run(list(answers.values()), scheduler.stats().preemptions_total)


class ShuffledBlocks:
    """A runner behind a fixed random renaming of all its blocks: no two neighbours stay neighbours."""

    def __init__(self, runner: Runner, seed: int) -> None:
        self._runner = runner
        self._names = np.random.default_rng(seed).permutation(runner.info.num_blocks).astype(np.int32)

    @property
    def info(self) -> RunnerInfo:
        """That of the runner behind."""
        return self._runner.info

    def forward(self, plan: StepPlan) -> None:
        """Run the renamed plan."""
        self._runner.forward(self._renamed(plan))

    def sample(self, plan: StepPlan) -> StepOutput:
        """Sample for the renamed plan."""
        return self._runner.sample(self._renamed(plan))

    def close(self) -> None:
        """The runner behind is closed by its owner."""

    def _renamed(self, plan: StepPlan) -> StepPlan:
        tables = np.where(plan.block_tables < 0, plan.block_tables, self._names[plan.block_tables])
        return replace(plan, block_tables=tables, freed_blocks=self._names[plan.freed_blocks])
