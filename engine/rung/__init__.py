"""Rung: an inference server for open-weight language models (engine and command line)."""

from rung.version import __version__

__all__ = ["__version__"]
