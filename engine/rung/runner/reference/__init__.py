"""The float32 torch runner: the oracle that other runners are checked against."""

import os

# How long an OpenMP thread spins at a barrier before it sleeps; read once, when torch loads the library.
# A step has hundreds of barriers. With the library's default a step takes ten times longer as soon as
# the frontend or a client wants the same cores; with no spinning at all the second core never wakes
# up in time. This is some 0.2 ms, which keeps full speed on idle cores and costs little on busy ones.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

from rung.runner.reference.kv import kv_bytes_per_block
from rung.runner.reference.runner import ReferenceRunner

__all__ = ["ReferenceRunner", "kv_bytes_per_block"]
