"""What this machine can do at most: the limits that serving figures are set against."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.bench.host import cpu_name


@dataclass(frozen=True)
class MachineLimits:
    """Best of several runs, all cores.

    read_gb_s:    GB/s of a float32 matrix-vector product over 1 GiB, far larger than any cache
                  that a virtual machine can rely on; it reads each byte once.
    float32_gflops: GFLOP/s of a 1024 x 1024 x 1024 float32 matrix product (in cache).
    """

    cpu: str
    cores: int
    read_gb_s: float
    float32_gflops: float


def best_seconds(action: Callable[[], object], repeats: int) -> float:
    """The quickest of several runs, after one that warms up."""
    action()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure() -> MachineLimits:
    """Takes about two seconds and 1 GiB."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    with torch.inference_mode():
        return MachineLimits(cpu_name(), cores, read_gb_s(), float32_gflops())


def read_gb_s() -> float:
    """Of a product that reads 1 GiB once."""
    matrix, vector = torch.ones(65536, 4096), torch.ones(4096)
    return matrix.numel() * 4 / best_seconds(lambda: torch.mv(matrix, vector), 7) / 1e9


def float32_gflops() -> float:
    """Of a product that stays in cache."""
    square = torch.ones(1024, 1024)
    return 2 * 1024**3 / best_seconds(lambda: torch.mm(square, square), 9) / 1e9
