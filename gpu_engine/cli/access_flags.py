"""The flags by which a command reaches a server: its address, TLS, and a bearer token.

The invariant: a bearer token crosses a network only over TLS.

Not responsible for: the calls (see lockstep_client).
"""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path

from lockstep_client.access import DEFAULT_ADDRESS, TLS, Access, access_to, is_local
from service_runtime.from_files import read_bytes


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--server` and the flags for TLS and tokens."""
    group = parser.add_argument_group("server", "Its address, and the credentials that it asks for.")
    group.add_argument(
        "--server",
        metavar="ADDRESS",
        default=os.environ.get("LOCKSTEP_SERVER", DEFAULT_ADDRESS),
        help=f"host:port or unix:/path (default: {DEFAULT_ADDRESS}; env: LOCKSTEP_SERVER)",
    )
    group.add_argument("--tls", action="store_true", help="use TLS, with the certificate authorities of this system")
    group.add_argument("--tls-ca", metavar="FILE", help="use TLS, with the certificate authorities in this PEM file")
    group.add_argument(
        "--tls-cert", metavar="FILE", help="PEM file with a certificate of the client, if the server asks for one"
    )
    group.add_argument("--tls-key", metavar="FILE", help="PEM file with the private key of --tls-cert")
    group.add_argument("--token-file", metavar="FILE", help="file whose first line is a bearer token")


def access_of(flags: argparse.Namespace) -> Access:
    """Return the address and the credentials that the flags name. Raises ValueError that names the flag."""
    if bool(flags.tls_cert) != bool(flags.tls_key):
        raise ValueError("--tls-cert and --tls-key need each other")
    encrypted = flags.tls or flags.tls_ca or flags.tls_cert
    tls = None
    if encrypted:
        ca, key, cert = (
            read_bytes(flag, Path(path)) if path else None
            for flag, path in (("--tls-ca", flags.tls_ca), ("--tls-key", flags.tls_key), ("--tls-cert", flags.tls_cert))
        )
        _check_pem(flags)
        tls = TLS(ca=ca, cert=cert, key=key)
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
    return access_to(flags.server, tls or False, token, ())


def _check_pem(flags: argparse.Namespace) -> None:
    # gRPC takes any bytes without an error, and then reports that the server cannot be reached.
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
