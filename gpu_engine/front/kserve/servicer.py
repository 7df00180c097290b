"""The service `inference.GRPCInferenceService` on grpc.aio.

Invariant: as in front/servicer.py, a method turns messages into values and back. Each request of a stream is a call of
its own to the rest of the front, with its own errors; the stream's messages are written one at a time.

Not responsible for: the life of a request (see front/calls.py), the meaning of tensors (see inputs.py, outputs.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection

import grpc

from gpu_engine.api.errors import ShuttingDown, UnknownModel, status_of
from gpu_engine.api.owned_tasks import OwnedTasks
from gpu_engine.api.request import ValidatedRequest
from gpu_engine.front.calls import Call, Caller, Calls, Context, ErrorToStatus, Write, public_error
from gpu_engine.front.kserve.descriptions import model_config, model_metadata, repository_index, server_metadata
from gpu_engine.front.kserve.inputs import Asked, ends_another, to_engine
from gpu_engine.front.kserve.outputs import VERSION, Answers
from gpu_engine.front.kserve.statistics import Statistics
from gpu_engine.front.tenants.accounts import TenantView
from gpu_engine.front.text_output import Delta, SequenceOutput
from gpu_engine.front.validation import check
from gpu_engine.ops.access import CallRecord
from protos.kserve.v2 import inference_pb2 as pb
from protos.kserve.v2 import inference_pb2_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves one engine, beside EngineServicer. Made on the event loop."""

    def __init__(self, calls: Calls, *, version: str) -> None:
        """Args: `version` is this distribution's."""
        self._calls, self._version = calls, version
        self._statistics = Statistics()
        self._readers: set[asyncio.Task[None]] = set()
        config = calls.engine.config
        self._names = config.served_names
        self._max_running = config.max_batch_size + config.max_queue_size
        """Of one stream; its next request is read when one of them has ended."""
        calls.at_drain(self._end_reading)

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
            async with ErrorToStatus(context, self._calls.failed, record, inference.rename):
                await self._infer(inference, caller, record, keep)
        (response,) = responses
        return response

    async def ModelStreamInfer(  # type: ignore[override]  # the stub knows generators only
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Answer requests until the client sends no more, and the running ones have ended."""
        async with ErrorToStatus(context, self._calls.failed, CallRecord()):
            self._calls.refuse_if_draining()
            tasks, answers = OwnedTasks(), set[asyncio.Task[None]]()
            reader = tasks.spawn(self._read(requests, context, tasks, answers), "ModelStreamInfer reader")
            self._readers.add(reader)
            try:
                await asyncio.wait((reader,))
                if not reader.cancelled():
                    reader.result()
                while answers:
                    await asyncio.wait(answers)
                if reader.cancelled():
                    raise ShuttingDown("the server is shutting down")
            finally:
                self._readers.discard(reader)
                await tasks.aclose()

    async def _read(
        self,
        requests: AsyncIterator[pb.ModelInferRequest],
        context: Context,
        tasks: OwnedTasks,
        answers: set[asyncio.Task[None]],
    ) -> None:
        """Start a task for each request. Raises InvalidRequest for a message that does not parse."""
        lock, free = asyncio.Lock(), asyncio.Semaphore(self._max_running)

        async def write(response: pb.ModelStreamInferResponse) -> None:
            async with lock:
                await context.write(response)

        def ended(task: asyncio.Task[None]) -> None:
            answers.discard(task)
            free.release()

        async for request in requests:
            await free.acquire()
            task = tasks.spawn(self._answer(request, context, write), f"request {request.id}")
            answers.add(task)
            task.add_done_callback(ended)

    async def _answer(self, request: pb.ModelInferRequest, context: Context, write: Write) -> None:
        """Answer one request of a stream; an error is its last response."""
        inference, caller = _Inference(request, self._calls, decoupled=True), self._calls.caller_of(context)

        async def send(response: pb.ModelInferResponse) -> None:
            await write(pb.ModelStreamInferResponse(infer_response=response))

        with self._calls.watch.call(caller.metadata, caller.tenant) as record:
            record.method = "ModelStreamInfer"
            try:
                await self._infer(inference, caller, record, send)
            except Exception as error:
                if context.cancelled() or context.done():
                    return  # there is no client to tell
                failure = public_error(error, inference.rename)
                record.status = status_of(failure).name
                self._calls.failed[record.status] += 1
                response = _last_response(request)
                response.parameters["status"].string_param = record.status
                await write(pb.ModelStreamInferResponse(error_message=str(failure), infer_response=response))

    async def _infer(self, inference: _Inference, caller: Caller, record: CallRecord, write: Write) -> None:
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
        async with ErrorToStatus(context, self._calls.failed, CallRecord()):
            refuse_unknown_model(name, version, self._names)

    def _end_reading(self) -> None:
        for reader in self._readers:
            reader.cancel()

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


def add_to(server: grpc.aio.Server, calls: Calls, version: str) -> None:
    """Serve `calls` on `server`, too; `version` is this distribution's."""
    servicer = InferenceServicer(calls, version=version)
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
