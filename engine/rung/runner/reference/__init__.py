"""The float32 torch runner: the oracle that other runners are checked against."""

from rung.runner.reference.kv import kv_bytes_per_block
from rung.runner.reference.runner import ReferenceRunner

__all__ = ["ReferenceRunner", "kv_bytes_per_block"]
