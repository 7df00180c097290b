"""The service `vllm.grpc.engine.VllmEngine` on grpc.aio.

Invariant: as in front/servicer.py, a method turns messages into values and back; a method that is not served is refused
by its name. Methods are coroutines that write, not generators, so that each ends as soon as its call does.

Not responsible for: the life of a Generate call (see front/calls.py).
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from gpu_engine.api.request import ValidatedRequest
from gpu_engine.doors.vllm_wire.page_feed import PageFeed
from gpu_engine.doors.vllm_wire.reports import Reports, model_info
from gpu_engine.doors.vllm_wire.tokenizer_files import TokenizerFiles, tokenizer_files
from gpu_engine.doors.vllm_wire.vllm_requests import field_name, to_engine
from gpu_engine.doors.vllm_wire.vllm_responses import Answers
from gpu_engine.front.caller import TenantView
from gpu_engine.front.calls import Calls, Context
from gpu_engine.front.port.later_services import Services, add_servicer
from gpu_engine.front.validation import check
from service_runtime.aborted_calls import send

_MAX_START = 2**63 - 1
"""The largest cursor of a subscriber: the numbers after it fit into the message."""

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # untyped base
    """Serves one engine, in addition to EngineServicer. Made on the event loop."""

    def __init__(self, calls: Calls, *, version: str, kv_events: bool) -> None:
        """Args: `version` is this distribution's; `kv_events`: clients may read what the prefix cache holds."""
        self._calls = calls
        self._kv_events = kv_events
        self._reports = Reports(calls, version)
        self._feed = PageFeed(calls.engine)
        self._files: asyncio.Task[TokenizerFiles] | None = None
        calls.at_drain(self._feed.close)

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        """Stream one answer: chunks with `stream`, and one complete for each of the n sequences."""
        self._reports.received()

        def checked(visible: TenantView) -> ValidatedRequest:
            return check(to_engine(request), self._calls.limits, visible.running)

        await self._calls.generate(
            context,
            request.request_id,
            checked,
            Answers(stream=request.stream).respond,
            rename=lambda field: field_name(request, field),
        )

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """End running requests, by their ids; an id that is not known is no error."""
        async with self._calls.errors_to_status(context):
            caller = self._calls.caller_of(context)
            for request_id in request.request_ids:
                self._calls.abort(request_id, caller)
            return vllm.AbortResponse()
        raise AssertionError("abort raises")

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        """Say whether new requests are served."""
        if self._calls.serving:
            return vllm.HealthCheckResponse(healthy=True, message="serving")
        return vllm.HealthCheckResponse(healthy=False, message="starting or shutting down")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        """Describe the model."""
        return model_info(self._calls)

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        """Describe the server."""
        return self._reports.server_info()

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        """Return queue lengths, use of the KV cache and tokens per second."""
        if request.dp_rank != 0:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"dp_rank: is {request.dp_rank}, this server has only rank 0"
            )
        return self._reports.loads()

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        """Stream a zip archive of the tokenizer's files; the last chunk has its SHA-256."""
        async with self._calls.errors_to_status(context):
            files = await self._packed()
            *chunks, last = files.chunks()
            for chunk in chunks:
                await send(context, common.GetTokenizerChunk(data=chunk))
            await send(context, common.GetTokenizerChunk(data=last, sha256=files.sha256))

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        """Stream the blocks that enter and leave the prefix cache, after a snapshot of those that are in it."""
        if not self._kv_events:
            await _refuse(context, "SubscribeKvEvents: is served with services=vllm,kv_events")
        if not self._calls.engine.config.caches_prefixes:
            await _refuse(context, "SubscribeKvEvents: this server has no prefix cache")
        if request.start_sequence_number > _MAX_START:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"start_sequence_number: is {request.start_sequence_number}, must be at most {_MAX_START}",
            )
        async with aclosing(self._feed.batches(request.start_sequence_number)) as batches:
            async for batch in batches:
                await send(context, batch)

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> None:
        """Refuse: the model generates."""
        await _refuse(context, "Embed: this server does not embed")

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> None:
        """Refuse: pages leave the prefix cache when their memory is needed."""
        await _refuse(context, "FlushCache: this server does not flush its prefix cache")

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> None:
        """Refuse: there is no profiler to start from outside."""
        await _refuse(context, "StartProfile: this server has no profiler")

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> None:
        """Refuse: there is no profiler to stop from outside."""
        await _refuse(context, "StopProfile: this server has no profiler")

    async def _packed(self) -> TokenizerFiles:
        if self._files is None or (self._files.done() and self._files.exception()):
            self._files = asyncio.create_task(asyncio.to_thread(tokenizer_files, self._calls.model.tokenizer))
        # A client that leaves must not cancel the work that others wait for.
        return await asyncio.shield(self._files)

    def __repr__(self) -> str:
        return f"<VllmEngineServicer {self._calls!r} {self._feed!r}>"


def add_to(services: Services, calls: Calls, version: str, *, kv_events: bool) -> None:
    """Add the service. For the other arguments see VllmEngineServicer."""
    servicer = VllmEngineServicer(calls, version=version, kv_events=kv_events)
    add_servicer(services, vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, servicer)


async def _refuse(context: Context, message: str) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
