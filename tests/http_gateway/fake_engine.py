"""An engine that answers what a test wants, after a real gateway process; and an HTTP client that sees every byte.

Not responsible for: real answers (tests/e2e/http).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Engine"].full_name
USAGE = pb.Usage(prompt_tokens=3, completion_tokens=2)
PATIENCE_S = 300.0
"""For an answer. Only a failing test waits that long."""
DONE = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, usage=USAGE)


def ask(content: str = "x", **fields: Any) -> dict[str, Any]:
    """Return a chat body."""
    return {"messages": [{"role": "user", "content": content}], **fields}


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """Answers a prompt by its text: `hang`, `flood`, `slow`, `late error`, `lost`, the name of a status, or else
    "yes"."""

    def __init__(self, names: tuple[str, ...] = ("fake",), losses: list[str] | None = None) -> None:
        self.names = names
        self.losses = [] if losses is None else losses
        """For each entry one answer to `lost` ends as if its engine was killed. Engines may share the list."""
        self.adapters: dict[str, pb.Adapter] = {}
        """By name; it lists them, and refuses a request for another one."""
        self.refused = ""
        """An adapter that it has, and whose requests it refuses."""
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.running = 0
        self.sent = 0
        """Responses of floods that the transport has taken."""
        self.address = ""
        self.health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stub

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        for kind, name in (("lora", request.lora), ("prompt_adapter", request.prompt_adapter)):
            if name and name not in self.adapters:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{kind}: there is no adapter {name!r}")
            if name and name == self.refused:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{kind}: is for no beam search")
        self.running += 1
        try:
            await self._answer(request.messages.messages[0].content if request.messages.messages else "", context)
        finally:
            self.running -= 1

    async def _answer(self, prompt: str, context: Any) -> None:
        word = prompt.split(":", 1)[0]
        if word in grpc.StatusCode.__members__:
            await context.abort(grpc.StatusCode[word], "sampling.top_p: is wrong")
        await context.write(pb.GenerateResponse(text="y"))
        if word == "hang":
            await asyncio.Event().wait()
        while word == "flood":
            await context.write(pb.GenerateResponse(text="y" * 10_000))
            self.sent += 1
        if word == "late error":
            await context.abort(grpc.StatusCode.INTERNAL, "a defect")
        if word == "lost" and self.losses:
            self.losses.pop()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if word == "slow":
            await asyncio.sleep(1.0)
        await context.write(pb.GenerateResponse(text="es"))
        await context.write(DONE)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=range(len(request.messages.messages)))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model=self.names[0],
            served_names=self.names,
            max_batch_size=4,
            max_model_len=64,
            version="0",
            max_adapter_bytes=1 << 20,
        )

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Any) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=self.adapters.values(), max_bytes=1 << 20)

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(running=self.running, num_slots=4, num_pages=10, pages_used=5)

    async def set_serving(self, serving: bool) -> None:
        """Report to gateways whether this engine serves."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set(SERVICE, status)


@contextlib.asynccontextmanager
async def served(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """Serve the engine on a port of this machine."""
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    health_pb2_grpc.add_HealthServicer_to_server(engine.health, server)
    engine.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await engine.set_serving(True)
    try:
        yield engine
    finally:
        await server.stop(None)


@dataclass(slots=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    reader: asyncio.StreamReader | None = field(default=None, repr=False)
    writer: asyncio.StreamWriter | None = field(default=None, repr=False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def head(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Return the head of a request: POST with a body, else GET."""
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "Host: test", "Connection: close"]
    if "Transfer-Encoding" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode()


async def begin(
    address: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Send a request; return its answer with an open connection after the head."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, limit=1 << 16)
    try:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        writer.write(head(path, data, headers or {}) + data)
        await writer.drain()
        first, *lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)).decode().split("\r\n")
    except BaseException:
        await close(writer)
        raise
    found = dict(line.lower().split(": ", 1) for line in lines if line)
    return Answer(int(first.split()[1]), found, reader=reader, writer=writer)


async def close(writer: asyncio.StreamWriter | None) -> None:
    """Close a connection, whatever its other end has done."""
    assert writer is not None
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def request(
    address: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Send a request; return its whole answer."""
    answer = await begin(address, path, body, headers, tls)
    assert answer.reader is not None
    answer.body = await asyncio.wait_for(answer.reader.read(), PATIENCE_S)
    await close(answer.writer)
    if answer.headers.get("transfer-encoding") == "chunked":
        answer.body = b"".join(_chunks(answer.body))
    return answer


def _chunks(data: bytes) -> list[bytes]:
    found = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        data = rest[int(size, 16) + 2 :]
    return found


async def chat(address: str, content: str = "x", **fields: Any) -> Answer:
    """Ask for a chat answer."""
    return await request(address, "/v1/chat/completions", ask(content, **fields))


async def all_serve(address: str, count: int) -> None:
    """Wait until the gateway knows that so many engines serve; on a busy machine it answers before."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            metrics = (await request(address, "/metrics")).body.decode()
            ups = [line for line in metrics.splitlines() if line.startswith("lockstep_gateway_engine_up{")]
            if sum(line.endswith(" 1.0") for line in ups) >= count:
                return
            await asyncio.sleep(0.02)
