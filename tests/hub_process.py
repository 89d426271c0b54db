"""Resolves a fake named model in a process of its own, telling and asking at every step.

`python -m tests.hub_process CACHE_DIR WHEEL`: prints "fetching" and waits for a line on standard
input before the fake download ends; prints reports and, last, the path.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

from rung.hub import NAMED_MODELS, NamedModel, Sources, resolve

MEMBER = "fake_package/Fake.gguf"
CONTENT = bytes(range(256)) * 5000


def make_wheel(path: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """A wheel with one file in it, the same bytes each time."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(zipfile.ZipInfo("fake_package/__init__.py"), "raise SystemExit('never imported')")
        wheel.writestr(zipfile.ZipInfo(member), content)
    return path


def fake_model(wheel: Path, content: bytes = CONTENT) -> NamedModel:
    """Its entry in the table: digests of that wheel and of `content`."""
    return NamedModel(
        name="fake",
        title="Fake model",
        license="Apache-2.0",
        package="fake-package",
        version="1.0",
        member=MEMBER,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
    )


def say(message: str) -> None:
    """A line that the other side can wait for."""
    print(message, flush=True)


def main() -> None:
    """See the module."""
    cache, wheel = Path(sys.argv[1]), Path(sys.argv[2])

    def download(_model: NamedModel, folder: Path) -> None:
        say("fetching")
        sys.stdin.readline()
        shutil.copy(wheel, folder)

    NAMED_MODELS["fake"] = fake_model(wheel)
    say(str(resolve("fake", cache, Sources(download=download, report=say))))


if __name__ == "__main__":
    main()
