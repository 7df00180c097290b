"""A server that ends: health says so first, running requests end, new ones are UNAVAILABLE; over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_engine.server import SERVICE, Server, open_server
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import FakeEngine, answers_with
from tests.gpu_engine.fake_servers import ENGINE, config, parts
from tests.gpu_engine.http_calls import ASK, get, until_healthy
from tests.rpc_client import Client
from tests.waiting import eventually

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Closing:
    """A server on a fake engine, which a test closes while it looks at it from outside."""

    def __init__(self, tmp_path: Path, **fields: object) -> None:
        self.engines: list[FakeEngine] = []
        self._config = config(tmp_path, drain_timeout_s=20.0, health_listen=f"unix:{tmp_path}/health", **fields)
        self._close = asyncio.Event()
        self._ready: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())
        self.health = f"unix:{tmp_path}/health"

    async def _run(self) -> None:
        async with open_server(ENGINE, self._config, parts=parts(None, self.engines)) as server:
            self._ready.set_result(server)
            await self._close.wait()

    async def ready(self) -> Server:
        return await self._ready

    async def closes(self) -> None:
        """Begin to close; return when the probes' address says NOT_SERVING."""
        async with grpc.aio.insecure_channel(self.health) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            statuses = aiter(watch)
            assert (await anext(statuses)).status == SERVING
            self._close.set()
            assert (await anext(statuses)).status == NOT_SERVING

    def end_the_running_requests(self) -> None:
        (engine,) = self.engines
        for request in engine.submitted:
            for event in answers_with("z")(request):
                engine.emit(request, event)

    async def closed(self) -> None:
        async with asyncio.timeout(30):
            await self._task


@contextlib.asynccontextmanager
async def closing(tmp_path: Path, **fields: object) -> AsyncIterator[Closing]:
    server = Closing(tmp_path, **fields)
    try:
        yield server
    finally:
        await server.closed()


async def test_health_comes_first_running_requests_end_and_new_ones_are_unavailable(tmp_path: Path) -> None:
    """Of the native API, and of the gateway."""
    async with closing(tmp_path, http="127.0.0.1:0") as server:
        ready = await server.ready()
        assert ready.http_address is not None
        await until_healthy(ready.http_address)
        async with Client(ready.address) as client:

            async def ask() -> list[pb.GenerateResponse]:
                return [r async for r in client.generate(pb.GenerateRequest(text="x"))]

            running = asyncio.create_task(ask())
            by_http = asyncio.create_task(get(ready.http_address, "/v1/chat/completions", ASK))
            await eventually(lambda: len(server.engines[0].submitted) == 2)
            await server.closes()
            with pytest.raises(grpc.aio.AioRpcError, match="the server is shutting down") as refused:
                await ask()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert not running.done()
            assert not by_http.done()
            server.end_the_running_requests()
            assert (await running)[-1].finish_reason == pb.FINISH_REASON_STOP
            status, answer = await by_http
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "z")
        await server.closed()


ENDS_WHILE_IT_LOADS = """
import asyncio, sys, threading
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.server import Parts, serve
def load(config, progress):
    print("loading", flush=True)
    threading.Event().wait(60)
asyncio.run(serve(EngineConfig(), ServerConfig(listen=f"unix:{sys.argv[1]}/s", grammar="none"), None, print,
    Parts(load, lambda config, model, channel, grammar: None)))
"""


def as_first_process() -> list[str]:
    """Return the words before a command that make it the first process of a namespace; skip where that is forbidden."""
    words = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a pid namespace")
    return words


def test_the_first_process_of_a_container_ends_on_sigterm_while_it_loads(root: Path, tmp_path: Path) -> None:
    command = [*as_first_process(), sys.executable, "-c", ENDS_WHILE_IT_LOADS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"loading\n"
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
        finally:
            process.kill()
