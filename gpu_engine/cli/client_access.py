"""How a client gets in: TLS, a certificate of its own, a bearer token; the flags that say so.

The invariant: a token goes over an encrypted channel or stays on this machine. Not here: calls (`client.py`).
"""

from __future__ import annotations

import argparse
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from gpu_engine.front.auth import HEADER
from gpu_engine.front.from_files import read_bytes
from gpu_engine.front.listening import is_local

DEFAULT_SERVER = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Access:
    """What a channel to one server is opened with."""

    tls: grpc.ChannelCredentials | None = None
    token: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Goes with every call."""
        return ((HEADER, f"Bearer {self.token}"),) if self.token else ()

    def __repr__(self) -> str:
        return f"<Access {'TLS' if self.tls else 'clear text'}, {'a token' if self.token else 'no token'}>"


ANYBODY = Access()
"""Clear text and no token: what a server takes that was told of neither."""


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--server` and the flags for TLS and tokens."""
    group = parser.add_argument_group("server", "Where it is, and how to get in.")
    group.add_argument(
        "--server",
        metavar="ADDRESS",
        default=os.environ.get("LOCKSTEP_SERVER", DEFAULT_SERVER),
        help=f"host:port or unix:/path (default: {DEFAULT_SERVER}; env: LOCKSTEP_SERVER)",
    )
    group.add_argument("--tls", action="store_true", help="TLS, with the authorities this system trusts")
    group.add_argument("--tls-ca", metavar="FILE", help="TLS, with the authorities in this PEM file")
    group.add_argument("--tls-cert", metavar="FILE", help="a certificate of our own, if the server asks for one (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    group.add_argument("--token-file", metavar="FILE", help="a bearer token is the first line of this file")


def access_of(flags: argparse.Namespace) -> Access:
    """Return what the flags ask for. Raises ValueError that names the flag."""
    if bool(flags.tls_cert) != bool(flags.tls_key):
        raise ValueError("--tls-cert and --tls-key go together")
    encrypted = flags.tls or flags.tls_ca or flags.tls_cert
    credentials = None
    if encrypted:
        ca, key, cert = (
            read_bytes(flag, Path(path)) if path else None
            for flag, path in (("--tls-ca", flags.tls_ca), ("--tls-key", flags.tls_key), ("--tls-cert", flags.tls_cert))
        )
        _check_pem(flags)
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
    token = None
    if flags.token_file:
        if not encrypted and not is_local(flags.server):
            raise ValueError(
                f"--token-file: a token would cross the network to {flags.server} in clear text; add --tls"
            )
        lines = read_bytes("--token-file", Path(flags.token_file)).decode("ascii", "replace").split()
        if not lines:
            raise ValueError(f"--token-file: {flags.token_file} is empty")
        token = lines[0]
    return Access(credentials, token)


def _check_pem(flags: argparse.Namespace) -> None:
    # gRPC would take any bytes, and then find no server.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if flags.tls_ca:
        try:
            context.load_verify_locations(flags.tls_ca)
        except ssl.SSLError as error:
            raise ValueError(f"--tls-ca: {flags.tls_ca} holds no certificates in PEM") from error
    if flags.tls_cert:
        try:
            context.load_cert_chain(flags.tls_cert, flags.tls_key, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"--tls-cert, --tls-key: {flags.tls_cert} and {flags.tls_key} must be a certificate and its "
                f"unencrypted key in PEM ({error.reason or error})"
            ) from error
