"""The command line in this process: exit codes, sentences, and what `serve` becomes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rung.cli import main as cli
from rung.cli import serve
from rung.cli.models import FoundModel, find_model
from rung.config import ModelOptions, ServeConfig, Settings, byte_count, serve_config
from rung.errors import ConfigError, ModelError
from rung.frontend_limits import FRONTEND_LIMITS
from rung.version import __version__


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("RUNG_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RUNG_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def frontend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A frontend of our version beside the interpreter, and an `execv` that only records."""
    python = tmp_path / "bin/python"
    binary = python.with_name("rung-frontend")
    binary.parent.mkdir()
    binary.write_text(f"#!/bin/sh\necho rung-frontend {__version__}\n")
    binary.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return binary


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.touch()
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "serve"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--no-such"], "--no-such"),
        (["serve", "--por", "1"], "--por"),
        (["serve", "a", "b"], "unrecognized"),
        (["engine"], "--listen"),
        (["engine", "--listen", "0.0.0.0:1"], "--insecure"),
        (["engine", "--listen", "unix:/nonexistent/e.sock", "--max-num-seqs", "1.5"], "--max-num-seqs"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_64(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 64
    assert out == ""
    assert err.startswith("rung: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["engine", "--help"], ["--version"]])
def test_help_and_version_exit_0(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 0
    assert "rung" in capsys.readouterr().out


def test_an_unknown_model_exits_65_and_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "pull", "smolm2")
    assert (code, out) == (65, "")
    assert "smollm2" in err


def test_models_lists_names_and_whether_they_are_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "models")
    header, *rows = out.splitlines()
    assert code == 0
    assert header.split() == ["NAME", "MODEL", "SIZE", "LICENCE", "HERE"]
    assert any(row.startswith("smollm2 ") and row.endswith("no") for row in rows)


def test_pull_prints_the_path_alone(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert run(capsys, "pull", str(model)) == (0, f"{model}\n", "")


def test_an_interrupt_leaves_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rung.cli.pull.pull", interrupted)
    assert run(capsys, "pull", "smollm2") == (130, "", "\n")


def test_a_path_keeps_its_own_name_and_a_registered_name_is_served(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_model(str(model)) == FoundModel(model, None)
    monkeypatch.setattr("rung.cli.models.resolve", lambda *_: model)
    assert find_model("smollm2").name == "smollm2"
    assert find_model("org/name:file.gguf").name == "org/name"


def test_serve_becomes_the_frontend_with_the_engine_behind_it(
    frontend: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def execv(binary: Path, arguments: list[str]) -> None:
        assert binary == frontend
        calls.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        run(capsys, "serve", str(model), "--port", "0", "--runner", "fake", "--drain-timeout", "0.5")
    (arguments,) = calls
    split = arguments.index("--")
    assert arguments[:split] == [
        str(frontend), "--host", "127.0.0.1", "--port", "0", "--drain-timeout", "0.5",
    ]  # fmt: skip
    engine = arguments[split + 1 :]
    assert engine[:6] == [sys.executable, "-m", "rung", "engine", str(model), "--exit-with-parent"]
    assert "--runner=fake" in engine
    assert not any(argument.startswith("--listen") for argument in engine)


def test_every_frontend_setting_is_handed_on(frontend: Path, tmp_path: Path) -> None:
    config = ServeConfig(
        model="smollm2",
        host="0.0.0.0",
        port=80,
        options=ModelOptions(),
        served_model_name="mine",
        api_key_file=tmp_path / "keys",
        insecure=True,
        max_inflight_requests=5,
        max_body_bytes=1000,
        sse_keepalive_s=2.5,
        log_format="json",
        frontend_limits=(("max_queue_wait", "1.5"), ("max_prompts", "3")),
    )
    command = serve.frontend_command(config, frontend, FoundModel(tmp_path / "m.gguf", "smollm2"))
    assert command[1 : command.index("--")] == [
        "--host", "0.0.0.0", "--port", "80", "--served-model-name", "mine",
        "--api-key-file", str(tmp_path / "keys"), "--insecure", "--drain-timeout", "30",
        "--max-inflight-requests", "5", "--max-body-bytes", "1000",
        "--sse-keepalive", "2.5", "--log-format", "json",
        "--max-queue-wait", "1.5", "--max-prompts", "3",
    ]  # fmt: skip


def test_the_frontend_has_every_limit_with_the_default_that_help_shows() -> None:
    binary = Path(sys.executable).with_name(serve.FRONTEND)
    shown = subprocess.run([binary, "--help"], capture_output=True, text=True, check=True).stdout
    for limit in FRONTEND_LIMITS:
        _, _, rest = shown.partition(f"--{limit.name.replace('_', '-')} <")
        default = re.search(r"\[default: ([0-9]+)\]", rest)
        assert default is not None, limit.name
        expected = byte_count(limit.default, limit.name) if limit.kind == "bytes" else int(limit.default)
        assert int(default[1]) == expected, limit.name


def test_limits_of_the_frontend_are_checked_before_it_starts() -> None:
    given = {"max_prompts": "3", "max_unread_bytes": "1MiB", "body_timeout": "2.5"}
    limits = dict(serve_config(Settings(given, {})).frontend_limits)
    assert limits == {"max_prompts": "3", "max_unread_bytes": "1048576", "body_timeout": "2.5"}
    for name, value in (("max_prompts", "0"), ("max_unread_bytes", "much"), ("body_timeout", "-1")):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be"):
            serve_config(Settings({name: value}, {}))


def test_a_missing_frontend_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run(capsys, "serve", "smollm2")
    assert code == 64
    assert "install the package rung-frontend" in err


def test_the_frontend_is_also_found_on_the_path(
    frontend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere/python"))
    monkeypatch.setenv("PATH", str(frontend.parent))
    assert serve.find_frontend() == frontend


def test_deliberate_errors_have_their_own_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((ConfigError("no"), 64), (ModelError("no"), 65)):

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("rung.cli.pull.pull", fails)
        assert cli.main(["pull"]) == code
