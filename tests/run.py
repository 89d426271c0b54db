"""Runs every tier that this machine can run, fast ones first, and prints seconds per tier.

`python -m tests.run [TIER ...]`. A tier that cannot run here is named with its reason. The last
line is `N passed, N failed, N skipped`; the exit status is 1 when anything failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Outcome:
    """Counts of one tier."""

    passed: int
    failed: int
    skipped: int


@dataclass(frozen=True)
class Tier:
    """One folder of tests, or the Rust tests; `unavailable` says why it cannot run here."""

    name: str
    needs: str
    run: Callable[[], Outcome]
    unavailable: Callable[[], str | None] = field(default=lambda: None)


def run_cargo() -> Outcome:
    """Unit, property and socket tests of the Rust crates.

    One command per crate: together they would ask for more features of shared dependencies than
    the installed packages do, and those would be compiled a second time.
    """
    outcomes = [run_cargo_package(package) for package in ("rung-frontend", "rung-kernels")]
    return Outcome(
        sum(outcome.passed for outcome in outcomes),
        sum(outcome.failed for outcome in outcomes),
        sum(outcome.skipped for outcome in outcomes),
    )


def run_cargo_package(package: str) -> Outcome:
    """The tests of one crate."""
    command = ["cargo", "test", "--locked", "-p", package]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    passed = failed = skipped = 0
    for line in process.stdout:
        counts = re.match(r"test result: .*? (\d+) passed; (\d+) failed; (\d+) ignored", line)
        if counts:
            passed += int(counts[1])
            failed += int(counts[2])
            skipped += int(counts[3])
        # One line per passing test would bury the failures.
        if not re.match(r"test .* \.\.\. ok$", line) and line.strip():
            sys.stdout.write(line)
    if process.wait() != 0 and failed == 0:
        failed = 1  # it did not compile, or a test binary died
    return Outcome(passed, failed, skipped)


def run_pytest(folder: str) -> Callable[[], Outcome]:
    """The tests of `tests/<folder>`, in a process of their own."""

    def run() -> Outcome:
        with tempfile.TemporaryDirectory() as temporary:
            report = Path(temporary) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", f"tests/{folder}", f"--junitxml={report}"]
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
            if not report.exists():
                return Outcome(0, 1, 0)
            suites = ET.parse(report).getroot().findall("testsuite")
        total, failures, errors, skipped = (
            sum(int(suite.get(key, "0")) for suite in suites)
            for key in ("tests", "failures", "errors", "skipped")
        )
        failed = failures + errors
        return Outcome(total - failed - skipped, failed or int(status not in (0, 5)), skipped)

    return run


def without_gpu() -> str | None:
    """Why the gpu tier cannot run here, if so."""
    if not any((ROOT / "tests/gpu").glob("test_*.py")):
        return "no GPU tests exist yet"
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver on this machine"
    return None


def instruction_sets() -> str:
    """Those that this machine has of those that the kernels are written for."""
    try:
        import rung_kernels
    except ImportError as error:
        return f"none, {error}"
    return ", ".join(rung_kernels.AVAILABLE_ISAS)


TIERS = (
    Tier("rust", "cargo", run_cargo),
    Tier("unit", "Python", run_pytest("unit")),
    Tier("property", "Python", run_pytest("property")),
    Tier("kernels", "rung-kernels", run_pytest("kernels")),
    Tier("contract", "rung-frontend", run_pytest("contract")),
    Tier("models", "torch, the default model", run_pytest("models")),
    Tier("e2e", "all three packages, the default model", run_pytest("e2e")),
    Tier("gpu", "an NVIDIA GPU", run_pytest("gpu"), without_gpu),
)


def main(names: list[str]) -> int:
    """Run the named tiers, or all."""
    unknown = set(names) - {tier.name for tier in TIERS}
    if unknown:
        print(f"No such tier: {', '.join(sorted(unknown))}. Known: {', '.join(t.name for t in TIERS)}.")
        return 2
    # Two test processes' worth of threads on a small machine only get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    rows = []
    total = Outcome(0, 0, 0)
    for tier in TIERS:
        if names and tier.name not in names:
            continue
        reason = tier.unavailable()
        if reason:
            rows.append(f"{tier.name:<10} skipped: {reason}")
            continue
        print(f"\n== {tier.name} (needs {tier.needs})", flush=True)
        start = time.monotonic()
        outcome = tier.run()
        seconds = time.monotonic() - start
        rows.append(
            f"{tier.name:<10} {seconds:7.1f} s  {outcome.passed:5d} passed  {outcome.failed:3d} failed"
            f"  {outcome.skipped:3d} skipped"
        )
        total = Outcome(
            total.passed + outcome.passed, total.failed + outcome.failed, total.skipped + outcome.skipped
        )
    print("\n== Tiers")
    print("\n".join(rows))
    print(f"instruction sets that the kernels were checked on: {instruction_sets()}")
    print(f"\n{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
