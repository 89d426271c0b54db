"""The machine by name, its load, and the memory of this process. Measures no rate."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil


def cpu_name() -> str:
    """As the kernel gives it, or the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def load_average() -> float:
    """Processes that ran or wanted to, over the last minute, this one included."""
    return os.getloadavg()[0]


def resident_bytes() -> int:
    """Memory of this process, mapped files included where they were read."""
    return int(psutil.Process().memory_info().rss)


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    return int(psutil.virtual_memory().available)
