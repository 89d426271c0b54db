"""`rung serve`: finds the model, then becomes the frontend, which starts the engine as its child."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from rung.cli.models import FoundModel, find_model
from rung.config import ServeConfig, Settings, engine_arguments, serve_config
from rung.errors import ConfigError
from rung.version_check import check_frontend, check_kernels

FRONTEND = "rung-frontend"


def run(settings: Settings) -> int:
    """Replaces this process by the frontend; returns only by an exception."""
    config = serve_config(settings)
    binary = find_frontend()
    check_frontend(binary)
    check_kernels()
    model = find_model(config.model)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(binary, frontend_command(config, binary, model))


def find_frontend() -> Path:
    """The frontend beside this interpreter, else on PATH."""
    beside = Path(sys.executable).with_name(FRONTEND)
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(FRONTEND)
    if found is None:
        raise ConfigError(
            f"The program {FRONTEND} is neither beside {sys.executable} nor on PATH; install the package "
            f"{FRONTEND} into this environment (in a clone: make setup)."
        )
    return Path(found)


def frontend_command(config: ServeConfig, binary: Path, model: FoundModel) -> list[str]:
    """The frontend's arguments. It appends `--listen unix:…` to the engine's command itself."""
    command = [str(binary), "--host", config.host, "--port", str(config.port)]
    name = config.served_model_name or model.name
    if name is not None:
        command += ["--served-model-name", name]
    if config.api_key_file is not None:
        command += ["--api-key-file", str(config.api_key_file)]
    if config.insecure:
        command.append("--insecure")
    command += ["--drain-timeout", f"{config.drain_timeout_s:g}"]
    if config.max_inflight_requests is not None:
        command += ["--max-inflight-requests", str(config.max_inflight_requests)]
    if config.max_body_bytes is not None:
        command += ["--max-body-bytes", str(config.max_body_bytes)]
    if config.sse_keepalive_s is not None:
        command += ["--sse-keepalive", f"{config.sse_keepalive_s:g}"]
    if config.log_format is not None:
        command += ["--log-format", config.log_format]
    for name, value in config.frontend_limits:
        command += [f"--{name.replace('_', '-')}", value]
    engine = [sys.executable, "-m", "rung", "engine", str(model.path), "--exit-with-parent"]
    return [*command, "--", *engine, *engine_arguments(config.options)]
