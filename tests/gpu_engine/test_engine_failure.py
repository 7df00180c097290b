"""An engine that lost its device ends its server: the health check answers NOT_SERVING, and the process ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_engine.server import SERVICE, ServerError, open_server
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import FakeEngine
from tests.gpu_engine.fake_servers import ENGINE, config, parts
from tests.rpc_client import Client
from tests.waiting import eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
LOST = "CUDA error: an illegal memory access was encountered"


async def test_a_lost_device_ends_requests_with_internal_and_the_server_with_an_error(tmp_path: Path) -> None:
    engines, statuses = list[FakeEngine](), list[int]()
    settings = config(tmp_path)
    address = settings.listen

    async def watch_health() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), wait_for_ready=True):
                statuses.append(answer.status)

    async def ask() -> grpc.aio.AioRpcError:
        async with Client(address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(client.generate(pb.GenerateRequest(text="x")))
        return caught.value

    async def serve() -> None:
        async with open_server(ENGINE, settings, parts=parts(None, engines)):
            await asyncio.Event().wait()

    asking, watching, serving = (asyncio.create_task(work()) for work in (ask, watch_health, serve))
    await eventually(lambda: engines and engines[0].submitted and SERVING in statuses)
    engines[0].fail(RuntimeError(LOST))
    with pytest.raises(ServerError, match=f"the engine lost its device: {LOST}"):
        await serving
    assert (await asking).code() is grpc.StatusCode.INTERNAL
    await asyncio.gather(watching, return_exceptions=True)
    assert statuses[-2:] == [SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
    assert engines[0].closed
