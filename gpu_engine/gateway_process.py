"""Starts and watches the gateway process, which serves OpenAI's HTTP API for this engine.

Invariant: at most one gateway runs, and it dies with this process. Its listening socket belongs to this process, so a
gateway that ends in the middle of its answers is replaced by one that takes the connections that wait. The engine never
waits for it.

Not responsible for: the HTTP API (the package http_gateway), the bound addresses (front/port/listening.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from gpu_engine.api.config import ServerConfig
from gpu_engine.sidecar.supervisor import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    PYTHON_ENVIRONMENT,
    ChildProcess,
    describe_exit,
    forward,
)
from service_runtime.parent_death import dying_with_us

log = logging.getLogger(__name__)
output_log = logging.getLogger("http_gateway")

SOCKET_NAME = "gateway.sock"
TOKEN_NAME = "gateway.token"
"""Next to the socket, of a server with tenants."""
HEALTHY_S = 5.0
"""A gateway that ran for this long is replaced at once."""
TERM_TIMEOUT_S = 3.0
"""Beyond the time that running answers have."""


def gateway_command(
    config: ServerConfig, listener: int, engine_socket: Path, token_file: Path | None = None
) -> list[str]:
    """Return the command line of the gateway; its other settings come from its environment variables.

    Args:
        config: the server's settings.
        listener: descriptor of the bound socket.
        engine_socket: where the engine listens for the gateway.
        token_file: its first token is the gateway's own; None: the engine asks for none.
    """
    tls = (("--tls-cert", config.tls_cert), ("--tls-key", config.tls_key), ("--tls-client-ca", config.tls_client_ca))
    tokens = (
        ("--api-key-file", config.auth_token_file),
        ("--tenant-file", config.tenant_file),
        ("--engine-token-file", str(token_file) if token_file else ""),
        ("--forward-keys", "true" if token_file else ""),
    )
    return [
        *(sys.executable, "-m", "http_gateway"),
        *("--listen", f"fd:{listener}"),
        *("--engine", f"unix:{engine_socket}"),
        *("--drain-timeout-s", f"{config.drain_timeout_s:g}"),
        *("--log-format", config.log_format),
        *("--log-level", config.log_level or "info"),
        *(word for flag, value in (*tls, *tokens) if value for word in (flag, value)),
    ]


def write_token(path: Path, token: str) -> None:
    """Write a token into a new file, which only this process's user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)


class HttpGateway:
    """Keeps one gateway running from `start` to `stop`."""

    def __init__(self, command: Sequence[str], listener: socket.socket, drain_timeout_s: float = 0.0) -> None:
        """Args: see below.

        command: the gateway's command line.
        listener: its bound socket, which the caller closes.
        drain_timeout_s: time that its answers have to end after SIGTERM.
        """
        self._command, self._listener = list(command), listener
        self._term_timeout_s = drain_timeout_s + TERM_TIMEOUT_S
        self._process: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self.starts = 0

    @property
    def address(self) -> str:
        """Address for HTTP clients: "host:port"."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def pid(self) -> int | None:
        """Process id of the gateway while it runs."""
        process = self._process
        return process.pid if process and process.returncode is None else None

    def start(self, background: asyncio.TaskGroup, stack: AsyncExitStack) -> None:
        """Start to run; `stack` stops it at the latest."""
        self._task = background.create_task(self.run(), name="gateway process")
        stack.push_async_callback(self.stop)

    async def stop(self) -> None:
        """End the gateway when its answers have ended, or their time is over. May be called again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def run(self) -> None:
        """Start the gateway, and start it again whenever it ends, until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            started_s = time.monotonic()
            try:
                reason = describe_exit(await self._run_once())
            except OSError as error:  # too little memory, or no process ids left, for now
                reason = str(error)
            if time.monotonic() - started_s > HEALTHY_S:
                retry_s = FIRST_RETRY_S
            log.error("the gateway process ended (%s); the next one starts in %.2f s", reason, retry_s)
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, LONGEST_RETRY_S)

    async def _run_once(self) -> int:
        process = self._process = await ChildProcess.start(
            dying_with_us(self._command),
            os.environ | PYTHON_ENVIRONMENT,
            descriptors=[self._listener.fileno()],
        )
        self.starts += 1
        log.info("gateway process %d started", process.pid)
        try:
            await forward(process.output, output_log)
            return await process.wait()
        finally:
            await self._end(process)

    async def _end(self, process: ChildProcess) -> None:
        if process.returncode is not None:
            return
        process.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._term_timeout_s):
                await process.wait()
        except TimeoutError:
            process.send(signal.SIGKILL)
            await process.wait()

    def __repr__(self) -> str:
        return f"<HttpGateway pid={self.pid} starts={self.starts}>"
