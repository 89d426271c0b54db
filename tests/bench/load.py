"""A closed-loop load generator: each user sends its next request when the last answer is complete."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass

import httpx

# fmt: off
WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week",
    "company", "system", "program", "question", "work", "government", "number", "night", "point",
]
# fmt: on


@dataclass(frozen=True)
class Answer:
    """One finished request. Seconds on the client's clock."""

    ttft_s: float
    tpot_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class LoadResult:
    """What one concurrency gave."""

    num_users: int
    wall_s: float
    answers: list[Answer]

    @property
    def output_tokens_per_s(self) -> float:
        """Over the whole run, prefill included."""
        return sum(answer.num_output_tokens for answer in self.answers) / self.wall_s

    def median_ms(self, field: str) -> float:
        """Median over requests of `ttft_s` or `tpot_s`, in ms."""
        return 1e3 * statistics.median(getattr(answer, field) for answer in self.answers)

    def worst_ms(self, field: str) -> float:
        """The slowest request's `ttft_s` or `tpot_s`, in ms."""
        return 1e3 * max(getattr(answer, field) for answer in self.answers)


def make_prompt(num_words: int, rng: random.Random) -> str:
    """Random words, so that no prefix is shared."""
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


async def complete(client: httpx.AsyncClient, model: str, prompt: str, num_output: int) -> Answer:
    """One streamed completion."""
    request = {
        "model": model, "prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start = time.perf_counter()
    first = last = 0.0
    usage = None
    async with client.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            usage = event.get("usage") or usage
            if event["choices"]:
                last = time.perf_counter()
                first = first or last
    assert usage is not None
    output = usage["completion_tokens"]
    return Answer(first - start, (last - first) / max(output - 1, 1), usage["prompt_tokens"], output)


async def run(
    url: str, model: str, num_users: int, requests_per_user: int, num_words: int, num_output: int
) -> LoadResult:
    """Closed loop at one concurrency."""
    rng = random.Random(num_users)
    prompts = [make_prompt(num_words, rng) for _ in range(num_users * requests_per_user)]
    answers: list[Answer] = []

    async def user() -> None:
        while prompts:
            answers.append(await complete(client, model, prompts.pop(), num_output))

    limits = httpx.Limits(max_connections=num_users, max_keepalive_connections=num_users)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(num_users)))
        return LoadResult(num_users, time.perf_counter() - start, answers)
