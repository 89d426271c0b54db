"""A simulated engine: the real scheduler on a trace, a step's time from a formula. No model, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rung.request import Request, SamplingParams, StoppingParams
from rung.scheduler import Scheduler, SchedulerConfig
from rung.scheduler.batch import StepOutput
from rung.scheduler.predictor import StepShape
from rung.scheduler.scheduler import shape_of

if TYPE_CHECKING:
    from rung.scheduler.policies import PolicyConfig
    from tests.bench.sched_traces import Trace

STOP_ID, OTHER_ID = 1, 0
MAX_STEPS = 400_000


@dataclass(frozen=True)
class Device:
    """What a step takes, in seconds.

    weights:      to read the weights once, whatever the step holds.
    per_token:    of arithmetic; a step takes the longer of the two.
    per_key:      a position read by a row with one token.
    per_pair:     a query position against a key position, in prompts.
    host:         beside it.
    step_tokens:  most tokens in a step. itl_target: see `PolicyConfig`.
    """

    name: str
    weights: float
    per_token: float
    per_key: float
    per_pair: float
    host: float
    step_tokens: int
    max_num_seqs: int
    itl_target: float
    scale: float

    def seconds(self, shape: StepShape) -> float:
        """The time of a step."""
        linear = max(self.weights, self.per_token * shape.num_tokens)
        attention = self.per_key * shape.decode_context + self.per_pair * shape.prefill_work
        return self.host + linear + attention


# Llama 3.1 8B in BF16 on one H100: 6.44 ms + 4.37e-5 ms per position (vLLM blog, April 2026) for the rows
# that decode; prompts at 26k tokens/s, from its 764 ms for 20k tokens; attention at 400 TFLOP/s.
GPU = Device("8B on an H100", 6.44e-3, 38e-6, 4.37e-8, 1.3e-9, 0.5e-3, 8192, 256, 0.05, 1.0)
# A model of 135M parameters in 4 bits on two cores: what our native runner does (README.md), rounded.
CPU = Device("135M on two cores", 4e-3, 0.7e-3, 6e-8, 4e-8, 0.3e-3, 512, 64, 0.1, 0.4)


@dataclass(frozen=True)
class Outcome:
    """What a trace came to. Times in seconds.

    ttft, ttft_short: per request, from arrival to its first token; of all, and of the short prompts.
    itl:              between two tokens of a request.
    output_rate:      tokens of answers per second, from the first arrival to the last token.
    recomputed:       tokens computed again after preemptions.
    kv_use:           mean part of the KV blocks in use.
    """

    ttft: np.ndarray
    ttft_short: np.ndarray
    itl: np.ndarray
    output_rate: float
    recomputed: int
    preemptions: int
    kv_use: float
    makespan: float


def simulate(trace: Trace, device: Device, policies: PolicyConfig, *, short_tokens: int) -> Outcome:
    """Run the trace to its end."""
    asks = trace.asks
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=trace.num_blocks,
            max_num_seqs=device.max_num_seqs,
            max_num_batched_tokens=device.step_tokens,
            max_waiting=len(asks),
            max_model_len=trace.num_blocks * 16,
            policies=policies,
        )
    )
    for shape in (StepShape(64, 1, 0, 2048.0), StepShape(1, 1, 65), StepShape(1, 1, 66)):
        # What an engine finds out when it starts.
        scheduler.learn(shape, device.seconds(shape))
    arrivals = np.array([ask.arrival_s for ask in asks])
    lasts = np.array([len(ask.prompt_ids) + ask.num_output - 1 for ask in asks])
    token_s = np.full(len(asks), np.nan)
    ttft = np.full(len(asks), np.nan)
    itl: list[np.ndarray] = []
    now_s = used = busy_s = 0.0
    added = 0
    for _ in range(MAX_STEPS):
        while added < len(asks) and arrivals[added] <= now_s:
            scheduler.add(_request(trace, added), waited_s=now_s - arrivals[added])
            added += 1
        plan = scheduler.schedule()
        if plan is None:
            if added == len(asks):
                break
            now_s = float(arrivals[added])
            continue
        elapsed_s = device.seconds(shape_of(plan))
        now_s += elapsed_s
        busy_s += elapsed_s
        used += elapsed_s * scheduler.stats().num_blocks_used / trace.num_blocks
        ids = plan.request_ids[plan.sample_rows]
        is_last = plan.sampling.position == lasts[ids]
        token_ids = np.where(is_last, STOP_ID, OTHER_ID).astype(np.int32)
        got = scheduler.commit(plan, StepOutput(token_ids, {}, {}), elapsed_s).request_ids
        is_first = np.isnan(token_s[got])
        ttft[got[is_first]] = now_s - arrivals[got[is_first]]
        itl.append(now_s - token_s[got[~is_first]])
        token_s[got] = now_s
    else:
        raise RuntimeError(f"{trace.name} was not through after {MAX_STEPS} steps")
    stats = scheduler.stats()
    is_short = np.array([len(ask.prompt_ids) <= short_tokens for ask in asks])
    return Outcome(
        ttft=ttft,
        ttft_short=ttft[is_short],
        itl=np.concatenate(itl),
        output_rate=stats.generation_tokens_total / (now_s - float(arrivals[0])),
        recomputed=stats.recomputed_tokens_total,
        preemptions=stats.preemptions_total,
        kv_use=used / busy_s,
        makespan=now_s,
    )


def _request(trace: Trace, index: int) -> Request:
    ask = trace.asks[index]
    stopping = StoppingParams(ask.max_tokens, stop_token_ids=frozenset({STOP_ID}))
    return Request(index, ask.prompt_ids, SamplingParams(temperature=0.0), stopping)
