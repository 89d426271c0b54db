"""`rung models`: the named models. Also what the other commands call to find one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rung.config import cache_dir
from rung.hub import NAMED_MODELS, resolve
from rung.hub.cache import ModelCache

if TYPE_CHECKING:
    from rung.config import Settings


class FoundModel(NamedTuple):
    """A model on this machine; `name` is what clients call it, None for the file's own name."""

    path: Path
    name: str | None


def find_model(model: str) -> FoundModel:
    """The model that the user means, fetched if it is not here."""
    path = resolve(model, cache_dir())
    is_path = model not in NAMED_MODELS and Path(model).expanduser().exists()
    return FoundModel(path.absolute(), None if is_path else model.partition(":")[0])


def run(settings: Settings) -> int:
    """Prints a table of the named models."""
    del settings
    cache = ModelCache(cache_dir(), print)
    rows = [("NAME", "MODEL", "SIZE", "LICENCE", "HERE")]
    for model in NAMED_MODELS.values():
        here = "yes" if cache.find(model) else "no"
        rows.append((model.name, model.title, f"{model.file_bytes / 1e6:.0f} MB", model.license, here))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
