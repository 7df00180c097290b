"""The engine as a subprocess: start it with flags, wait until it is healthy, stop it.

Invariant: the process has ended when the context ends, also after an error, and dies with this process.
Not responsible for: requests (see client.py).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness.failure import CannotRun
from benchmarks.harness.internals import command
from service_runtime.parent_death import dying_with_us


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the engine; each has the name and the meaning of its flag of `python -m gpu_engine serve`."""

    model: str = "embedded"
    device: str = "cpu"
    dtype: str = "auto"
    quantization: str = "auto"
    num_threads: int = 2
    num_draft_tokens: int = 7
    drafter: str = "ngram"
    max_batch_size: int = 16
    grammar_backend: str = "llguidance"
    prefix_cache: bool = True
    """False in a benchmark that sends the same prompts repeatedly and measures each prefill."""
    extra: tuple[str, ...] = ()
    """Further flags, appended to the command line unchanged."""

    internal: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the engine's config classes that are no settings."""

    def argv(self, listen: str) -> list[str]:
        """Return the command line."""
        return [
            *(command(self.internal) if self.internal else (sys.executable, "-m", "gpu_engine")), "serve",
            "--model", self.model,
            "--listen", listen,
            "--device", self.device,
            "--dtype", self.dtype,
            "--num-threads", str(self.num_threads),
            "--num-draft-tokens", str(self.num_draft_tokens),
            "--drafter", self.drafter,
            "--max-batch-size", str(self.max_batch_size),
            "--grammar-backend", self.grammar_backend,
            "--prefix-cache", str(self.prefix_cache).lower(),
            # An older build, which runs to be compared, does not know the setting.
            *(() if self.quantization == "auto" else ("--quantization", self.quantization)),
            *self.extra,
        ]  # fmt: skip


class ServerFailed(CannotRun):
    """The server did not become healthy, or ended by itself; the message carries the end of its log."""


def free_ports(count: int) -> list[int]:
    """Return loopback ports that no socket has now.

    Linux gives them to no connection, nor to a server that asks for any port: the caller may listen seconds later.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    others = [port for port in range(20_000, 65_536) if not first <= port <= last] or range(first, last + 1)
    found: list[int] = []
    for port in random.SystemRandom().sample(others, len(others)):
        if len(found) == count:
            return found
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    raise CannotRun(f"there are no {count} free ports")


def free_port() -> int:
    """Return one of `free_ports`."""
    return free_ports(1)[0]


class EngineServer:
    """Context manager around one engine process. `address` is where it listens.

    `checkout` is a folder with another build of the engine: the process runs there and imports that build's packages,
    native libraries included. None runs the build that this module belongs to.
    """

    def __init__(self, options: ServerOptions, ready_timeout_s: float = 600.0, checkout: Path | None = None) -> None:
        self.options = options
        self.checkout = checkout
        self.address = f"127.0.0.1:{free_port()}"
        self.argv: Sequence[str] = options.argv(self.address)
        self._ready_timeout_s = ready_timeout_s
        descriptor, path = tempfile.mkstemp(prefix="lockstep-bench-", suffix=".log")
        os.close(descriptor)
        self.log = Path(path)
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        state = "stopped" if self._process is None else f"pid={self._process.pid}"
        return f"<EngineServer {self.address} {state} log={self.log}>"

    def __enter__(self) -> EngineServer:
        environment = dict(os.environ)
        if self.checkout is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(self.checkout), str(self.checkout / "client")])
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                dying_with_us(self.argv),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.checkout,
                env=environment,
            )
        try:
            self._await_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """End the process. The log stays after an error, and where the engine ended by itself with a failure.

        Raises:
            ServerFailed: the engine ended so, and no other error says it.
        """
        status = self.status
        self.stop()
        if status:
            failure = f"the engine ended with {status} while it was in use\n{self._tail()}"
            if error is None:
                raise ServerFailed(failure)
            error.add_note(failure)
        elif error is None:
            self.log.unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        """The engine's process id while it runs."""
        return self._process.pid if self._process else None

    @property
    def status(self) -> int | None:
        """The exit status of an engine that has ended by itself, or None."""
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """End the process: SIGTERM, ten seconds, then SIGKILL to its whole session."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _await_healthy(self) -> None:
        process = self._process
        assert process is not None
        deadline_s = time.monotonic() + self._ready_timeout_s
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline_s:
                if process.poll() is not None:
                    raise ServerFailed(f"the engine exited with {process.returncode}\n{self._tail()}")
                if _serving(health):
                    return
                time.sleep(0.1)
        raise ServerFailed(f"the engine was not healthy after {self._ready_timeout_s:.0f} s\n{self._tail()}")

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"command: {' '.join(self.argv)}", f"log: {self.log}", *lines[-25:]])


@contextmanager
def start_engine(options: ServerOptions, checkout: Path | None = None) -> Iterator[str]:
    """Run an engine until the context ends; yield its address. `checkout` as for `EngineServer`.

    Raises:
        ServerFailed: the engine did not become healthy.

    """
    with EngineServer(options, checkout=checkout) as server:
        yield server.address


def engine_address(address: str | None, options: ServerOptions) -> AbstractContextManager[str]:
    """Yield `address` when given, else the address of an engine started with `options` until the context ends."""
    return start_engine(options) if address is None else nullcontext(address)


def _serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
