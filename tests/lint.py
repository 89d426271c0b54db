"""Every check that needs no test run: style, types, import rules, schema, sizes.

`python -m tests.lint`. All checks run even when one fails; the exit status says whether any did.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

MAX_SOURCE_LINES = 600
MAX_TEST_LINES = 1000

COMMANDS: tuple[tuple[str, list[str]], ...] = (
    ("ruff format", [f"{BIN}/ruff", "format", "--check", "--quiet", "."]),
    ("ruff", [f"{BIN}/ruff", "check", "--quiet", "."]),
    ("mypy", [f"{BIN}/mypy"]),
    ("import rules", [f"{BIN}/lint-imports", "--no-cache"]),
    ("buf", [f"{BIN}/buf", "lint", "proto"]),
    ("rustfmt", ["cargo", "fmt", "--check"]),
    (
        "clippy",
        [
            "cargo",
            "clippy",
            "--workspace",
            "--all-targets",
            "--features",
            "rung-kernels/python",
            "--locked",
            "--quiet",
            "--",
            "-D",
            "warnings",
        ],
    ),
)


def long_files() -> list[str]:
    """Source files beyond the size budget of CONTRIBUTING.md."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.rs", "*.pyi"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    complaints = []
    for name in listed:
        if "/gen/" in name:
            continue
        limit = MAX_TEST_LINES if "tests/" in name else MAX_SOURCE_LINES
        lines = len((ROOT / name).read_text().splitlines())
        if lines > limit:
            complaints.append(
                f"{name} has {lines} lines; the limit is {limit}: it holds more than one concern"
            )
    return complaints


def main() -> int:
    """Run all checks."""
    failed = []
    for name, command in COMMANDS:
        start = time.monotonic()
        result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        ok = result.returncode == 0
        print(f"{name:<14} {'ok' if ok else 'FAILED'}  {time.monotonic() - start:.1f} s", flush=True)
        if not ok:
            print(result.stdout + result.stderr)
            failed.append(name)
    complaints = long_files()
    print(f"{'file sizes':<14} {'FAILED' if complaints else 'ok'}")
    if complaints:
        print("\n".join(complaints))
        failed.append("file sizes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
