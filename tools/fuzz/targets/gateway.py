"""Requests at the HTTP gateway, before our own service with an engine that answers at once.

The first byte of an input chooses the route, the second one headers and how the body arrives; the rest is the body.
Invariant: each request gets an answer that is JSON, or events of JSON; an error has OpenAI's shape and is the client's
fault; nothing is left behind.
"""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any, cast

import grpc

from gpu_engine.front.calls import Calls
from gpu_engine.front.servicer import EngineServicer
from http_gateway.config import GatewayConfig
from http_gateway.engines.engine import Engine
from http_gateway.engines.fleet import Fleet
from http_gateway.http.app import Gateway, application
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tools.fuzz.engine import instant_calls
from tools.fuzz.mutations import mutate_json
from tools.fuzz.rpc import DEFECTS, HANG_S, Aborted, CallContext
from tools.fuzz.target import Broken, Target, require
from tools.fuzz.words import CHAT_BODY, JSON_SCHEMA, REQUEST

ROUTES = (
    *(("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("POST", "/tokenize")),
    *(("POST", "/detokenize"), ("GET", "/v1/models"), ("GET", "/v1/models/fuzzed"), ("GET", "/health")),
    *(("GET", "/version"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("PUT", "/v1/chat/completions")),
    *(("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens")),
)
HEADERS = (
    *((), (("authorization", "Bearer key"),), (("content-length", "5"),), (("content-length", "9" * 5000),)),
    *((("traceparent", "00-" + "0" * 32),), (("origin", "http://a"),), (("content-type", "text/plain"),)),
)
CONFIG = GatewayConfig(max_body_bytes=3000, allowed_origins="http://a")
_LEAVES = 0x80
"""Flag of the second byte: the client leaves behind its body."""


class _Stream:
    """A Generate call within this process, as `Call` of the gateway reads it."""

    def __init__(self, servicer: EngineServicer, request: pb.GenerateRequest) -> None:
        self._responses: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._context = CallContext()
        self._context.write = self._write  # type: ignore[method-assign]
        self._task = asyncio.ensure_future(self._run(servicer, request.SerializeToString()))

    async def _write(self, message: Any) -> None:
        self._responses.put_nowait(message.SerializeToString())

    async def _run(self, servicer: EngineServicer, request: bytes) -> None:
        try:
            await servicer.Generate(pb.GenerateRequest.FromString(request), cast("Any", self._context))
        except Aborted:
            pass
        finally:
            self._responses.put_nowait(None)

    async def read(self) -> object:
        """Return the next response, or the end. Raises the call's error."""
        found = await self._responses.get()
        if found is not None:
            return pb.GenerateResponse.FromString(found)
        self._task.result()
        _raise_status(self._context)
        return grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stub

    def cancel(self) -> None:
        """End the call."""
        self._task.cancel()


def _raise_status(context: CallContext) -> None:
    require(context.code not in DEFECTS, f"the engine answers {context.code.name}: {context.details}")
    if context.code is not grpc.StatusCode.OK:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(context.code, nothing, nothing, context.details, None)


class _Stub:
    """The service, as a stub of it."""

    def __init__(self, servicer: EngineServicer) -> None:
        self._servicer = servicer

    def Generate(self, request: pb.GenerateRequest, metadata: Any = ()) -> _Stream:
        """Start a call."""
        return _Stream(self._servicer, request)

    def __getattr__(self, name: str) -> Any:
        async def asked(request: Any, timeout: float = 0.0, metadata: Any = ()) -> Any:
            context = CallContext()
            try:
                return await getattr(self._servicer, name)(
                    type(request).FromString(request.SerializeToString()), context
                )
            except Aborted:
                _raise_status(context)

        return asked


def http_gateway() -> Target:
    """Return the target."""
    loop = asyncio.new_event_loop()

    async def start() -> tuple[Calls, Engine, Any]:
        calls = instant_calls()
        servicer = EngineServicer(calls, version="0")
        engine = Engine("unix:/fuzzed", None, ())
        engine.stub = cast("engine_pb2_grpc.EngineAsyncStub", _Stub(servicer))
        engine.info, engine.serves = (
            await servicer.GetModelInfo(pb.GetModelInfoRequest(), cast("Any", CallContext())),
            True,
        )
        return calls, engine, application(CONFIG, Gateway(CONFIG, Fleet([engine]), ()), None)

    calls, engine, app = loop.run_until_complete(start())

    async def one(data: bytes) -> None:
        if len(data) < 2:
            return
        async with asyncio.timeout(HANG_S):
            answer = await _answered(app, data[0], data[1], data[2:])
        await asyncio.sleep(0)
        require(engine.running == 0, "a call to the engine is left behind")
        require(len(calls) == 0, "a request is left behind in the engine")
        if not data[1] & _LEAVES:
            _check(*answer)

    def close() -> None:
        loop.run_until_complete(engine.aclose())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    def mutate(data: bytes, random: Random) -> bytes:
        head = (
            data[:2]
            if len(data) > 1 and random.random() < 0.9
            else bytes([random.randrange(256), random.randrange(256)])
        )
        return head + mutate_json(data[2:], random, CHAT_BODY + JSON_SCHEMA + REQUEST)

    return Target(lambda data: loop.run_until_complete(one(data)), mutate, (*CHAT_BODY, *REQUEST), close=close)


async def _answered(app: Any, route: int, options: int, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the answer to a request."""
    method, path = ROUTES[route % len(ROUTES)]
    headers = HEADERS[options % len(HEADERS)]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    half = len(body) // 2 if options & 0x40 else len(body)
    parts = [{"type": "http.request", "body": body[:half], "more_body": half < len(body)}]
    if half < len(body):
        parts.append({"type": "http.request", "body": body[half:], "more_body": False})
    if options & _LEAVES:
        parts.append({"type": "http.disconnect"})
    waiting, sent = asyncio.Event(), list[Any]()

    async def receive() -> Any:
        if parts:
            return parts.pop(0)
        await waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        return 0, {}, b""
    found = {name.decode().lower(): value.decode() for name, value in sent[0].get("headers", ())}
    return sent[0]["status"], found, b"".join(part.get("body", b"") for part in sent[1:])


def _check(status: int, headers: dict[str, str], body: bytes) -> None:
    require(status, "a request without an answer")
    kind = headers.get("content-type", "")
    if status >= 400:
        error = json.loads(body)["error"]
        require(status < 500, f"status {status}: {error}")
        require(isinstance(error["message"], str) and error["message"], "an error without a message")
        shape = {"message", "type"} if json.loads(body).get("type") == "error" else {"message", "type", "param", "code"}
        require(error.keys() == shape, f"an error of another shape: {error}")
    elif kind.startswith("text/event-stream"):
        _check_events(body.decode())
    elif kind.startswith("application/json"):
        json.loads(body)
    elif not kind.startswith("text/plain"):
        raise Broken(f"an answer of the kind {kind!r}")


def _check_events(text: str) -> None:
    require(text.endswith("\n\n"), "events without their end")
    for event in text.removesuffix("\n\n").split("\n\n"):
        line = event.splitlines()[-1]
        require(line.startswith("data: "), f"an event without data: {event!r}")
        if line != "data: [DONE]":
            found = json.loads(line.removeprefix("data: "))
            require("error" not in found or found["error"] is None, f"an error within a stream: {found}")
