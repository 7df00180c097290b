"""The way to a server: its address, TLS, and the token.

The invariant: a token crosses a network only over TLS. Certificates and keys are checked when the client is made,
because gRPC takes any bytes and then reports that the server cannot be reached.

Not responsible for: the calls (see client.py and async_client.py).
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
ADDRESS_VARIABLE = "LOCKSTEP_SERVER"

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (("grpc.max_receive_message_length", -1),)

Token = str | Callable[[], str]
"""A bearer token, or a function that returns the current one; it is called before each call."""


@dataclass(frozen=True, slots=True, repr=False)
class TLS:
    """TLS for a channel; each value is a path of a PEM file, or its bytes.

    Attributes:
        ca: the authorities that may have signed the server's certificate. None: those of this system.
        cert: a certificate of the client, for a server with `tls_client_ca`; `key` belongs to it.
        key: the unencrypted private key of `cert`.
        server_name: the name in the server's certificate, where it is not the host of the address.

    """

    ca: str | Path | bytes | None = None
    cert: str | Path | bytes | None = None
    key: str | Path | bytes | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials. Raises ValueError that names `ca`, `cert` or `key`."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls.cert, tls.key: each needs the other")
        ca, cert, key = (
            _read(f"tls.{name}", value) for name, value in (("ca", self.ca), ("cert", self.cert), ("key", self.key))
        )
        if ca is not None:
            try:
                ssl.create_default_context(cadata=ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise ValueError("tls.ca: holds no certificates in PEM") from error
        for name, pem in (("cert", cert), ("key", key)):
            if pem is not None and b"-----BEGIN" not in pem:
                raise ValueError(f"tls.{name}: is not in PEM")
        return grpc.ssl_channel_credentials(ca, key, cert)

    @property
    def options(self) -> Sequence[tuple[str, str]]:
        """Options of the channel."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()


@dataclass(frozen=True, slots=True, repr=False)
class Access:
    """A checked address with its credentials."""

    address: str
    credentials: grpc.ChannelCredentials | None
    options: Sequence[tuple[str, str | int]]
    token: Token | None
    extra: tuple[tuple[str, str], ...]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of the next call."""
        if self.token is None:
            return self.extra
        token = self.token if isinstance(self.token, str) else self.token()
        return (*self.extra, ("authorization", f"Bearer {token}"))

    def __repr__(self) -> str:
        return f"<Access {self.address}{' TLS' if self.credentials else ''}{' token' if self.token else ''}>"


def access_to(address: str | None, tls: TLS | bool, token: Token | None, metadata: Sequence[tuple[str, str]]) -> Access:
    """Return the access, checked. Raises ValueError that names the argument.

    `address` is "host:port" or "unix:/path"; None is the environment's LOCKSTEP_SERVER, else 127.0.0.1:50051.
    """
    address = address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    if "://" in address:
        raise ValueError(f"address: {address!r} must be host:port or unix:/path, without a scheme")
    secure = TLS() if tls is True else tls or None
    if token is not None and secure is None and not is_local(address):
        raise ValueError(f"token: it would cross the network to {address} in clear text; give tls=True or tls=TLS(...)")
    options: list[tuple[str, str | int]] = [*CHANNEL_OPTIONS, *(secure.options if secure else ())]
    return Access(address, secure.credentials() if secure else None, options, token, tuple(metadata))


def is_local(address: str) -> bool:
    """Return whether the address is a unix socket or on the loopback interface."""
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(name: str, value: str | Path | bytes | None) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    try:
        return Path(value).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: cannot read {value}: {error.strerror}") from error
