"""The official `openai` client against the HTTP API: streams, cancellation, error classes, side data."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.server import Server, poll_until, serving

NUM_STREAMS = 64
CHAT: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Count to ten."}],
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True},
}
PROMPT: dict[str, Any] = {"model": "smollm2", "prompt": "Count:", "temperature": 0, "max_tokens": 8}


def test_a_stream_adds_up_to_the_whole_answer(fake_server: Server) -> None:
    with fake_server.client() as client:
        whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
        content, entries, usage, reason = "", 0, None, None
        stream = client.chat.completions.create(
            **CHAT, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                entries += len(choice.logprobs.content or []) if choice.logprobs else 0
                reason = choice.finish_reason or reason
    choice = whole.choices[0]
    assert content == choice.message.content
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert entries == len(choice.logprobs.content) == 24
    assert reason == choice.finish_reason == "length"
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 24
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details is not None


def test_the_stream_helper_accumulates_the_same_message(fake_server: Server) -> None:
    request = {key: value for key, value in CHAT.items() if key != "extra_body"}
    with fake_server.client() as client, client.chat.completions.stream(**request, n=2) as stream:
        events = [event.type for event in stream]
        final = stream.current_completion_snapshot
    assert "content.delta" in events
    assert events.count("content.done") == 2
    assert [choice.index for choice in final.choices] == [0, 1]
    assert all(choice.message.role == "assistant" for choice in final.choices)


class Weather(pydantic.BaseModel):
    """An answer that a schema forces, whatever the model."""

    city: Literal["Oslo"]
    is_cold: Literal[True]


def test_structured_answers_are_parsed(fake_server: Server) -> None:
    request = {**CHAT, "max_tokens": 200, "extra_body": None}
    with fake_server.client() as client:
        parsed = client.chat.completions.parse(**request, response_format=Weather)
        assert parsed.choices[0].message.parsed == Weather(city="Oslo", is_cold=True)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(**{**request, "max_tokens": 1}, response_format=Weather)


def test_sixty_four_streams_at_once(fake_server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        request = {**CHAT, "messages": [{"role": "user", "content": f"Say {index % 8}."}]}
        text = ""
        async for chunk in await client.chat.completions.create(**request, stream=True):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return text

    async def run() -> list[str]:
        async with fake_server.async_client() as client:
            return list(await asyncio.gather(*(one(client, index) for index in range(NUM_STREAMS))))

    texts = asyncio.run(run())
    assert all(texts)
    assert texts == texts[:8] * (NUM_STREAMS // 8)


def test_b02_a_closed_stream_frees_everything(fake_server: Server) -> None:
    with fake_server.client() as client:
        request = {**CHAT, "max_tokens": 1500}
        stream = client.chat.completions.create(**request, stream=True, n=2)
        next(iter(stream))
        stream.close()
    poll_until(lambda: fake_server.metric("rung_requests_in_flight") == 0, "the request is gone", 10)
    poll_until(lambda: fake_server.metric("rung_engine_kv_blocks_used") == 0, "its blocks are free", 10)
    assert fake_server.metric("rung_engine_running") == 0


def test_errors_are_the_clients_classes(fake_server: Server) -> None:
    with fake_server.client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(**{**CHAT, "temperature": 9})
        assert bad.value.param == "temperature"
        assert bad.value.code == "invalid_request"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(**{**PROMPT, "prompt": "filler " * 50_000})
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(**{**PROMPT, "model": "gpt-9"})
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-9")
        assert client.models.retrieve("smollm2").id == "smollm2"


def test_a_stream_that_fails_raises(fake_server: Server) -> None:
    """An answer that ends with an error event is an exception for the client, not a short answer."""
    with fake_server.client() as client:
        stream = client.completions.create(
            **{**PROMPT, "max_tokens": 1500}, stream=True, extra_body={"ignore_eos": True}
        )
        iterator = iter(stream)
        next(iterator)
        fake_server.engine().kill()
        with pytest.raises(openai.APIError) as lost:
            for _ in iterator:
                pass
        assert lost.value.code == "engine_lost"
        # Nothing of this answer was shown yet: it waits for the engine to come back.
        poll_until(lambda: fake_server.get("/readyz").status_code == 200, "the engine is back", 60)
        assert client.completions.create(**PROMPT).choices[0].text


def test_scores_and_echoes(fake_server: Server) -> None:
    with fake_server.client() as client:
        tokens = fake_server.post("/tokenize", {"prompt": PROMPT["prompt"]})["tokens"]
        echoed = client.completions.create(**PROMPT, echo=True, n=2)
        plain = client.completions.create(**PROMPT)
        assert [choice.text for choice in echoed.choices] == ["Count:" + plain.choices[0].text] * 2
        assert plain.usage is not None
        assert plain.usage.prompt_tokens == len(tokens)
        assert fake_server.post("/detokenize", {"tokens": tokens})["prompt"] == "Count:"


def test_keys_and_overload_are_errors_of_their_own(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    arguments = ("--runner", "fake", "--fake-step-ms", "5", "--api-key-file", str(keys))
    with serving(model, *arguments, "--max-inflight-requests", "1") as server:
        with server.client() as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with server.client(api_key="second-key") as client:
            stream = client.completions.create(
                **{**PROMPT, "max_tokens": 1500}, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as busy:
                client.completions.create(**PROMPT)
            assert int(busy.value.response.headers["retry-after"]) >= 1
            stream.close()
            poll_until(lambda: server.metric("rung_requests_in_flight") == 0, "the place is free", 10)
            assert client.completions.create(**PROMPT).choices[0].text
