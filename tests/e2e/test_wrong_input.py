"""Mistakes that people make: one clear sentence and the right status, and the server goes on."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.server import RUNG, Server

CHAT = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "temperature": 0,
}
COMPLETION = {"model": "smollm2", "prompt": "hi", "max_tokens": 4, "temperature": 0}


@pytest.fixture(autouse=True)
def alive(fake_server: Server):  # type: ignore[no-untyped-def]
    """After every mistake the same process still gives the same answer."""
    url = f"{fake_server.url}/v1/completions"
    before = httpx.post(url, json=COMPLETION).json()["choices"]
    yield
    assert httpx.post(url, json=COMPLETION).json()["choices"] == before
    assert fake_server.process.poll() is None
    assert fake_server.get("/health").status_code == 200


def refused(response: httpx.Response, status: int) -> dict[str, str]:
    """The error object of a refusal in the OpenAI shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_unknown_model(fake_server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        fake_server.client().chat.completions.create(**{**CHAT, "model": "gpt-5"})
    assert caught.value.code == "model_not_found"
    assert "gpt-5" in caught.value.message
    assert "smollm2" in caught.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"s"', b"null", b'{"model": "smollm2",}', b"\xff\xfe{}"])
def test_b26_bad_json(fake_server: Server, body: bytes) -> None:
    response = httpx.post(
        f"{fake_server.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert refused(response, 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", "warm"),
        ("top_p", 1.5),
        ("n", 0),
        ("stop", ""),
    ],
)
def test_bad_values_name_their_field(fake_server: Server, field: str, value: object, stream: bool) -> None:
    response = httpx.post(
        f"{fake_server.url}/v1/chat/completions", json={**CHAT, field: value, "stream": stream}
    )
    error = refused(response, 400)
    assert error["param"] == field


@pytest.mark.parametrize("stream", [True, False])
def test_b39_a_prompt_that_does_not_fit(fake_server: Server, stream: bool) -> None:
    response = httpx.post(
        f"{fake_server.url}/v1/completions",
        json={**COMPLETION, "prompt": "word " * 20_000, "stream": stream},
        timeout=60,
    )
    error = refused(response, 400)
    assert error["code"] == "context_length_exceeded"
    # 20,000 words and the last space; the context.
    assert "20001" in error["message"]
    assert "8192" in error["message"]


def test_b41_max_tokens_above_the_room_is_an_upper_bound(fake_server: Server) -> None:
    request = {**COMPLETION, "max_tokens": 100_000_000, "ignore_eos": True}
    answer = httpx.post(f"{fake_server.url}/v1/completions", json=request, timeout=120).json()
    assert answer["choices"][0]["finish_reason"] == "length"


def test_unknown_route_and_method(fake_server: Server) -> None:
    refused(fake_server.get("/v1/nothing"), 404)
    refused(fake_server.get("/v1/chat/completions"), 405)


def test_a_body_over_the_limit(fake_server: Server) -> None:
    big = {**CHAT, "messages": [{"role": "user", "content": "a" * (33 * 1024 * 1024)}]}
    refused(httpx.post(f"{fake_server.url}/v1/chat/completions", json=big, timeout=60), 413)


def run_rung(*arguments: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run([RUNG, *arguments], capture_output=True, text=True, timeout=limit_s, check=False)


def one_sentence(result: subprocess.CompletedProcess[str]) -> str:
    """What was printed, checked to be for people."""
    assert "Traceback" not in result.stderr
    assert result.stderr.strip()
    return result.stderr


def test_a_busy_port(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_rung("serve", model, "--runner", "fake", "--port", str(port))
    assert result.returncode not in (0, 64)
    assert str(port) in one_sentence(result)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--port", "70000"], "65535"),
        (["--port", "http"], "port"),
        (["--max-num-seqs", "0"], "max-num-seqs"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_wrong_settings_exit_64_before_anything_starts(model: str, arguments: list[str], hint: str) -> None:
    result = run_rung("serve", model, *arguments)
    assert result.returncode == 64
    assert hint in one_sentence(result)


def test_a_damaged_gguf(tmp_path: Path, model: str) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(200))
    result = run_rung("serve", str(damaged), "--port", "0")
    assert result.returncode != 0
    assert "damaged.gguf" in one_sentence(result)


def test_an_unknown_model_name_lists_the_known() -> None:
    result = run_rung("serve", "smolm2", "--port", "0")
    assert result.returncode != 0
    assert "smollm2" in one_sentence(result)
