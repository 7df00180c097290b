"""A call that was aborted holds nothing, without help of the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from service_runtime.aborted_calls import AbortedCalls, forget_frames, send
from tests.waiting import eventually

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Asked:
    """A request that a method holds in its frame."""


@asynccontextmanager
async def address_of(kind: str, method: Any, *interceptors: Any) -> AsyncIterator[str]:
    """Serve one method named "/t/m" of a kind."""
    handler = getattr(grpc, f"{kind}_rpc_method_handler")(method, lambda content: Asked(), lambda answer: answer)
    server = grpc.aio.server(interceptors=interceptors)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def served(kind: str, method: Any, *interceptors: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with address_of(kind, method, *interceptors) as address, grpc.aio.insecure_channel(address) as channel:
        yield channel


async def call(channel: grpc.aio.Channel, kind: str) -> list[bytes]:
    """Send one request, and return the answers."""

    async def requests() -> AsyncIterator[bytes]:
        yield b"a"

    started = getattr(channel, kind)("/t/m")(requests() if kind.startswith("stream") else b"a")
    return [each async for each in started] if kind.endswith("stream") else [await started]


@pytest.fixture
def no_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_an_aborted_call_frees_its_request(kind: str) -> None:
    held: list[weakref.ref[Asked]] = []

    async def method(request: Any, context: Any) -> None:
        held.append(weakref.ref(request))
        try:
            raise ValueError("refused")
        except ValueError as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))

    async with served(kind, method, AbortedCalls()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel, kind)
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "refused")
        await eventually(lambda: held[0]() is None)


@pytest.mark.usefixtures("no_collector")
async def test_grpc_alone_holds_it() -> None:
    """Else the interceptor could go."""
    held: list[weakref.ref[Asked]] = []

    async def method(request: Any, context: Any) -> None:
        held.append(weakref.ref(request))
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "refused")

    async with served("unary_unary", method) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await call(channel, "unary_unary")
    assert held[0]() is not None

    def is_collected() -> bool:
        gc.collect()
        return held[0]() is None

    await eventually(is_collected)  # a step of the call's own task may be left


@pytest.mark.parametrize("kind", KINDS)
async def test_a_method_of_every_kind_may_abort(kind: str) -> None:
    async def method(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "refused")

    async with served(kind, method, AbortedCalls()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel, kind)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "refused")


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_and_other_errors_are_those_of_the_method(kind: str) -> None:
    fails = False

    async def method(request: Any, context: Any) -> bytes | None:
        if fails:
            context.set_code(grpc.StatusCode.DATA_LOSS)
            raise KeyError("a defect")
        if kind.endswith("stream"):
            await context.write(b"b")
            return None
        return b"b"

    async def generator(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"b"

    if kind.endswith("stream"):
        async with served(kind, generator, AbortedCalls()) as channel:
            assert await call(channel, kind) == [b"b"]
    async with served(kind, method, AbortedCalls()) as channel:
        assert await call(channel, kind) == [b"b"]
        fails = True
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel, kind)
        assert raised.value.code() is grpc.StatusCode.DATA_LOSS


def test_forgetting_frames_ends_where_errors_are_a_ring() -> None:
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    for each in (first, second):
        with pytest.raises(type(each)):
            raise each
    forget_frames(first)
    assert (first.__traceback__, second.__traceback__) == (None, None)


READER = """
import sys, time, grpc
call = grpc.insecure_channel(sys.argv[1]).unary_stream("/t/m")(b"a")
next(iter(call))
print("read", flush=True)
time.sleep(600)
"""


async def test_a_client_that_dies_while_it_reads_slowly_cancels_the_call() -> None:
    """Its connection breaks while a write waits for it, which gRPC reports as an error of its own."""
    ends: list[BaseException] = []

    async def method(request: Asked, context: Any) -> None:
        try:
            while True:
                await send(context, bytes(1 << 20))
        except BaseException as error:
            ends.append(error)
            raise

    async with address_of("unary_stream", method) as address:
        reader = await asyncio.create_subprocess_exec(sys.executable, "-c", READER, address, stdout=subprocess.PIPE)
        assert reader.stdout is not None
        await reader.stdout.readline()
        await asyncio.sleep(0.2)  # the window of its connection is full by now, so a write waits
        reader.kill()
        await reader.wait()
        await eventually(lambda: ends)
    assert [type(end) for end in ends] == [asyncio.CancelledError]
