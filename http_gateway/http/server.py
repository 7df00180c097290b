"""The gateway's process: binds the address, follows the engines, serves until SIGTERM or SIGINT.

Invariant: connections are accepted only when the engines' first reports are there, or their time is over. On SIGTERM
the listening socket closes, running answers have `drain_timeout_s`, then their calls are cancelled.

Not responsible for: what the application does (app.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from http_gateway.config import GatewayConfig
from http_gateway.engines.access import token
from http_gateway.engines.fleet import open_fleet
from http_gateway.http.app import Gateway, application
from http_gateway.http.keys import KeyFile, Keys, TenantKeys
from http_gateway.http.tls import Certificates
from service_runtime.tenants import tenant_file
from service_runtime.tokens import token_file

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than the idle time of common proxies, which then close the connection first."""


class CannotListen(RuntimeError):
    """The address cannot be bound; the message names it."""


class _Server(uvicorn.Server):
    """Ends on a signal with exit status 0; uvicorn's own way raises the signal again at its end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on SIGTERM and SIGINT for as long as the block runs; a second signal ends running answers at once."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def run(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises CannotListen, and ValueError for a wrong file."""
    with (
        contextlib.closing(listening_socket(config.listen)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(serve(config, listener))


def listening_socket(listen: str) -> socket.socket:
    """Return the socket of "host:port", or the parent's of "fd:N". Raises CannotListen."""
    host, _, port = listen.rpartition(":")
    if host == "fd":
        try:
            return socket.socket(fileno=int(port))
        except OSError as error:
            raise CannotListen(f"listen: {listen}: {error.strerror}") from error
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise CannotListen(f"listen: cannot bind {listen!r}: {error.strerror or error}") from error
    return listener


def _keys(config: GatewayConfig) -> Keys | None:
    """Return the keys of clients; None: the API is open. Raises ValueError for a wrong file."""
    if config.tenant_file:
        return TenantKeys(tenant_file(Path(config.tenant_file)))
    return KeyFile(token_file(Path(config.api_key_file), "api_key_file")) if config.api_key_file else None


async def serve(config: GatewayConfig, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT. Raises ValueError for a wrong file."""
    keys = _keys(config)
    certificates = Certificates(config) if config.tls_cert else None
    async with open_fleet(config) as fleet:
        gateway = Gateway(config, fleet, token(config))
        server = _Server(
            uvicorn.Config(
                application(config, gateway, keys),
                lifespan="off",
                ws="none",
                http="httptools",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
                ssl_context_factory=(lambda *_: certificates.context) if certificates else None,
            )
        )
        follow = asyncio.create_task(certificates.follow()) if certificates else None
        try:
            listener.listen(BACKLOG)
            scheme, name = "https" if certificates else "http", listener.getsockname()
            line = f"ready: {scheme}://{_shown(name)} in front of {', '.join(config.engines)}"
            if config.listen.startswith("fd:"):  # the parent process says that it is ready
                log.info("%s", line)
            else:
                print(line, flush=True)
            await server.serve([listener])
        finally:
            if follow is not None:
                follow.cancel()
                await asyncio.wait([follow])


def _shown(name: tuple[str, int]) -> str:
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
