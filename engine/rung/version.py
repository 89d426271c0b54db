"""The version that the three packages share; `rung.version_check` compares them at start."""

__version__ = "0.1.0"
