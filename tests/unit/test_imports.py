"""What importing costs: nothing heavy for the command line, no torch but in the reference runner."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import rung

HEAVY = ("torch", "grpc", "numpy", "google", "huggingface_hub", "transformers")


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_command_line_imports_nothing_heavy() -> None:
    loaded = json.loads(
        run_python(
            "import json, sys, rung, rung.cli.main, rung.cli.args\n"
            f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
        )
    )
    assert loaded == []


def test_everything_but_the_reference_runner_imports_without_torch() -> None:
    names = [
        module.name
        for module in pkgutil.walk_packages(rung.__path__, "rung.")
        if not module.name.startswith("rung.runner.reference") and module.name != "rung.__main__"
    ]
    assert "rung.server.run" in names
    assert "rung.runner.fake" in names
    loaded = json.loads(
        run_python(
            "import importlib, json, sys\n"
            "sys.modules['torch'] = None\n"
            "import rung_kernels\n"
            f"for name in {names!r}: importlib.import_module(name)\n"
            "print(json.dumps([name for name in sys.modules if name.partition('.')[0] == 'torch']))"
        )
    )
    assert loaded == ["torch"], "only the block itself"
