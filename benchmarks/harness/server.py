"""The engine as a subprocess: start with flags, wait until healthy, stop.

Invariant: the process that this starts is gone when the context ends, however it ends. Not here: requests (`client`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the engine is started with; names and meanings are those of `python -m gpu_engine serve`."""

    model: str = "embedded"
    dtype: str = "bfloat16"
    num_threads: int = 2
    num_draft_tokens: int = 7
    drafter: str = "ngram"
    max_batch_size: int = 16
    grammar_backend: str = "llguidance"
    prefix_cache: bool = True
    """False where the same prompts are asked again and again, and are to be paid for each time."""
    extra: tuple[str, ...] = ()
    """Further flags, passed on as they are."""

    def argv(self, listen: str) -> list[str]:
        """Return the command line."""
        return [
            sys.executable, "-m", "gpu_engine", "serve",
            "--model", self.model,
            "--listen", listen,
            "--dtype", self.dtype,
            "--num-threads", str(self.num_threads),
            "--num-draft-tokens", str(self.num_draft_tokens),
            "--drafter", self.drafter,
            "--max-batch-size", str(self.max_batch_size),
            "--grammar-backend", self.grammar_backend,
            "--prefix-cache", str(self.prefix_cache).lower(),
            *self.extra,
        ]  # fmt: skip


class ServerFailed(RuntimeError):
    """The server did not become healthy; the message carries the end of its log."""


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EngineServer:
    """Context manager around one engine process. `address` is where it listens."""

    def __init__(self, options: ServerOptions, ready_timeout_s: float = 180.0) -> None:
        self.options = options
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
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self.argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            self._await_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        if error is None:
            self.log.unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        """The engine's process id while it runs."""
        return self._process.pid if self._process else None

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
def engine_address(address: str | None, options: ServerOptions) -> Iterator[str]:
    """Yield `address` when given, else the address of an engine started with `options` for as long as this lasts."""
    if address is not None:
        yield address
        return
    with EngineServer(options) as server:
        yield server.address


def _serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
