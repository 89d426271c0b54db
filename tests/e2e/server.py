"""A `rung serve` process under test: started on a free port, watched line by line, ended for sure."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

RUNG = Path(sys.executable).parent / "rung"
START_LIMIT_S = 120.0


class Server:
    """One server process and what it printed."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        command = [str(RUNG), "serve", *arguments]
        if "--port" not in arguments:
            command += ["--port", "0"]
        # The child's signal dispositions must be a shell's, whatever ran the tests.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self.lines: list[str] = []
        self._new_lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._new_lines.put(line)
        self._new_lines.put(None)

    def wait_for_line(self, pattern: str, limit_s: float = START_LIMIT_S) -> re.Match[str]:
        """The next line that matches; fails with everything printed when the process ends first."""
        while True:
            line = self._new_lines.get(timeout=limit_s)
            if line is None:
                raise AssertionError(
                    f"the server ended before a line like {pattern!r}:\n" + "\n".join(self.lines)
                )
            found = re.search(pattern, line)
            if found:
                return found

    def wait_ready(self) -> Server:
        """Returns once the server says that it can answer."""
        self.url = self.wait_for_line(r"Listening on (http://[^\s/]+)")[1]
        self.wait_for_line(r"Ready: ")
        return self

    def client(self, **options: object) -> openai.OpenAI:
        """The official client, without retries that would hide an error."""
        settings = {
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": 120,
            **options,
        }
        return openai.OpenAI(**settings)  # type: ignore[arg-type]

    def async_client(self, **options: object) -> openai.AsyncOpenAI:
        """The same, asynchronous."""
        settings = {
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": 120,
            **options,
        }
        return openai.AsyncOpenAI(**settings)  # type: ignore[arg-type]

    def get(self, path: str) -> httpx.Response:
        """A plain GET."""
        return httpx.get(self.url + path, timeout=10)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A plain POST that is answered with an object."""
        response = httpx.post(self.url + path, json=body, timeout=60)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metric(self, name: str) -> float:
        """The sum over the samples of one metric family in `/metrics`."""
        values = re.findall(
            rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", self.get("/metrics").text, re.MULTILINE
        )
        assert values, f"{name} is not in /metrics"
        return sum(map(float, values))

    def engine(self) -> psutil.Process:
        """The engine child."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "engine" in child.cmdline():
                return child
        raise AssertionError("the server has no engine child")

    def processes(self) -> list[psutil.Process]:
        """The server and everything below it."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)

    def close(self) -> None:
        """Ends the process, politely first, and whatever it left."""
        try:
            family = self.processes()
        except psutil.NoSuchProcess:
            family = []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
        self._reader.join(timeout=10)
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextmanager
def serving(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that is ready; ended afterwards."""
    server = Server(*arguments, environment=environment)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def poll_until(condition: object, what: str, limit_s: float = 30.0) -> None:
    """Asks until the condition holds. For states that only polling shows, such as a gauge."""
    import time

    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.02)
