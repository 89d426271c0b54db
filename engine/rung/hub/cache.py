"""Fetched model files on disk: complete or absent, whoever else fetches or dies meanwhile.

Knows no network; a caller's function brings the bytes. One folder per model under
`<cache>/models/`, replaced files by rename, fetches one at a time under a file lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from rung.errors import ModelError
from rung.hub.digest import CHUNK_BYTES, sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rung.hub.registry import NamedModel


class ModelCache:
    """The cache directory's `models` folder. Nothing is created before the first fetch."""

    def __init__(self, cache_dir: Path, report: Callable[[str], None]) -> None:
        self._root = cache_dir / "models"
        self._report = report

    def path_of(self, model: NamedModel) -> Path:
        """Where the model's file is, or will be."""
        return self._root / model.name / model.file_name

    def find(self, model: NamedModel) -> Path | None:
        """The file if it is here whole. Compares the size: files appear by rename, never in parts."""
        path = self.path_of(model)
        try:
            return path if path.stat().st_size == model.file_bytes else None
        except OSError:
            return None

    def is_intact(self, model: NamedModel) -> bool:
        """Whether the file is here and has the right digest. Reads all of it."""
        path = self.find(model)
        return path is not None and sha256_of(path) == model.file_sha256

    def store(self, model: NamedModel, fetch: Callable[[Path], IO[bytes]], *, verify: bool) -> Path:
        """Return the file, fetching it first if it is not here (or, with `verify`, not intact).

        fetch: given an empty folder to work in, opens the file's content for reading. Called by one
        process at a time; the others wait and then find its result.
        """
        try:
            with self._locked(model):
                if self.is_intact(model) if verify else self.find(model):
                    return self.path_of(model)
                with self._work_folder(model) as folder:
                    return self._place(model, fetch(folder), folder)
        except OSError as error:
            raise ModelError(f"the model cache {self._root} cannot be used: {error}") from error

    @contextmanager
    def _locked(self, model: NamedModel) -> Iterator[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        # The lock file stays: removing it would let two processes lock two files of one name.
        with (self._root / f"{model.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._report(f"Waiting for another process that fetches {model.name}.")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _work_folder(self, model: NamedModel) -> Iterator[Path]:
        """Beside the result, so that the final rename stays on one file system."""
        folder = self._root / f"{model.name}.partial"
        # Left over when a process was killed; the lock says that nobody uses it.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _place(self, model: NamedModel, content: IO[bytes], folder: Path) -> Path:
        """Copy, check and rename: the file has its final name only when all its bytes are right."""
        unchecked = folder / "unchecked"
        digest = hashlib.sha256()
        num_bytes = 0
        with content, unchecked.open("wb") as file:
            while chunk := content.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > model.file_bytes:
                    break
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if num_bytes != model.file_bytes or digest.hexdigest() != model.file_sha256:
            raise ModelError(
                f"what was fetched for {model.name} is not {model.file_name}: size or SHA-256 differ from "
                f"those on record ({model.file_bytes} bytes, {model.file_sha256}); nothing was kept"
            )
        path = self.path_of(model)
        path.parent.mkdir(exist_ok=True)
        unchecked.replace(path)
        return path
