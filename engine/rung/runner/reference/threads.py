"""How many threads are worth starting: the cores this process may use. Starts none itself."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_cpus(root: Path = Path("/")) -> int:
    """Cores by affinity, or by the CPU quota of a control group (version 2) where that is less.

    root: where /proc and /sys are; tests have their own.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(root)]))


def _quotas(root: Path) -> list[int]:
    """Whole cores that each control group from ours to the top grants."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    base = root / "sys/fs/cgroup"
    paths = [entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")]
    groups = [group for path in paths for group in ((base / path), *(base / path).parents)]
    return [quota for group in groups if group.is_relative_to(base) for quota in _group_quota(group)]


def _group_quota(group: Path) -> list[int]:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        # A part of a core still runs a thread.
        return [] if quota == "max" else [math.ceil(int(quota) / int(period))]
    except (OSError, ValueError):
        return []
