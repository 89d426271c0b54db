"""Credentials of a TCP engine port: mutual TLS from PEM files. Unix sockets need none."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import grpc

from rung.errors import ConfigError

if TYPE_CHECKING:
    from rung.config import TlsFiles


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that ask every client for a certificate of the same authority."""
    check(files)
    return grpc.ssl_server_credentials(
        [(files.key.read_bytes(), files.cert.read_bytes())],
        root_certificates=files.ca.read_bytes(),
        require_client_auth=True,
    )


def check(files: TlsFiles) -> None:
    """Raises `ConfigError` when the files cannot serve: gRPC itself would only log and refuse clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for what, path in (("--tls-ca", files.ca), ("--tls-cert", files.cert), ("--tls-key", files.key)):
        if not path.is_file():
            raise ConfigError(f"{what} names {path}, which is not a file; give a PEM file.")
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"--tls-ca {files.ca} is not a PEM certificate: {error}.") from error
    try:
        # An empty passphrase makes an encrypted key an error instead of a question on the terminal.
        context.load_cert_chain(files.cert, files.key, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"--tls-cert {files.cert} and --tls-key {files.key} do not match or are not plain PEM: {error}."
        ) from error
