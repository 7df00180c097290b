"""Health over a real connection: statuses, changes, and a watcher that reads nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_runtime.health import HealthServicer
from tests.waiting import eventually

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3
ENGINE = "lockstep.engine.v1.Engine"


@asynccontextmanager
async def served() -> AsyncIterator[tuple[HealthServicer, str, Any]]:
    servicer, server = HealthServicer(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield servicer, address, health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop(0)


def asked(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def test_a_check_and_a_watch_see_every_status_that_lasts() -> None:
    async with served() as (servicer, _, stub), asyncio.timeout(20):
        assert (await stub.Check(asked(""))).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(asked(ENGINE))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(asked(ENGINE))
        seen = [(await watch.read()).status]
        for status in (NOT_SERVING, SERVING):
            servicer.set("", NOT_SERVING)  # no change for this watcher
            servicer.set(ENGINE, status)
            seen.append((await watch.read()).status)
        servicer.stop()
        seen.append((await watch.read()).status)
        assert seen == [UNKNOWN, NOT_SERVING, SERVING, NOT_SERVING]
        assert (await stub.Check(asked(""))).status == NOT_SERVING
        watch.cancel()
        await eventually(lambda: "watchers=0" in repr(servicer))


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, section 4.1)."""
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field without indexing and without Huffman codes (RFC 7541, section 6.2.2)."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


def watch_that_reads_nothing(address: str, service: str) -> socket.socket:
    """Open a Watch on a connection whose streams have a flow-control window of zero, so that no message can be sent."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    no_window = (4).to_bytes(2, "big") + (0).to_bytes(4, "big")  # SETTINGS_INITIAL_WINDOW_SIZE
    headers = b"".join(
        literal(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/grpc.health.v1.Health/Watch"),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    message = asked(service).SerializeToString()
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, no_window)
        + frame(1, 4, 1, headers)
        + frame(0, 1, 1, b"\x00" + len(message).to_bytes(4, "big") + message)
    )
    return connection


async def test_a_watcher_that_reads_nothing_stops_neither_others_nor_the_server() -> None:
    async with served() as (servicer, address, stub), asyncio.timeout(20):
        with closing(watch_that_reads_nothing(address, ENGINE)):
            await eventually(lambda: "watchers=1" in repr(servicer))
            servicer.set(ENGINE, SERVING)
            watch = stub.Watch(asked(ENGINE))
            assert (await watch.read()).status == SERVING
            servicer.set(ENGINE, NOT_SERVING)
            assert (await watch.read()).status == NOT_SERVING
            watch.cancel()
