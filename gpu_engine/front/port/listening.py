"""Binds the addresses of the server: the public port, and one that answers only health checks.

Invariant: an address is bound before the model is loaded, so that a port in use is reported at once. A server can be
reached only by clients that TLS, tokens or the mode of a unix socket (0600) admit.

Not responsible for: the services on the addresses (see front/servicer.py).
"""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc

from gpu_engine.api.config import ServerConfig
from gpu_engine.front.port.auth import BearerTokens
from gpu_engine.front.port.later_services import LaterServices
from gpu_engine.front.port.malformed import ParsedRequests
from gpu_engine.front.port.tls import server_credentials
from service_runtime.aborted_calls import AbortedCalls
from service_runtime.health import HealthServicer
from service_runtime.tokens import token_file

log = logging.getLogger(__name__)

LARGEST_MESSAGE_BYTES = 64 << 20
"""Above any allowed prompt, so that a prompt that is too long is refused by field and limit, not by gRPC."""
# With SO_REUSEPORT, two servers on one port would share its requests without an error.
_OWN_PORT = ("grpc.so_reuseport", 0)


class ServerError(RuntimeError):
    """The server cannot start; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Servers that are bound."""

    server: grpc.aio.Server
    """The public server."""
    services: LaterServices
    """The services of the public server, next to its health."""
    probe: grpc.aio.Server | None
    """With `health_listen`: a server for health checks in clear text and without tokens."""
    health: HealthServicer
    address: str
    """Address of the public server: "host:port" or "unix:/path"."""
    http: socket.socket | None = None
    """With `http`: the bound socket of the gateway process, which this process keeps, so that a gateway that is started
    again takes the connections that wait."""

    async def start(self) -> None:
        """Start to accept calls."""
        await self.server.start()
        if self.probe is not None:
            await self.probe.start()

    async def stop(self) -> None:
        """Cancel running calls and stop. May be called for servers that were never started."""
        await self.server.stop(None)
        if self.probe is not None:
            await self.probe.stop(None)
        if self.http is not None:
            self.http.close()


def bind(
    config: ServerConfig,
    gateway_path: Path | None = None,
    access: grpc.aio.ServerInterceptor | None = None,  # type: ignore[type-arg]  # generic only in the stub
) -> Listeners:
    """Bind the addresses; called on the event loop. Raises ServerError that names the setting at fault.

    gateway_path: a unix socket on which the public server also listens for its gateway, in clear text and with tokens.
    access: lets callers in, in place of the tokens of the configuration.
    """
    try:
        credentials = server_credentials(config) if config.tls_cert else None
        interceptors = [access] if access is not None else []
        if config.auth_token_file:
            interceptors.append(BearerTokens(token_file(Path(config.auth_token_file))))
    except ValueError as error:
        raise ServerError(str(error)) from error
    if (problem := exposure(config)) is not None:
        log.warning("%s", problem)
    services = LaterServices()
    server = grpc.aio.server(
        handlers=[services],
        interceptors=[AbortedCalls(), *interceptors, ParsedRequests(), services],
        options=[
            ("grpc.max_receive_message_length", max(LARGEST_MESSAGE_BYTES, 2 * config.max_prompt_bytes)),
            _OWN_PORT,
        ],
    )
    port = _add_port(server, "listen", config.listen, credentials)
    if gateway_path is not None:
        _add_port(server, "http", f"unix:{gateway_path}", None)
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    probe = None
    if config.health_listen:
        probe = grpc.aio.server(options=[_OWN_PORT])
        _add_port(probe, "health_listen", config.health_listen, None)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, probe)
    address = config.listen
    if not address.startswith("unix:"):
        address = f"{address.rpartition(':')[0]}:{port}"
    return Listeners(server, services, probe, servicer, address, _bind_http(config.http) if config.http else None)


def _bind_http(address: str) -> socket.socket:
    if importlib.util.find_spec("uvicorn") is None:
        raise ServerError("http: needs the extra `http`: pip install 'lockstep-engine[http]'")
    host, _, port = address.rpartition(":")
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ServerError(f"http: cannot bind {address!r}: {error.strerror or error}") from error
    return listener


def exposure(config: ServerConfig) -> str | None:
    """Return a warning when other machines can use or read this server without protection; None otherwise."""
    for setting, address in (("listen", config.listen), ("http", config.http)):
        if not address or is_local(address):
            continue
        if not (config.auth_token_file or config.tenant_file or config.tls_client_ca):
            return f"{setting}: any client that reaches {address} may use it; see auth_token_file and tls_client_ca"
        if not config.tls_cert:
            return f"{setting}: tokens and answers cross the network to {address} in clear text; see tls_cert"
    return None


def is_local(address: str) -> bool:
    """Return whether the address is a unix socket or on the loopback interface."""
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _add_port(server: grpc.aio.Server, setting: str, address: str, credentials: grpc.ServerCredentials | None) -> int:
    refuse_taken_path(setting, address)
    # A unix socket gets its mode from the current umask; no other thread of this process creates files yet.
    umask = os.umask(0o177)
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ServerError(f"{setting}: cannot bind {address!r}: {error}") from error
    finally:
        os.umask(umask)


def refuse_taken_path(setting: str, address: str) -> None:
    """Raise ServerError where another process listens on the unix socket of `address`."""
    # gRPC replaces an existing socket file; the server that listens on it would run on without an address.
    if not address.startswith("unix:"):
        return
    path = address.removeprefix("unix:").removeprefix("//")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # no listener: no file, a file of a killed server, or a path that gRPC will refuse itself
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    # A listener of this process is accepted: gRPC closes the port of a server that was never started at any time.
    if pid != os.getpid():
        raise ServerError(f"{setting}: another process ({pid}) listens on {path}")
