"""Finds models by name and keeps fetched ones in the user's cache directory."""

from rung.hub.pull import Sources, pull, resolve
from rung.hub.registry import NAMED_MODELS, NamedModel

__all__ = ["NAMED_MODELS", "NamedModel", "Sources", "pull", "resolve"]
