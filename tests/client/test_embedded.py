"""A server of the client's own: found, started, and gone with its starter."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lockstep_client import AsyncClient, Client, EmbeddedServerError, EngineNotInstalled
from lockstep_client.embedded import EmbeddedServer, find_engine
from tests.client.processes import gone
from tests.waiting import eventually

STUB = """
import signal, sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from service_runtime.parent_death import stop_with_stdin

flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[2:])
assert flags["stop-with-stdin"] == "true" and sys.argv[1] == "serve", sys.argv
assert flags["auth-token-file"] == flags["tenant-file"] == "", "the client has no token"
if flags.get("fail"):
    sys.exit("model: there is no such model")
stop_with_stdin()
time.sleep(float(flags.get("load-s", 0)))
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(flags["listen"])
server.start()
signal.sigwait({signal.SIGTERM}) if flags.get("waits") else signal.pause()
"""
"""A command that starts as fast as a server without a model."""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    return [sys.executable, str(path)]


@pytest.fixture(autouse=True)
def _stub_finds_the_checkout(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{root}/client")


def pid_of(client: Client | AsyncClient) -> int:
    assert client._server is not None
    assert client._server.pid is not None
    return client._server.pid


async def test_a_server_ends_with_its_client(command: list[str]) -> None:
    client = await asyncio.to_thread(Client.embedded, command=command)
    pid = pid_of(client)
    assert psutil.pid_exists(pid)
    await asyncio.to_thread(client.close)
    assert gone(pid)
    async with AsyncClient.embedded(command=command) as twin:
        pid = pid_of(twin)
    assert gone(pid)


async def test_a_start_that_is_cancelled_leaves_no_process(command: list[str]) -> None:
    client = AsyncClient.embedded(command=command, load_s=60)
    start = asyncio.create_task(client.start())
    server = client._server
    assert server is not None
    await eventually(lambda: server.pid is not None)
    pid = pid_of(client)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert gone(pid)
    await client.aclose()


@pytest.mark.parametrize(
    "load_s", [pytest.param(0, id="serving"), pytest.param(60, id="loading", marks=pytest.mark.slow)]
)
def test_a_server_ends_with_a_process_that_is_killed(command: list[str], load_s: int) -> None:
    start = "threading.Thread(target=server.start, daemon=True).start()" if load_s else "server.start()"
    program = f"""
import threading, time
from lockstep_client.embedded import EmbeddedServer
server = EmbeddedServer({{"load_s": {load_s}}}, {command!r}, 100)
{start}
while server.pid is None:
    time.sleep(0.01)
print(server.pid, flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert psutil.pid_exists(pid)
        starter.send_signal(signal.SIGKILL)
    assert gone(pid)


def test_a_server_that_does_not_serve_says_why(command: list[str]) -> None:
    why = r"ended with status 1\n.*--fail=true.*\nmodel: there is no such"
    with pytest.raises(EmbeddedServerError, match=why) as failed:
        Client.embedded(command=command, fail=True)
    assert not isinstance(failed.value, EngineNotInstalled)
    server = EmbeddedServer({"load_s": 60}, command, start_timeout_s=0.3)
    with pytest.raises(EmbeddedServerError, match=r"did not serve within 0\.3 s"):
        server.start()
    assert server.pid is None
    with pytest.raises(EmbeddedServerError, match="cannot start /nowhere/lockstep"):
        Client.embedded(command=["/nowhere/lockstep"])
    with pytest.raises(ValueError, match="listen: an embedded server sets it itself"):
        Client.embedded(listen="127.0.0.1:1")


def test_the_engine_is_found_here_then_on_the_path(tmp_path: Path) -> None:
    ours, another = tmp_path / "ours", tmp_path / "another"
    ours.write_text("#!/bin/sh\necho lockstep-engine 1.0\n")
    another.write_text("#!/bin/sh\necho lockstep 9\n")
    for path in (ours, another):
        path.chmod(0o755)
    assert find_engine(lambda name: object(), lambda name: None) == [sys.executable, "-m", "gpu_engine"]
    assert find_engine(lambda name: None, lambda name: str(ours)) == [str(ours)]
    for missing in (None, str(another)):
        with pytest.raises(EngineNotInstalled, match=r"pipx install 'lockstep-engine\[engine,llguidance\]'"):
            find_engine(lambda name: None, lambda name, missing=missing: missing)
