"""`python -m rung engine` as a child: how it starts, what it says, and every way in which it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from rung.runner.fake import expected_tokens
from rung.server.gen import step_pb2
from tests.model_files import VOCAB, write_gguf
from tests.unit.engine_fixture import Client, make_submit

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 120.0
HELD_ENGINE = """
import sys, time
from rung.cli.main import main
from rung.runner.fake import FakeRunner

class HeldRunner(FakeRunner):
    def forward(self, plan):
        time.sleep(3600)

import rung.runner.fake
rung.runner.fake.FakeRunner = HeldRunner
sys.exit(main(sys.argv[1:]))
"""
FAILING_ENGINE = """
import sys
from rung.cli.main import main
from rung.runner.fake import FakeRunner

class FailingRunner(FakeRunner):
    def forward(self, plan):
        raise RuntimeError("the device is gone")

import rung.runner.fake
rung.runner.fake.FakeRunner = FailingRunner
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket, whatever the test is called."""
    with tempfile.TemporaryDirectory(prefix="rung") as path:
        yield Path(path)


class Child:
    """An engine process that listens; its standard error is kept."""

    def __init__(self, arguments: list[str], program: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, "engine", *arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("RUNG_")},
        )
        self.lines: list[str] = []
        self._listening = threading.Event()
        self.address = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("Engine listening on "):
                self.address = line.split()[-1]
                self._listening.set()
        self._listening.set()

    def wait_listening(self) -> Child:
        assert self._listening.wait(WAIT_S)
        assert self.address, "it ended before it listened:\n" + "".join(self.lines)
        return self

    def wait(self) -> int:
        status = self.process.wait(timeout=WAIT_S)
        self._reader.join()
        return status

    @property
    def text(self) -> str:
        return "".join(self.lines)


@contextmanager
def engine_child(*arguments: object, program: tuple[str, ...] = ("-m", "rung")) -> Iterator[Child]:
    child = Child([str(argument) for argument in arguments], list(program))
    try:
        yield child.wait_listening()
    finally:
        child.process.kill()
        child.wait()
        assert child.process.stdin is not None
        assert child.process.stderr is not None
        child.process.stdin.close()
        child.process.stderr.close()


def run_engine(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rung", "engine", *map(str, arguments)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=WAIT_S
    )


def answers(address: str) -> bool:
    """Whether a request over this address gets what the oracle says."""
    with Client(address) as client:
        client.submit(make_submit([1], [5, 6], max_tokens=5))
        (row,) = client.read_until_ended(1)
    return row.tokens == expected_tokens([5, 6], 5, vocab_size=VOCAB)


def test_it_serves_and_says_what_it_serves(model: Path, folder: Path) -> None:
    with engine_child(
        model, "--runner", "fake", "--listen", f"unix:{folder}/e.sock", "--max-num-seqs", 4
    ) as child:
        assert child.address == f"unix:{folder}/e.sock"
        assert answers(child.address)
        assert (folder / "e.sock").stat().st_mode & 0o077 == 0
        for said in ("tiny", "fake", "KV cache", " reserve = ", "128 tokens", "4 sequences"):
            assert said in child.text


def test_closing_its_standard_input_ends_it(model: Path, folder: Path) -> None:
    listen = f"unix:{folder}/e.sock"
    with engine_child(model, "--runner", "fake", "--listen", listen, "--exit-with-parent") as child:
        assert answers(child.address)
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.wait() == 0


def test_a_child_engine_ignores_interrupts_and_sigterm_ends_its_sessions(model: Path, folder: Path) -> None:
    listen = f"unix:{folder}/e.sock"
    with engine_child(model, "--runner", "fake", "--listen", listen, "--exit-with-parent") as child:
        child.process.send_signal(signal.SIGINT)
        assert answers(child.address)
        with Client(child.address) as client:
            client.read_step()
            child.process.send_signal(signal.SIGTERM)
            assert client.status() == (grpc.StatusCode.UNAVAILABLE, "The engine is shutting down.")
        assert child.wait() == 0
        assert "Traceback" not in child.text


def test_a_live_row_gets_its_terminal_event_when_the_engine_is_stopped(model: Path, folder: Path) -> None:
    listen = f"unix:{folder}/e.sock"
    with engine_child(
        model, "--runner", "fake", "--fake-step-ms", 20, "--listen", listen
    ) as child, Client(child.address) as client:  # fmt: skip
        client.submit(make_submit([1], max_tokens=None))
        while not client.fold.row(1).tokens:
            client.read()
        child.process.send_signal(signal.SIGINT)
        (row,) = client.read_until_ended(1)
        assert row.finished is not None
        assert row.finished.error.code == step_pb2.ENGINE_ERROR_CODE_DRAINING
        assert client.status()[0] == grpc.StatusCode.UNAVAILABLE
        assert child.wait() == 0


def test_a_second_interrupt_ends_an_engine_that_hangs(model: Path, folder: Path) -> None:
    listen = f"unix:{folder}/e.sock"
    with engine_child(
        model, "--runner", "fake", "--listen", listen, program=("-c", HELD_ENGINE)
    ) as child, Client(child.address) as client:  # fmt: skip
        client.submit(make_submit([1]))
        while client.read_step().step_age_ms == 0:
            pass
        child.process.send_signal(signal.SIGTERM)
        # Signals of two kinds, since two of one kind that both wait are delivered as one.
        child.process.send_signal(signal.SIGINT)
        assert child.wait() in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_a_dead_engine_fails_its_rows_dumps_its_state_and_exits_70(model: Path, folder: Path) -> None:
    listen = f"unix:{folder}/e.sock"
    with engine_child(
        model, "--runner", "fake", "--listen", listen, program=("-c", FAILING_ENGINE)
    ) as child, Client(child.address) as client:  # fmt: skip
        for handle in (1, 2):
            client.submit(make_submit([handle]))
            (row,) = client.read_until_ended(handle)
            assert row.finished is not None
            assert row.finished.error.code == step_pb2.ENGINE_ERROR_CODE_INTERNAL
        assert client.status()[0] == grpc.StatusCode.UNAVAILABLE
        assert child.wait() == 70
        assert "the device is gone" in child.text
        assert "engine state: Heartbeat(" in child.text
        assert 'File "' in child.text


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(model: Path, folder: Path) -> None:
    path = folder / "e.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    arguments = (model, "--runner", "fake", "--listen", f"unix:{path}")
    with engine_child(*arguments) as child:
        assert answers(child.address)
        second = run_engine(*arguments)
        assert second.returncode == 64
        assert "Another engine" in second.stderr
        assert answers(child.address)


def test_what_is_no_socket_is_left_alone(model: Path, folder: Path) -> None:
    path = folder / "precious"
    path.write_text("text")
    result = run_engine(model, "--runner", "fake", "--listen", f"unix:{path}")
    assert result.returncode == 64
    assert "not a socket" in result.stderr
    assert path.read_text() == "text"


def test_a_tcp_port_is_served_and_a_busy_one_reported(model: Path) -> None:
    arguments = (model, "--runner", "fake", "--insecure", "--listen")
    with engine_child(*arguments, "127.0.0.1:0") as child:
        assert not child.address.endswith(":0")
        assert answers(child.address)
        busy = run_engine(*arguments, child.address)
        assert busy.returncode == 64
        assert child.address in busy.stderr
        assert "Traceback" not in busy.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-model-len", "129"], "made for 128"),
        (["--max-model-len", "64", "--kv-cache-memory", "256"], "--kv-cache-memory 256 --max-model-len 32"),
        (["--kv-cache-memory", "1"], "not one block"),
        (["--kv-cache-memory", "100000GiB"], "These would fit: "),
    ],
)
def test_memory_that_does_not_fit_exits_64(
    model: Path, folder: Path, arguments: list[str], said: str
) -> None:
    result = run_engine(model, "--runner", "fake", "--listen", f"unix:{folder}/e.sock", *arguments)
    assert result.returncode == 64
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_context_that_the_memory_cannot_hold_is_reduced_and_said(model: Path, folder: Path) -> None:
    listen = f"unix:{folder}/e.sock"
    with engine_child(model, "--runner", "fake", "--listen", listen, "--kv-cache-memory", 512) as child:
        assert "64 tokens (the model was made for 128" in child.text


def test_a_damaged_model_exits_65_with_one_sentence(folder: Path) -> None:
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(200))
    result = run_engine(damaged, "--runner", "fake", "--listen", f"unix:{folder}/e.sock")
    assert result.returncode == 65
    assert "damaged.gguf" in result.stderr
    assert "Traceback" not in result.stderr


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from rung.cli import main; sys.exit(main.main())"


def test_the_default_runner_serves_without_torch(model: Path, folder: Path) -> None:
    with engine_child(
        model, "--listen", f"unix:{folder}/e.sock", program=("-c", WITHOUT_TORCH)
    ) as child, Client(child.address) as client:  # fmt: skip
        client.submit(make_submit([1], [5, 6], max_tokens=5))
        (row,) = client.read_until_ended(1)
        assert len(row.tokens) == 5
        assert "native" in child.text


def test_without_torch_the_reference_runner_says_what_to_install(model: Path, folder: Path) -> None:
    result = subprocess.run(
        [
            sys.executable, "-c", WITHOUT_TORCH, "engine", str(model),
            "--runner", "reference", "--listen", f"unix:{folder}/e.sock",
        ],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert result.returncode == 64
    assert "rung[torch]" in result.stderr
