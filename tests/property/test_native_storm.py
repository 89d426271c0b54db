"""Storms on the native runner: requests arrive and are aborted at random while blocks run out, and
each one that ends gets bit for bit what it gets alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.request import Request, SamplingParams, StoppingParams
from rung.runner.native import NativeRunner
from rung.scheduler import Scheduler, SchedulerConfig
from tests.native_models import make_runner, shaped

CONFIG = shaped(hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32)
NUM_BLOCKS = 20
PROMPT_LENS = (1, 15, 16, 17, 50, 120)
MAX_TOKENS = 20
MAX_STEPS = 500

Row = tuple[int, bytes]


@dataclass(frozen=True)
class Arrival:
    """A request of a storm: which prompt, when, for how long, and when it is aborted, if ever.

    All prompts begin alike. The grouped ones of one length are samples of one prompt.
    """

    prompt: int
    step: int
    max_tokens: int
    abort_step: int | None
    seed: int | None
    grouped: bool = False


@cache
def runner(kv_dtype: str, num_threads: int) -> NativeRunner:
    return make_runner("Q4_1", CONFIG, num_blocks=NUM_BLOCKS, kv_dtype=kv_dtype, num_threads=num_threads)


def make_request(request_id: int, arrival: Arrival) -> Request:
    length = PROMPT_LENS[arrival.prompt]
    prompt = np.random.default_rng(0).integers(0, CONFIG.vocab_size, length).astype(np.int32)
    sampling = SamplingParams(
        temperature=0.0 if arrival.seed is None else 1.0, seed=arrival.seed or 0, top_logprobs=1
    )
    return Request(
        request_id,
        prompt,
        sampling,
        StoppingParams(arrival.max_tokens),
        group_id=arrival.prompt if arrival.grouped else -1,
    )


def play(runner: NativeRunner, arrivals: list[Arrival], budget: int) -> list[list[Row]]:
    """Each request's ids and logprob bits."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=NUM_BLOCKS,
            block_size=16,
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            max_waiting=64,
            max_model_len=NUM_BLOCKS * 16,
        )
    )
    answers: list[list[Row]] = [[] for _ in arrivals]
    for step in range(MAX_STEPS):
        for index, arrival in enumerate(arrivals):
            if arrival.step == step:
                scheduler.add(make_request(index, arrival))
            if arrival.abort_step == step:
                scheduler.abort(index)
        plan = scheduler.schedule()
        if plan is None:
            scheduler.take_events()
            if all(arrival.step <= step for arrival in arrivals) and not scheduler.has_work:
                scheduler.check_integrity()
                return answers
            continue
        runner.forward(plan)
        events = scheduler.commit(plan, runner.sample(plan), elapsed_s=0.0)
        for index, (request_id, token) in enumerate(
            zip(events.request_ids.tolist(), events.token_ids.tolist(), strict=True)
        ):
            row = events.logprobs[index]
            answers[request_id].append((token, np.float32(row.chosen).tobytes() + row.top_logprobs.tobytes()))
    raise AssertionError(f"requests were still unfinished after {MAX_STEPS} steps")


@cache
def alone(prompt: int, seed: int | None, kv_dtype: str) -> list[Row]:
    arrival = Arrival(prompt, 0, MAX_TOKENS, None, seed)
    return play(runner(kv_dtype, 1), [arrival], budget=512)[0]


arrivals = st.builds(
    Arrival,
    prompt=st.integers(0, len(PROMPT_LENS) - 1),
    step=st.integers(0, 25),
    max_tokens=st.integers(1, MAX_TOKENS),
    abort_step=st.none() | st.integers(0, 40),
    seed=st.none() | st.integers(0, 2),
    grouped=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(
    storm=st.lists(arrivals, min_size=1, max_size=14),
    budget=st.sampled_from([6, 17, 64, 512]),
    kv_dtype=st.sampled_from(["f32", "bf16", "int8"]),
    num_threads=st.sampled_from([1, 2, 3]),
)
def test_answers_in_a_storm_are_those_alone(
    storm: list[Arrival], budget: int, kv_dtype: str, num_threads: int
) -> None:
    answers = play(runner(kv_dtype, num_threads), storm, budget)
    for arrival, answer in zip(storm, answers, strict=True):
        expected = alone(arrival.prompt, arrival.seed, kv_dtype)[: arrival.max_tokens]
        assert answer == expected[: len(answer)]
        if arrival.abort_step is None or arrival.abort_step < arrival.step:
            assert len(answer) == len(expected)
