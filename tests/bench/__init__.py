"""Benchmarks: figures with their conditions, never pass or fail."""
