"""A client of the public API in a few lines, for the command line and the demo; also an example of how to write one.

The invariant: leaving `generate` early cancels the call, and with it everything that the server holds for it. Not here:
retries and load balancing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType

import grpc

from gpu_engine.cli.client_access import ANYBODY, Access
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc


class Client:
    """Talks to one server at "host:port" or "unix:/path". An async context manager; made on the event loop."""

    def __init__(self, address: str, access: Access = ANYBODY) -> None:
        self.address = address
        self._metadata = access.metadata
        options = [("grpc.max_receive_message_length", -1)]
        self._channel = (
            grpc.aio.secure_channel(address, access.tls, options=options)
            if access.tls
            else grpc.aio.insecure_channel(address, options=options)
        )
        self._stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(self._channel)

    async def generate(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the answer. Raises grpc.aio.AioRpcError with the server's status and message."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        """End a request; False when it does not run."""
        request = pb.AbortRequest(request_id=request_id)
        return (await self._stub.Abort(request, metadata=self._metadata)).aborted

    async def compile(self, grammar: pb.Grammar, *, timeout_s: float | None = None) -> pb.CompileResponse:
        """Compile a grammar ahead of time; `grammar_id` of the response is for Grammar.grammar_id."""
        return await self._stub.Compile(pb.CompileRequest(grammar=grammar), timeout=timeout_s, metadata=self._metadata)

    async def info(self, *, timeout_s: float = 5.0) -> pb.GetModelInfoResponse:
        """Describe the server."""
        return await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s, metadata=self._metadata)

    async def stats(self, *, timeout_s: float = 5.0) -> pb.GetStatsResponse:
        """Read the server's counters."""
        return await self._stub.GetStats(pb.GetStatsRequest(), timeout=timeout_s, metadata=self._metadata)

    async def aclose(self) -> None:
        """Close the channel; calls that run are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Client {self.address}>"
