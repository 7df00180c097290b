"""A client of the tests: messages in, messages out, over `lockstep_client`, with the engine's own message classes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from lockstep_client.access import Access, access_to
from lockstep_client.async_rpc import AsyncRpc
from lockstep_client.calls import Method
from protos.engine.v1 import engine_pb2 as pb

GENERATE = Method("Generate", pb.GenerateRequest, pb.GenerateResponse)
ABORT = Method("Abort", pb.AbortRequest, pb.AbortResponse)
COMPILE = Method("Compile", pb.CompileRequest, pb.CompileResponse)
MODEL_INFO = Method("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)
STATS = Method("GetStats", pb.GetStatsRequest, pb.GetStatsResponse)
TOKENIZE = Method("Tokenize", pb.TokenizeRequest, pb.TokenizeResponse)
DETOKENIZE = Method("Detokenize", pb.DetokenizeRequest, pb.DetokenizeResponse)
LOAD_ADAPTER = Method("LoadAdapter", pb.LoadAdapterRequest, pb.LoadAdapterResponse)
UNLOAD_ADAPTER = Method("UnloadAdapter", pb.UnloadAdapterRequest, pb.UnloadAdapterResponse)
LIST_ADAPTERS = Method("ListAdapters", pb.ListAdaptersRequest, pb.ListAdaptersResponse)
EXCHANGE_DRAFTER = Method("ExchangeDrafter", pb.ExchangeDrafterRequest, pb.ExchangeDrafterResponse)


class Client(AsyncRpc):
    """Each method sends one message and returns the response; an error is grpc.aio.AioRpcError."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        super().__init__(access or access_to(address, False, None, ()))

    async def generate(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the answer; leaving the generator cancels the call."""
        call = self.stream(GENERATE, request, timeout_s)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        return (await self.unary(ABORT, pb.AbortRequest(request_id=request_id))).aborted

    async def compile(self, grammar: pb.Grammar, *, timeout_s: float | None = None) -> pb.CompileResponse:
        return await self.unary(COMPILE, pb.CompileRequest(grammar=grammar), timeout_s)

    async def info(self, *, timeout_s: float = 5.0) -> pb.GetModelInfoResponse:
        return await self.unary(MODEL_INFO, pb.GetModelInfoRequest(), timeout_s)

    async def stats(self, *, timeout_s: float = 5.0) -> pb.GetStatsResponse:
        return await self.unary(STATS, pb.GetStatsRequest(), timeout_s)

    async def tokenize(self, request: pb.TokenizeRequest, *, timeout_s: float = 30.0) -> pb.TokenizeResponse:
        return await self.unary(TOKENIZE, request, timeout_s)

    async def detokenize(self, request: pb.DetokenizeRequest, *, timeout_s: float = 30.0) -> str:
        return (await self.unary(DETOKENIZE, request, timeout_s)).text

    async def token_texts(self, token_ids: Sequence[int], *, timeout_s: float = 30.0) -> list[str]:
        request = pb.DetokenizeRequest(token_ids=token_ids, with_texts=True)
        return list((await self.unary(DETOKENIZE, request, timeout_s)).texts)

    async def load_adapter(self, name: str, path: str, *, timeout_s: float = 60.0) -> pb.Adapter:
        request = pb.LoadAdapterRequest(name=name, path=path)
        return (await self.unary(LOAD_ADAPTER, request, timeout_s)).adapter

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        await self.unary(UNLOAD_ADAPTER, pb.UnloadAdapterRequest(name=name), timeout_s)

    async def adapters(self, *, timeout_s: float = 5.0) -> pb.ListAdaptersResponse:
        return await self.unary(LIST_ADAPTERS, pb.ListAdaptersRequest(), timeout_s)

    async def exchange_drafter(self, path: str, *, timeout_s: float = 300.0) -> pb.ExchangeDrafterResponse:
        return await self.unary(EXCHANGE_DRAFTER, pb.ExchangeDrafterRequest(path=path), timeout_s)
