"""The two sockets between the processes: the segment's connection, and gRPC calls with the real messages.

Messages of one channel arrive in order, each after a delay. Where a process ends or a connection is reset, calls under
way fail with UNAVAILABLE, and the message or its answer is lost with the socket. Invariant: what is sent is bytes of
the real protobuf messages; the two processes share no object.

Not responsible for: HTTP/2, and names of files (see grammar_process.py for who listens).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from tools.simulation.event_loop import SimLoop
from tools.simulation.world import Process, World

LONGEST_DELAY_S = 0.002
_RETRY_S = 0.01


class SimSocket:
    """One end of a connection that carries nothing but its end."""

    def __init__(self, process: Process) -> None:
        self.process, self._world = process, process.world
        self.peer: SimSocket
        self.closed = False
        self.segment_fd = -1
        """On the grammar process's end: the descriptor that came with the connection."""
        self.acknowledged = False
        self._receiving: list[tuple[SimLoop, asyncio.Future[bytes]]] = []
        process.at_end.append(self.close)

    @staticmethod
    def pair(first: Process, second: Process) -> tuple[SimSocket, SimSocket]:
        """Return both ends of a new connection."""
        one, other = SimSocket(first), SimSocket(second)
        one.peer, other.peer = other, one
        return one, other

    def setblocking(self, flag: bool) -> None:
        """Return: nothing blocks."""

    async def recv_on(self, loop: SimLoop) -> bytes:
        """Return b"" when either end is closed."""
        if self.closed or self.peer.closed:
            return b""
        future = loop.create_future()
        self._receiving.append((loop, future))
        return bytes(await future)

    def close(self) -> None:
        """Hang up. The peer notices a moment later."""
        if not self.closed:
            self.closed = True
            self.peer.hung_up()

    def hung_up(self) -> None:
        """Let the waiting `recv_on` return, a moment later."""
        for loop, future in self._receiving:
            loop.call_later(self._world.between(0, LONGEST_DELAY_S), _resolve, future)
        self._receiving.clear()

    def __enter__(self) -> SimSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _resolve(future: asyncio.Future[bytes]) -> None:
    if not future.done():
        future.set_result(b"")


class SimListener:
    """Where a grammar process accepts engines."""

    def __init__(self) -> None:
        self._waiting: list[SimSocket] = []
        self._accepting: asyncio.Future[SimSocket] | None = None

    def setblocking(self, flag: bool) -> None:
        """Return: nothing blocks."""

    def connect(self, sock: SimSocket) -> None:
        """Queue a connection."""
        self._waiting.append(sock)
        if self._accepting is not None and not self._accepting.done():
            self._accepting.set_result(self._waiting.pop(0))

    async def accept_on(self, loop: SimLoop) -> SimSocket:
        """Return the next connection."""
        if self._waiting:
            return self._waiting.pop(0)
        self._accepting = loop.create_future()
        return await self._accepting


class Aborted(Exception):
    """A servicer ended a call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class _Context:
    """What a servicer uses of a gRPC context."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """End the call."""
        raise Aborted(code, details)


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """Return the error that a client sees."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


class SimServer:
    """The gRPC server of one process."""

    def __init__(self, process: Process, loop: SimLoop, servicer: Any) -> None:
        self.process, self.loop, self._servicer = process, loop, servicer
        self.channels: list[SimChannel] = []
        process.at_end.append(self.reset)

    def reset(self) -> None:
        """Break every connection."""
        for channel in list(self.channels):
            channel.broken(self)

    async def handle(self, name: str, request: Any) -> tuple[bytes, grpc.StatusCode, str]:
        """Run one call; return the bytes of its answer, or its status."""
        try:
            response = await getattr(self._servicer, name)(request, _Context())
        except Aborted as error:
            return b"", error.code, error.details
        except Exception as error:  # as grpc does
            return b"", grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}"
        return response.SerializeToString(), grpc.StatusCode.OK, ""


class _Call:
    """A call under way."""

    def __init__(self, reply: asyncio.Future[Any]) -> None:
        self.reply = reply
        self.task: asyncio.Task[Any] | None = None
        self.over = False

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """End the client's side."""
        if not self.reply.done():
            self.reply.set_exception(rpc_error(code, details))


class SimChannel:
    """What the link and the stub use of `grpc.aio.Channel`: `unary_unary` and `close`."""

    def __init__(
        self,
        world: World,
        client: SimLoop,
        find: Callable[[], SimServer | None],
        passes: Callable[[str, Any], None],
    ) -> None:
        """Args: see below.

        find: returns the server that listens at the channel's address, if any does.
        passes: called with the method and the request when a call is sent, and when its answer arrives.
        """
        self._world, self._client, self._find, self._passes = world, client, find, passes
        self._server: SimServer | None = None
        self._calls: list[_Call] = []
        self._last_ns = [0, 0]
        """When the last message arrives, in each direction."""
        self._closed = False

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., Any]:
        """Return a function that makes one call."""
        name = method.rsplit("/", 1)[1]

        async def call(request: Any, *, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            data, kind = request_serializer(request), type(request)
            try:
                async with asyncio.timeout(timeout):
                    self._passes(name, request)
                    reply = await self._call(name, kind, data, wait_for_ready=wait_for_ready)
                    self._passes(name, request)
            except TimeoutError:
                raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            return response_deserializer(reply)

        return call

    async def _call(self, name: str, kind: Any, data: bytes, *, wait_for_ready: bool) -> bytes:
        server = await self._connected(wait_for_ready=wait_for_ready)
        call = _Call(self._client.create_future())
        self._calls.append(call)
        self._world.note(f"call {name}")
        try:
            server.loop.call_later(self._delay(0), self._begin, server, call, name, kind, data)
            return bytes(await call.reply)
        finally:
            call.over = True
            self._calls.remove(call)
            if call.task is not None and not call.task.done() and server.process.alive:
                server.loop.call_later(self._delay(0), call.task.cancel)

    async def _connected(self, *, wait_for_ready: bool) -> SimServer:
        while self._server is None or not self._server.process.alive:
            self._server = self._find()
            if self._server is not None:
                self._server.channels.append(self)
            elif self._closed or not wait_for_ready:
                raise rpc_error(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            else:
                await asyncio.sleep(_RETRY_S)
        return self._server

    def _delay(self, direction: int) -> float:
        """Return the delay of a message that arrives after those before it."""
        at_ns = self._world.now_ns + int(self._world.between(0, LONGEST_DELAY_S) * 1e9)
        self._last_ns[direction] = max(at_ns, self._last_ns[direction])
        return (self._last_ns[direction] - self._world.now_ns) / 1e9

    def _begin(self, server: SimServer, call: _Call, name: str, kind: Any, data: bytes) -> None:
        """On the server's loop: the request has arrived."""
        if call.over or call.reply.done() or self._server is not server:
            return  # the connection broke with the message on its way

        def done(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and self._server is server:
                self._client.call_later(self._delay(1), self._end, call, *task.result())

        call.task = server.loop.create_task(server.handle(name, kind.FromString(data)), name=f"rpc {name}")
        call.task.add_done_callback(done)

    def _end(self, call: _Call, data: bytes, code: grpc.StatusCode, details: str) -> None:
        """On the client's loop: the answer has arrived."""
        if call.reply.done():
            return
        if code is grpc.StatusCode.OK:
            call.reply.set_result(data)
        else:
            call.fail(code, details)

    def broken(self, server: SimServer) -> None:
        """The connection is gone: calls under way fail a moment later; the server's side of them is cancelled."""
        server.channels.remove(self)
        if self._server is server:
            self._server = None
        for call in list(self._calls):
            delay_s = self._world.between(0, LONGEST_DELAY_S)
            self._client.call_later(delay_s, call.fail, grpc.StatusCode.UNAVAILABLE, "Socket closed")
            if call.task is not None and server.process.alive:
                server.loop.call_later(delay_s, call.task.cancel)

    async def close(self, grace: float | None) -> None:
        """End the channel: calls under way have `grace` seconds."""
        self._closed = True
        until_s = self._client.time() + (grace or 0.0)
        while self._calls and self._client.time() < until_s:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(min(_RETRY_S * 10, until_s - self._client.time()))
        for call in list(self._calls):
            call.reply.cancel()
        if self._server is not None and self in self._server.channels:
            self._server.channels.remove(self)

    def __repr__(self) -> str:
        return f"<SimChannel calls={len(self._calls)}>"
