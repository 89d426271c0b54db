"""The native CPU runner: the model recorded once, replayed by `rung_kernels` in two calls a step."""

from rung.runner.native.runner import NativeRunner

__all__ = ["NativeRunner"]
