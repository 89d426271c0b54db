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
    """The real model with every default: the native runner, int8 activations, bf16 keys and values."""
    with serving(model) as running:
        yield running


@pytest.fixture(scope="module")
def float_server(model: str) -> Iterator[Server]:
    """The native runner without any quantization of its own."""
    with serving(model, "--activations", "float", "--kv-cache-dtype", "f32") as running:
        yield running


@pytest.fixture(scope="module")
def reference_server(model: str) -> Iterator[Server]:
    """The float32 torch runner, whose answers may differ in near-ties with the batch."""
    with serving(model, "--runner", "reference") as running:
        yield running


@pytest.fixture(scope="module")
def fake_server(model: str) -> Iterator[Server]:
    """FakeRunner behind the real tokenizer: exact answers, quick steps, little KV memory so that
    concurrent requests preempt each other."""
    with serving(model, "--runner", "fake") as running:
        yield running
