"""Traces for the scheduler's simulation: who asks for what, and when. Seeded, and no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

I32 = npt.NDArray[np.int32]
VOCAB_SIZE = 32_000
# Prompts up to this are what the report calls short.
SHORT_TOKENS = 8192


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, how long its answer will be, and how long it said it may be."""

    arrival_s: float
    prompt_ids: I32
    num_output: int
    max_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests in the order of arrival, for an engine with so many KV blocks of 16 tokens."""

    name: str
    num_blocks: int
    asks: list[Ask]


def lengths(
    rng: np.random.Generator, count: int, median: float, spread: float, most: int
) -> npt.NDArray[np.int64]:
    """Lognormal lengths from 1 to `most`."""
    drawn = rng.lognormal(np.log(median), spread, count)
    return np.clip(drawn, 1, most).astype(np.int64)


def prompt(rng: np.random.Generator, length: int, head: I32 | None = None) -> I32:
    """Random ids behind a common head."""
    ids = rng.integers(2, VOCAB_SIZE, int(length)).astype(np.int32)
    return ids if head is None else np.concatenate([head, ids])


def poisson(rng: np.random.Generator, rate: float, seconds: float) -> npt.NDArray[np.float64]:
    """Arrival times of a steady stream."""
    times = np.cumsum(rng.exponential(1 / rate, int(2 * rate * seconds) + 10))
    return times[times < seconds]


def conversation(
    rng: np.random.Generator, times: npt.NDArray[np.float64], *, head: list[I32] | None = None
) -> list[Ask]:
    """Prompts around 300 tokens, answers around 200, up to 1,024 allowed."""
    prompts, outputs = lengths(rng, len(times), 300, 1.0, 4096), lengths(rng, len(times), 200, 0.8, 1024)
    heads = [None] * len(times) if head is None else [head[i] for i in rng.integers(0, len(head), len(times))]
    return [
        Ask(float(t), prompt(rng, p, h), int(o), 1024)
        for t, p, o, h in zip(times, prompts, outputs, heads, strict=True)
    ]


def chat(rng: np.random.Generator, scale: float) -> Trace:
    """A steady stream of conversations."""
    return Trace("chat", 16_384, conversation(rng, poisson(rng, 12 * scale, 20)))


def long_storm(rng: np.random.Generator, scale: float) -> Trace:
    """Conversations, and six prompts of about 60k tokens within three seconds, more than the memory holds."""
    storm = [
        Ask(float(t), prompt(rng, int(rng.integers(50_000, 70_000))), int(rng.integers(100, 400)), 1024)
        for t in rng.uniform(3, 6, 6)
    ]
    return Trace("long storm", 16_384, conversation(rng, poisson(rng, 5 * scale, 20)) + storm)


def one_long(rng: np.random.Generator, scale: float) -> Trace:
    """Conversations, and one prompt of 128k tokens."""
    long = Ask(3.0, prompt(rng, 128_000), 100, 1024)
    return Trace("one 128k prompt", 16_384, [*conversation(rng, poisson(rng, 5 * scale, 20)), long])


def shared_system(rng: np.random.Generator, scale: float) -> Trace:
    """Conversations behind one of three system prompts of 3,000 tokens."""
    heads = [prompt(rng, 3000) for _ in range(3)]
    return Trace("system prompt", 16_384, conversation(rng, poisson(rng, 12 * scale, 20), head=heads))


def rag(rng: np.random.Generator, scale: float) -> Trace:
    """Prompts around 30k tokens and short answers, beside a few conversations."""
    times = poisson(rng, 0.5 * scale, 30)
    long = [
        Ask(float(t), prompt(rng, p), int(o), 512)
        for t, p, o in zip(
            times,
            lengths(rng, len(times), 30_000, 0.2, 60_000),
            lengths(rng, len(times), 150, 0.5, 512),
            strict=True,
        )
    ]
    return Trace("30k documents", 16_384, long + conversation(rng, poisson(rng, 2 * scale, 30)))


def bursts(rng: np.random.Generator, scale: float) -> Trace:
    """Crowds that come at once, with long answers and too little memory for all of them."""
    asks = []
    for start in (0.0, 8.0, 16.0):
        times = start + np.sort(rng.uniform(0, 1.0, int(70 * scale)))
        prompts, outputs = (
            lengths(rng, len(times), 400, 0.7, 3000),
            lengths(rng, len(times), 500, 0.7, 2048),
        )
        asks += [
            Ask(float(t), prompt(rng, p), int(o), 2048)
            for t, p, o in zip(times, prompts, outputs, strict=True)
        ]
    return Trace("bursts", 3_072, asks)


TRACES: tuple[Callable[[np.random.Generator, float], Trace], ...] = (
    chat, long_storm, one_long, shared_system, rag, bursts,
)  # fmt: skip


def make_trace(make: Callable[[np.random.Generator, float], Trace], seed: int, scale: float) -> Trace:
    """The trace of that seed; `scale` multiplies how many come."""
    trace = make(np.random.default_rng([seed, TRACES.index(make)]), scale)
    return Trace(trace.name, trace.num_blocks, sorted(trace.asks, key=lambda ask: ask.arrival_s))
