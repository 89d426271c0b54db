"""Compares the versions of the three packages, which are released together and must be equal."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from rung.errors import ConfigError
from rung.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

_REMEDY = "install rung, rung-kernels and rung-frontend of one version together (in a clone: make setup)"


def check_kernels() -> None:
    """Raises `ConfigError` when `rung_kernels` is missing or of another version."""
    try:
        import rung_kernels
    except ImportError as error:
        raise ConfigError(f"The package rung-kernels cannot be imported ({error}); {_REMEDY}.") from error
    _compare("rung-kernels", rung_kernels.__version__)


def check_frontend(binary: Path) -> None:
    """Raises `ConfigError` when the frontend does not run or is of another version."""
    try:
        result = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{binary} does not run ({error}); {_REMEDY}.") from error
    # As clap prints it: "rung-frontend 0.1.0".
    _compare("rung-frontend", result.stdout.strip().rpartition(" ")[2])


def _compare(package: str, version: str) -> None:
    if version != __version__:
        raise ConfigError(
            f"{package} is version {version or 'unknown'}, but rung is {__version__}; {_REMEDY}."
        )
