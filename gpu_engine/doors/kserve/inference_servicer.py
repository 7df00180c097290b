"""The service `inference.GRPCInferenceService` on grpc.aio.

Invariant: as in front/servicer.py, a method turns messages into values and back. Each request of a stream has its own
errors.

Not responsible for: the life of a request (see front/calls.py), the meaning of tensors (see infer_requests.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from functools import partial

import grpc

from gpu_engine.api.errors import UnknownModel
from gpu_engine.api.request import ValidatedRequest
from gpu_engine.doors.kserve.descriptions import model_config, model_metadata, repository_index, server_metadata
from gpu_engine.doors.kserve.infer_requests import Asked, ends_another, to_engine
from gpu_engine.doors.kserve.infer_responses import VERSION, Answers
from gpu_engine.doors.kserve.statistics import Statistics
from gpu_engine.front.caller import Caller, TenantView
from gpu_engine.front.calls import Call, Calls, Context, Write
from gpu_engine.front.port.later_services import Services, add_servicer
from gpu_engine.front.request_stream import RequestStream
from gpu_engine.front.text_output import Delta, SequenceOutput
from gpu_engine.front.validation import check
from gpu_engine.ops.access import CallRecord
from protos.kserve.v2 import inference_pb2 as pb
from protos.kserve.v2 import inference_pb2_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves one engine, in addition to EngineServicer. Made on the event loop."""

    def __init__(self, calls: Calls, *, version: str) -> None:
        """Args: `version` is this distribution's."""
        self._calls, self._version = calls, version
        self._statistics = Statistics()
        self._names = calls.engine.config.served_names

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """Say that the server answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Say whether new requests are served."""
        return pb.ServerReadyResponse(ready=self._calls.serving)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Say whether requests to this model are served."""
        known = request.name in self._names and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=known and self._calls.serving)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Describe the server."""
        return server_metadata(self._version)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Describe the tensors."""
        await self._known(request.name, request.version, context)
        return model_metadata(request.name)

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """Describe the model as a configuration of Triton would."""
        await self._known(request.name, request.version, context)
        return pb.ModelConfigResponse(config=model_config(request.name))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Return counts and times."""
        name = request.name or self._names[0]
        await self._known(name, request.version, context)
        return pb.ModelStatisticsResponse(model_stats=[self._statistics.message(name)])

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """List the model."""
        return repository_index(self._names[0], ready=self._calls.serving, only_ready=request.ready)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """Answer a request with one response."""
        inference, responses = _Inference(request, self._calls, decoupled=False), list[pb.ModelInferResponse]()

        async def keep(response: pb.ModelInferResponse) -> None:
            responses.append(response)

        caller = self._calls.caller_of(context)
        with self._calls.watch.call(caller.metadata, caller.tenant) as record:
            record.method = "ModelInfer"
            async with self._calls.errors_to_status(context, record, inference.rename):
                await self._infer(inference, caller, record, write=keep)
        (response,) = responses
        return response

    async def ModelStreamInfer(  # type: ignore[override]  # the stub knows generators only
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Answer requests until the client sends no more and all running requests have ended."""
        async with self._calls.errors_to_status(context):
            stream = RequestStream(self._calls, context, "ModelStreamInfer")
            await stream.run(lambda: self._read(requests, stream))

    async def _read(self, requests: AsyncIterator[pb.ModelInferRequest], stream: RequestStream) -> None:
        """Begin each request when the call has room for it. Raises InvalidRequest for a message that does not parse."""
        room = asyncio.Semaphore(self._calls.admission.max_sequences)

        async def send(response: pb.ModelInferResponse) -> None:
            await stream.write(pb.ModelStreamInferResponse(infer_response=response))

        async for request in requests:
            await room.acquire()
            inference = _Inference(request, self._calls, decoupled=True)
            run = partial(self._infer, inference, write=send)
            stream.begin(request.id, run, partial(_failed, request), ended=room.release, rename=inference.rename)

    async def _infer(self, inference: _Inference, caller: Caller, record: CallRecord, *, write: Write) -> None:
        """Run a request to its end. Raises its error."""
        request = inference.request
        self._statistics.arrived()
        began_s = time.monotonic()
        try:
            if (other := ends_another(request)) is None:
                call = Call(record=record)
                await self._calls.answer(call, caller, request.id, inference.check, inference.respond, write)
            else:
                self._calls.abort(other, caller)
                await write(_last_response(request))
        except Exception:
            self._statistics.failed(time.monotonic() - began_s)
            raise
        self._statistics.succeeded(time.monotonic() - began_s, inference.ended)

    async def _known(self, name: str, version: str, context: Context) -> None:
        async with self._calls.errors_to_status(context):
            refuse_unknown_model(name, version, self._names)

    def __repr__(self) -> str:
        return f"<InferenceServicer {self._calls!r} {self._statistics!r}>"


def refuse_unknown_model(name: str, version: str, names: Collection[str]) -> None:
    """Raise UnknownModel, with the names that exist, unless the server has this model in this version."""
    if name not in names:
        raise UnknownModel(f"model_name: {name!r} is not known; this server has {', '.join(names)}")
    if version not in ("", VERSION):
        raise UnknownModel(f"model_version: {version!r} is not known; this server has {VERSION!r}")


def _last_response(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """Return a last response without tensors."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
    response.parameters["triton_final_response"].bool_param = True
    return response


def _failed(request: pb.ModelInferRequest, status: grpc.StatusCode, problem: str) -> pb.ModelStreamInferResponse:
    """Return the last response of a request that failed."""
    response = _last_response(request)
    response.parameters["status"].string_param = status.name
    return pb.ModelStreamInferResponse(error_message=problem, infer_response=response)


class _Inference:
    """From a request to its responses, in the parts that front/calls.py asks for."""

    def __init__(self, request: pb.ModelInferRequest, calls: Calls, *, decoupled: bool) -> None:
        self.request, self._calls, self._decoupled = request, calls, decoupled
        self.ended: list[SequenceOutput] = []
        self._asked = Asked()
        self._answers: Answers | None = None

    def check(self, visible: TenantView) -> ValidatedRequest:
        request = self.request
        refuse_unknown_model(request.model_name, request.model_version, self._calls.engine.config.served_names)
        self._asked = asked = to_engine(request, decoupled=self._decoupled)
        valid = check(asked.message, self._calls.limits, visible.running, find_adapter=visible.find_adapter)
        self._answers = Answers(
            request,
            request.id or asked.message.request_id,
            asked.outputs,
            sequences=valid.n,
            stream=asked.stream,
            batched=asked.batched,
            pad_id=asked.pad_id,
        )
        return valid

    def respond(self, output: SequenceOutput, delta: Delta) -> list[pb.ModelInferResponse]:
        assert self._answers is not None, "a request is answered after it was checked"
        if delta.finish:
            self.ended.append(output)
        return self._answers.respond(output, delta)

    def rename(self, field: str) -> str:
        return self._asked.field_name(field)


def add_to(services: Services, calls: Calls, version: str) -> None:
    """Add the service; `version` is this distribution's."""
    servicer = InferenceServicer(calls, version=version)
    add_servicer(services, inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, servicer)
