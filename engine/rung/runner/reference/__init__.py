"""The float32 torch runner: the oracle that other runners are checked against."""

import os

# The OpenMP library reads this once, when torch loads it. Its default is to spin at every barrier,
# of which a step has hundreds: with the frontend on the same cores that is several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rung.runner.reference.kv import kv_bytes_per_block
from rung.runner.reference.runner import ReferenceRunner

__all__ = ["ReferenceRunner", "kv_bytes_per_block"]
