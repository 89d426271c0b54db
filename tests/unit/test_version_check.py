"""Packages of different versions do not run together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from rung.errors import ConfigError
from rung.version import __version__
from rung.version_check import check_frontend, check_kernels

if TYPE_CHECKING:
    from pathlib import Path


def program(folder: Path, prints: str, status: int = 0) -> Path:
    path = folder / "rung-frontend"
    path.write_text(f"#!/bin/sh\necho '{prints}'\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_equal_versions_pass(tmp_path: Path) -> None:
    check_frontend(program(tmp_path, f"rung-frontend {__version__}"))
    check_kernels()


@pytest.mark.parametrize("prints", ["rung-frontend 9.9.9", "rung-frontend", "", "1 2 3"])
def test_another_version_is_named(tmp_path: Path, prints: str) -> None:
    with pytest.raises(ConfigError, match=f"rung is {__version__}"):
        check_frontend(program(tmp_path, prints))


def test_a_frontend_that_does_not_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not run"):
        check_frontend(program(tmp_path, "", status=1))
    with pytest.raises(ConfigError, match="does not run"):
        check_frontend(tmp_path / "nothing")


def test_missing_kernels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rung_kernels", None)
    with pytest.raises(ConfigError, match="rung-kernels cannot be imported"):
        check_kernels()
