"""A TCP engine with certificates takes frontends of the same authority and nobody else."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import grpc
import pytest

from rung.config import ListenAddress, TlsFiles
from rung.engine import Heartbeat
from rung.errors import ConfigError
from rung.scheduler.batch import SchedulerStats
from rung.server.gen import engine_pb2_grpc, model_pb2
from rung.server.outbox import Publisher
from rung.server.service import EngineServer
from rung.server.tls import server_credentials
from tests.unit.engine_fixture import CALL_TIMEOUT_S, make_facts

if TYPE_CHECKING:
    from pathlib import Path

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="no openssl to make certificates with")


def openssl(*arguments: object) -> None:
    command = [str(OPENSSL), *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.cert = folder / "ca.pem"
        openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 2,
            "-keyout", folder / "ca.key", "-out", self.cert, "-subj", "/CN=test",
        )  # fmt: skip

    def issue(self, name: str) -> TlsFiles:
        """A certificate for localhost, and its key."""
        request, cert, key = (self.folder / f"{name}.{suffix}" for suffix in ("csr", "pem", "key"))
        openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-keyout", key, "-out", request, "-subj", f"/CN={name}",
        )  # fmt: skip
        names = self.folder / "names"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl(
            "x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.folder / "ca.key",
            "-CAcreateserial", "-days", 2, "-extfile", names, "-out", cert,
        )  # fmt: skip
        return TlsFiles(self.cert, cert, key)


class StillEngine:
    """Never reached: calls that need an engine are not made."""

    def submit(self, requests: object) -> None:
        raise NotImplementedError

    def abort(self, request_ids: object) -> None:
        raise NotImplementedError

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(0, 0, 0, SchedulerStats(0, 0, 0, 0, 0, 0, 0))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


def describe(address: str, credentials: grpc.ChannelCredentials) -> model_pb2.DescribeResponse:
    with grpc.secure_channel(address, credentials) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        return stub.Describe(model_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S)


def client_credentials(authority: Path, files: TlsFiles | None) -> grpc.ChannelCredentials:
    if files is None:
        return grpc.ssl_channel_credentials(authority.read_bytes())
    return grpc.ssl_channel_credentials(
        authority.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
    )


def test_only_frontends_of_the_same_authority_get_in(ours: Authority, theirs: Authority) -> None:
    credentials = server_credentials(ours.issue("engine"))
    listen = ListenAddress(host="127.0.0.1")
    server = EngineServer(StillEngine(), make_facts(), Publisher(), listen, credentials)
    address = server.start()
    try:
        accepted = client_credentials(ours.cert, ours.issue("frontend"))
        assert describe(address, accepted).model.name == "tiny"
        for stranger in (None, theirs.issue("stranger")):
            with pytest.raises(grpc.RpcError) as raised:
                describe(address, client_credentials(ours.cert, stranger))
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop("the test is over")


def test_files_that_cannot_serve_are_refused_with_their_name(ours: Authority, tmp_path: Path) -> None:
    good = ours.issue("engine")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for files, said in (
        (TlsFiles(text, good.cert, good.key), "--tls-ca"),
        (TlsFiles(good.ca, text, good.key), "--tls-cert"),
        (TlsFiles(good.ca, good.cert, ours.issue("other").key), "do not match"),
        (TlsFiles(good.ca, good.cert, tmp_path / "nothing"), "not a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            server_credentials(files)


def test_an_encrypted_key_is_refused_and_nobody_is_asked(ours: Authority, tmp_path: Path) -> None:
    good = ours.issue("engine")
    locked = tmp_path / "locked.key"
    openssl("pkey", "-in", good.key, "-aes256", "-passout", "pass:secret", "-out", locked)
    with pytest.raises(ConfigError, match="not plain PEM"):
        server_credentials(TlsFiles(good.ca, good.cert, locked))
