"""The native CPU runner: the model recorded once, replayed by `rung_kernels` in two calls a step."""

from rung.runner.native.runner import NativeRunner, kv_bytes_per_block

__all__ = ["NativeRunner", "kv_bytes_per_block"]
