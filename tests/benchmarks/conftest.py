"""A running fake engine for the tests of the harness. Its loop has its own thread: `main` makes its own loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from protos.engine.v1 import engine_pb2_grpc
from tests.benchmarks.fake_engine import FakeEngine, Script

Serve = Callable[[Script], tuple[str, FakeEngine]]


@pytest.fixture
def serve_fake() -> Iterator[Serve]:
    """Start fake engines on loopback ports; all stop with the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake-engine")
    thread.start()
    servers: list[grpc.aio.Server] = []

    async def start(engine: FakeEngine) -> int:
        server = grpc.aio.server()
        engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return port

    def serve(script: Script) -> tuple[str, FakeEngine]:
        engine = FakeEngine(script)
        port = asyncio.run_coroutine_threadsafe(start(engine), loop).result(10)
        return f"127.0.0.1:{port}", engine

    yield serve
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
