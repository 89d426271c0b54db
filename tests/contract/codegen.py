"""Writes the engine's Python protobuf code: `python -m tests.contract.codegen` from the root.

The protocol's files live under `rung/engine/v1/`, and protoc derives Python module names from
that path: `rung.engine.v1` would collide with the package `rung`. So the compiled descriptors
are renamed to where the code is kept, and protoc generates from those: no generated text is
edited, and the protobuf package (`rung.engine.v1`, what goes over the wire) stays as it is.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PROTO_ROOT = ROOT / "proto"
ENGINE_ROOT = ROOT / "engine"
SOURCE_PREFIX = "rung/engine/v1/"
TARGET_PREFIX = "rung/server/gen/"


def generate(out: Path) -> list[Path]:
    """Writes the generated modules under `out` and returns their paths relative to it."""
    with tempfile.TemporaryDirectory() as scratch:
        compiled = Path(scratch) / "source.binpb"
        protos = (PROTO_ROOT / SOURCE_PREFIX).glob("*.proto")
        sources = sorted(path.relative_to(PROTO_ROOT).as_posix() for path in protos)
        _protoc(f"-I{PROTO_ROOT}", f"--descriptor_set_out={compiled}", *sources)
        files = FileDescriptorSet.FromString(compiled.read_bytes())
        for file in files.file:
            file.name = _target_name(file.name)
            for index, dependency in enumerate(file.dependency):
                file.dependency[index] = _target_name(dependency)
        compiled.write_bytes(files.SerializeToString(deterministic=True))

        every = [file.name for file in files.file]
        services = [file.name for file in files.file if file.service]
        _protoc(f"--descriptor_set_in={compiled}", f"--python_out={out}", f"--pyi_out={out}", *every)
        _protoc(f"--descriptor_set_in={compiled}", f"--grpc_python_out={out}", *services)
    return sorted(path.relative_to(out) for path in (out / TARGET_PREFIX).glob("*_pb2*.py*"))


def _target_name(source: str) -> str:
    if not source.startswith(SOURCE_PREFIX):
        raise ValueError(f"{source} is not under {SOURCE_PREFIX}: say where its code goes")
    return TARGET_PREFIX + source.removeprefix(SOURCE_PREFIX)


def _protoc(*arguments: str) -> None:
    status = protoc.main(["protoc", *arguments])
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}: {' '.join(arguments)}")


if __name__ == "__main__":
    for path in generate(ENGINE_ROOT):
        print(f"wrote engine/{path}")
