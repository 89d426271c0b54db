"""What memory this process has and may still take, from the files of Linux. Plans nothing."""

from __future__ import annotations

import os
from pathlib import Path


def anonymous_bytes(root: Path = Path("/")) -> int | None:
    """Memory of this process that no file backs; None where the system does not say."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still take without swapping: the machine's, or its control group's if less.

    root: where /proc and /sys are; tests have their own.
    """
    limits = [*_machine_bytes(root), *_cgroup_bytes(root)]
    if limits:
        return max(0, min(limits))
    # Not Linux: everything there is, as far as POSIX can say.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _machine_bytes(root: Path) -> list[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _cgroup_bytes(root: Path) -> list[int]:
    """What each control group from ours to the top leaves; version 2 files, else those of version 1."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path may name the host's tree: then only the mount's root is there.
        for group in (folder, *folder.parents):
            if group.is_relative_to(base):
                limits += _group_bytes(group, limit, usage)
    return limits


def _group_bytes(group: Path, limit: str, usage: str) -> list[int]:
    try:
        most = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    if most == "max":
        return []
    # Clean file pages count as used but are dropped on demand.
    return [int(most) - used + int(stat.get("inactive_file", 0))]
