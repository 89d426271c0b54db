"""The three wheels: their versions agree, and none sends pip to a registry for a sibling."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SIBLINGS = ("rung", "rung-frontend", "rung-kernels")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Built as users build them, but in the cargo profile that is already compiled."""
    folder = tmp_path_factory.mktemp("wheels")
    environment = {
        **os.environ,
        "MATURIN_PEP517_ARGS": "--profile dev",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run(
        [*command, "-w", folder, ".", "./kernels", "./frontend"], cwd=ROOT, check=True, env=environment
    )
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


def metadata(wheel: Path) -> Message:
    """The METADATA file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def names(wheel: Path) -> list[str]:
    """Files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_all_three_have_one_version(wheels: dict[str, Path]) -> None:
    assert set(wheels) == set(SIBLINGS)
    assert len({metadata(wheel)["Version"] for wheel in wheels.values()}) == 1


def test_no_wheel_asks_for_a_sibling(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        requirements = [line.lower() for line in metadata(wheel).get_all("Requires-Dist", [])]
        assert not [line for line in requirements if line.startswith(("rung", "kernels"))]


def test_torch_is_an_extra(wheels: dict[str, Path]) -> None:
    requirements = metadata(wheels["rung"]).get_all("Requires-Dist", [])
    assert [line for line in requirements if line.startswith("torch") and "extra == 'torch'" in line]
    assert not [line for line in requirements if line.startswith("torch") and "extra" not in line]


def test_each_wheel_holds_its_part(wheels: dict[str, Path]) -> None:
    engine = names(wheels["rung"])
    assert "rung/engine.py" in engine
    assert not [name for name in engine if name.startswith(("tests/", "engine/"))]
    assert any(name.endswith(".data/scripts/rung-frontend") for name in names(wheels["rung-frontend"]))
    assert "rung_kernels/py.typed" in names(wheels["rung-kernels"])
    assert "cp310-abi3" in wheels["rung-kernels"].name
