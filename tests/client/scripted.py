"""A server that plays a script, and the two clients with one way to call them.

The invariant: the server speaks with the engine's own generated code, so a client that speaks another protocol fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from lockstep_client import Answer, AsyncClient, Client, Delta
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

Script = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterable[pb.GenerateResponse]]


def end(index: int = 0, reason: str = "STOP", **fields: Any) -> pb.GenerateResponse:
    """Return the last response of a sequence."""
    return pb.GenerateResponse(
        request_id="r",
        index=index,
        finish_reason=pb.FinishReason.Value(f"FINISH_REASON_{reason}"),
        usage=pb.Usage(prompt_tokens=3, completion_tokens=2),
        telemetry=pb.Telemetry(seed=7, backend=pb.BACKEND_LLGUIDANCE, warnings=["w"]),
        **fields,
    )


def says(*texts: str, reason: str = "STOP") -> Script:
    """Return a script that answers with these deltas."""

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        for i, text in enumerate(texts):
            yield pb.GenerateResponse(request_id="r", text=text, token_ids=[i])
        yield end(reason=reason)

    return script


@dataclass
class Scripted(engine_pb2_grpc.EngineServicer):
    """Plays `script` for each request, after the failures in `fails`."""

    script: Script = field(default_factory=lambda: says("yes"))
    fails: list[tuple[grpc.StatusCode, str]] = field(default_factory=list)
    """Each ends one call, before its first response."""
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)

    def _received(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.fails:
            context.abort(*self.fails.pop(0))

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self._received(request, context)
        yield from self.script(request, context)

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self._received(request, context)
        return pb.AbortResponse(aborted=request.request_id == "r")

    def Compile(self, request: pb.CompileRequest, context: Any) -> pb.CompileResponse:
        self._received(request, context)
        return pb.CompileResponse(grammar_id="g-1", backend=pb.BACKEND_XGRAMMAR, min_tokens=4, warnings=["w"])

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        self._received(request, context)
        return pb.GetModelInfoResponse(model="m", backends=[pb.BACKEND_XGRAMMAR], eos_token_ids=[2, 3])

    def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        self._received(request, context)
        return pb.GetStatsResponse(steps=9, finished={"STOP": 4})

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self._received(request, context)
        return pb.TokenizeResponse(token_ids=[5, 6], texts=["a", "b"] if request.with_texts else [])

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        self._received(request, context)
        texts = list(map(str, request.token_ids))
        return pb.DetokenizeResponse(text=",".join(texts), texts=texts if request.with_texts else [])


@contextmanager
def serving(servicer: Scripted, listen: str, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """Serve on `listen` and yield the address for clients."""
    server = grpc.server(ThreadPoolExecutor(4))
    engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
    port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    server.start()
    try:
        yield listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    finally:
        server.stop(None).wait()


class Twin:
    """Either client, called from a test that is a coroutine."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method that returns one value."""
        function = getattr(self.client, method)
        if isinstance(self.client, AsyncClient):
            return await function(*arguments, **options)
        return await asyncio.to_thread(function, *arguments, **options)

    async def stream(self, method: str, *arguments: Any, **options: Any) -> tuple[list[Delta], Answer[Any]]:
        """Read a stream to its end."""
        function = getattr(self.client, method)
        if isinstance(self.client, AsyncClient):
            async with function(*arguments, **options) as stream:
                return [delta async for delta in stream], await stream.answer()
        return await asyncio.to_thread(_read, lambda: function(*arguments, **options))

    async def close(self) -> None:
        """Close the client."""
        if isinstance(self.client, AsyncClient):
            await self.client.aclose()
        else:
            await asyncio.to_thread(self.client.close)


def _read(open_stream: Callable[[], Any]) -> tuple[list[Delta], Answer[Any]]:
    with open_stream() as stream:
        return list(stream), stream.answer()
