"""The checked-in protobuf code is what its sources generate, and the sources keep the lint rules."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.codegen import ENGINE_ROOT, PROTO_ROOT, TARGET_PREFIX, generate


def test_checked_in_code_is_what_the_sources_generate(tmp_path: Path) -> None:
    generated = generate(tmp_path)
    checked_in = sorted(
        path.relative_to(ENGINE_ROOT) for path in (ENGINE_ROOT / TARGET_PREFIX).glob("*_pb2*.py*")
    )
    assert generated == checked_in
    for path in generated:
        assert (ENGINE_ROOT / path).read_bytes() == (tmp_path / path).read_bytes(), (
            f"engine/{path} is not what proto/ gives: run `python -m tests.contract.codegen` "
            "with the pinned grpcio-tools"
        )


def test_generated_modules_import_beside_the_package_of_the_same_name() -> None:
    engine_pb2 = importlib.import_module("rung.server.gen.engine_pb2")
    assert engine_pb2.DESCRIPTOR.package == "rung.engine.v1"
    stub = importlib.import_module("rung.server.gen.engine_pb2_grpc")
    assert hasattr(stub, "EngineServiceStub")


def test_sources_pass_the_lint_rules() -> None:
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("the buf binary of the package buf-bin is not installed")
    result = subprocess.run(
        [str(buf), "lint", str(PROTO_ROOT)], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
