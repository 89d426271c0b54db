"""Answers of the default model over HTTP, as a new user would ask for them."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/smollm2_q4_1.json").read_text())
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_capital_of_france(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="smollm2", messages=FRANCE, max_tokens=40, temperature=0
    )
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert "Paris" in (message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    client = server.client()
    whole = client.chat.completions.create(model="smollm2", messages=FRANCE, max_tokens=40, temperature=0)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=FRANCE,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_two_samples_share_nothing_but_the_prompt(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Tell me a story."}],
        n=2,
        temperature=1.2,
        seed=7,
        max_tokens=16,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    texts = [choice.message.content for choice in answer.choices]
    assert texts[0] != texts[1]
    again = server.client().chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Tell me a story."}],
        n=2,
        temperature=1.2,
        seed=7,
        max_tokens=16,
    )
    assert [choice.message.content for choice in again.choices] == texts


def test_a_stop_string_across_token_borders(server: Server) -> None:
    client = server.client()
    whole = client.chat.completions.create(model="smollm2", messages=FRANCE, max_tokens=24, temperature=0)
    text = whole.choices[0].message.content or ""
    # From the middle of one word to the middle of the next, so no token border is where it starts.
    stop = text[text.index("capital") + 3 : text.index("France") + 2]
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="smollm2", messages=FRANCE, max_tokens=24, temperature=0, stop=[stop], stream=stream
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in answer if chunk.choices]  # type: ignore[union-attr]
            cut = "".join(choice.delta.content or "" for choice in chunks)
            reason = chunks[-1].finish_reason
        else:
            cut, reason = answer.choices[0].message.content, answer.choices[0].finish_reason  # type: ignore[union-attr]
        assert cut == text[: text.index(stop)]
        assert reason == "stop"


@pytest.mark.parametrize("prompt", ["Repeat: 你好，世界。", "Repeat exactly: 🌊🌙🦀", "Повтори: привет, мир"])
def test_text_of_several_bytes_a_character_streams_whole(server: Server, prompt: str) -> None:
    client = server.client()
    request = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**request, stream=True)
        if chunk.choices
    ]
    assert "".join(pieces) == whole.choices[0].message.content
    # A character cut in two would show as U+FFFD in one piece.
    assert ("\ufffd" in "".join(pieces)) == ("\ufffd" in (whole.choices[0].message.content or ""))


def test_chat_logprobs_line_up_with_the_text(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="smollm2", messages=FRANCE, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert entries is not None
    assert answer.usage is not None
    assert len(entries) == answer.usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.token == entry.top_logprobs[0].token for entry in entries)
    shown = b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert shown.startswith(answer.choices[0].message.content or "?")


def complete(server: Server, **request: object) -> dict[str, object]:
    response = httpx.post(f"{server.url}/v1/completions", json={"model": "smollm2", **request}, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("entry", GOLDEN["prompts"][:6], ids=lambda entry: entry["name"])
def test_golden_prompts_over_http(float_server: Server, entry: dict[str, object]) -> None:
    """The whole path gives the independent implementation's ids: as text, and as ids."""
    expected, margins = entry["output_ids"], entry["margins"]
    by_ids = complete(
        float_server,
        prompt=entry["prompt_ids"],
        max_tokens=len(expected),
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    got = by_ids["choices"][0]["token_ids"]
    for step, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if ours != theirs:
            assert margins[step] < 1e-3, f"step {step}: {ours} is not {theirs}"
            break


def test_a_text_prompt_and_its_ids_are_the_same_request(server: Server) -> None:
    entry = next(entry for entry in GOLDEN["prompts"] if not entry.get("chat"))
    settings = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    by_text = complete(server, prompt=entry["text"], **settings)
    by_ids = complete(server, prompt=entry["prompt_ids"], **settings)
    assert by_text["choices"][0]["token_ids"] == by_ids["choices"][0]["token_ids"]
    assert by_text["usage"] == by_ids["usage"]


def test_the_model_is_listed(server: Server) -> None:
    models = server.client().models.list().data
    assert [model.id for model in models] == ["smollm2"]
    assert server.get("/readyz").status_code == 200
    assert server.get("/livez").status_code == 200
    assert server.get("/version").json()["version"]
