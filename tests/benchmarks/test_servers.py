"""The server of a harness ends with the harness: in order at SIGTERM, and by SIGKILL where the harness is killed.

A server that ends by itself is said to have done so, with its log.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.server import EngineServer, ServerFailed, ServerOptions
from tests.waiting import alive, eventually

HARNESS = """
import sys, types
from benchmarks import __main__ as benchmarks
from benchmarks.harness.server import EngineServer, ServerOptions

def main():
    server = EngineServer(ServerOptions())
    server.argv = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
    with server:
        raise AssertionError("the server is never healthy")

sys.modules["benchmarks.faults.waiting"] = types.SimpleNamespace(main=main)
benchmarks.HARNESSES["waiting"] = ("faults", "a harness that waits for its server")
sys.exit(benchmarks.main())
"""
SERVER = """
import pathlib, signal, sys, time

def stop(*_):
    pathlib.Path(sys.argv[1]).write_text("stopped")
    sys.exit()

signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).write_text("started")
time.sleep(600)
"""


@contextmanager
def harness(state: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", HARNESS, "waiting", SERVER, str(state)]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "status", "state"), [(signal.SIGTERM, 143, "stopped"), (signal.SIGKILL, -9, "started")]
)
async def test_a_server_ends_with_its_harness(tmp_path: Path, number: signal.Signals, status: int, state: str) -> None:
    file = tmp_path / "state"
    with harness(file) as process:
        await eventually(lambda: file.exists() and file.read_text() == "started")
        (server,) = psutil.Process(process.pid).children()
        process.send_signal(number)
        assert process.wait(20) == status
        await eventually(lambda: not alive(server.pid))
    assert file.read_text() == state


ENDS_ITSELF = """
import pathlib, sys, time
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

server = grpc.server(futures.ThreadPoolExecutor(1))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
assert server.add_insecure_port(sys.argv[1])
server.start()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
print("out of memory", flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize("error", [None, KeyError("other")])
async def test_a_server_that_ended_by_itself_leaves_its_log(tmp_path: Path, error: Exception | None) -> None:
    server = EngineServer(ServerOptions())
    server.argv = [sys.executable, "-c", ENDS_ITSELF, server.address, str(tmp_path / "end")]

    async def use() -> None:
        with server:
            (tmp_path / "end").touch()
            await eventually(lambda: server.status is not None)
            if error is not None:
                raise error

    with pytest.raises(ServerFailed if error is None else KeyError) as raised:
        await use()
    said = str(raised.value) if error is None else "".join(raised.value.__notes__)
    assert "the engine ended with 3 while it was in use" in said
    assert "out of memory" in said
    assert server.log.read_text() == "out of memory\n"
    server.log.unlink()
