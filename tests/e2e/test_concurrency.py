"""Thirty-two streams at once get what each gets alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai

from rung.runner.fake import expected_tokens
from tests.e2e.server import Server, poll_until

NUM_STREAMS = 32
NEAR_TIE = 1e-3


async def stream_completion(client: openai.AsyncOpenAI, request: dict[str, Any]) -> dict[str, Any]:
    """One streamed completion, folded."""
    text, token_ids, token_logprobs, top_logprobs, reason = "", [], [], [], None
    async for chunk in await client.completions.create(model="smollm2", stream=True, **request):
        for choice in chunk.choices:
            text += choice.text
            token_ids += getattr(choice, "token_ids", None) or []
            if choice.logprobs:
                token_logprobs += choice.logprobs.token_logprobs or []
                top_logprobs += choice.logprobs.top_logprobs or []
            reason = choice.finish_reason or reason
    return {
        "text": text, "token_ids": token_ids, "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs, "reason": reason,
    }  # fmt: skip


def run_alone_and_together(server: Server, requests: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    async def both() -> tuple[list[Any], list[Any]]:
        async with server.async_client() as client:
            alone = [await stream_completion(client, request) for request in requests]
            together = await asyncio.gather(*(stream_completion(client, request) for request in requests))
        return alone, list(together)

    return asyncio.run(both())


def test_exact_on_the_fake_runner(fake_server: Server) -> None:
    rng = random.Random(5)
    requests = []
    for index in range(NUM_STREAMS):
        prompt_ids = [rng.randrange(1000, 40_000) for _ in range(rng.randrange(1, 300))]
        extra: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
        request = {
            "prompt": prompt_ids,
            "max_tokens": rng.randrange(1, 120),
            "temperature": index % 2,
            "seed": index,
        }
        requests.append({**request, "extra_body": extra})
    alone, together = run_alone_and_together(fake_server, requests)
    assert together == alone
    for request, answer in zip(requests, alone, strict=True):
        oracle = expected_tokens(
            request["prompt"], request["max_tokens"], vocab_size=49152,
            seed=request["seed"], sample_index=0, temperature=request["temperature"],
        )  # fmt: skip
        assert answer["token_ids"] == list(oracle)
        assert answer["reason"] == "length"
    poll_until(lambda: fake_server.metric("rung_engine_kv_blocks_used") == 0, "all KV blocks are free again")


def make_text_requests() -> list[dict[str, Any]]:
    """Prompts of several lengths, greedy, with logprobs."""
    starts = [
        "The sea is",
        "def add(a, b):",
        "Once upon a time",
        "1, 2, 3,",
        "La capitale de",
        "Roses are red,",
    ]
    return [
        {
            "prompt": f"{starts[index % len(starts)]} {'and so ' * (index % 7)}{index}",
            "max_tokens": 3 + index % 6,
            "temperature": 0,
            "logprobs": 2,
            "extra_body": {"return_token_ids": True},
        }
        for index in range(NUM_STREAMS)
    ]


def test_bitwise_on_the_native_runner(server: Server) -> None:
    requests = make_text_requests()
    for index, request in enumerate(requests[::2]):
        request.update(temperature=0.9, seed=index)
    alone, together = run_alone_and_together(server, requests)
    # Texts, ids, reasons and every digit of every logprob.
    assert together == alone


def test_up_to_near_ties_on_the_reference_runner(reference_server: Server) -> None:
    alone, together = run_alone_and_together(reference_server, make_text_requests())
    for one, other in zip(alone, together, strict=True):
        for step, (a, b) in enumerate(zip(one["token_ids"], other["token_ids"], strict=False)):
            if a != b:
                best, second = sorted(one["top_logprobs"][step].values(), reverse=True)[:2]
                assert best - second < NEAR_TIE, f"step {step}: {a} alone, {b} among {NUM_STREAMS}"
                break
            assert abs(one["token_logprobs"][step] - other["token_logprobs"][step]) < NEAR_TIE
        else:
            assert one["text"] == other["text"]
            assert one["reason"] == other["reason"]
