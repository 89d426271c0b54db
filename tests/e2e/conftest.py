"""One server process per test module, of the kind the module asks for."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.server import RUNG, Server, serving


@pytest.fixture(scope="session")
def model() -> str:
    """The default model, fetched once per machine."""
    subprocess.run([RUNG, "pull", "smollm2"], check=True, timeout=600)
    return "smollm2"


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Server]:
    """The real model with every default: the reference runner."""
    with serving(model) as running:
        yield running


@pytest.fixture(scope="module")
def native_server(model: str) -> Iterator[Server]:
    """The native runner with its defaults: int8 activations, bf16 keys and values."""
    with serving(model, "--runner", "native") as running:
        yield running


@pytest.fixture(scope="module")
def fake_server(model: str) -> Iterator[Server]:
    """FakeRunner behind the real tokenizer: exact answers, quick steps, little KV memory so that
    concurrent requests preempt each other."""
    with serving(model, "--runner", "fake") as running:
        yield running
