"""`rung pull`: fetches a model, checks a named one that is here already, and prints its path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rung.config import DEFAULT_MODEL, cache_dir
from rung.hub import pull

if TYPE_CHECKING:
    from rung.config import Settings


def run(settings: Settings) -> int:
    """Prints the path alone on standard output, so that scripts can use it."""
    print(pull(settings.text("model") or DEFAULT_MODEL, cache_dir()).absolute())
    return 0
