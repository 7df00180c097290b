"""The service `lockstep.engine.v1.Engine` on grpc.aio: Generate, Abort, Compile, GetModelInfo, GetStats.

Invariant: however a Generate call ends (answer, error, cancel, deadline, lost connection), its `finally` releases all
that the call holds: its sequences in the engine, its compile ticket, its request id. Errors become a gRPC status in one
place, `_ErrorToStatus`. A slow client delays no other: its events wait in its Inbox and are merged into one response
per sequence when it reads.

Not responsible for: checking fields (see validation.py), tokenisation (see prompt.py), starting and stopping the server
(see server.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from gpu_engine.api.checked import Checked, Limits
from gpu_engine.api.errors import GrammarNotConfigured, InternalError, LockstepError, ShuttingDown, status_of
from gpu_engine.api.ports import EngineCore, GrammarAccess, GrammarStats, Model
from gpu_engine.api.request import DraftScope, FinishReason, GrammarSpec, Request, TokenEvent
from gpu_engine.front.draft_scopes import DraftScopes, client_identity
from gpu_engine.front.grammar_handles import GrammarHandles
from gpu_engine.front.mailbox import Inbox, Mailbox
from gpu_engine.front.pacing import StreamPacer
from gpu_engine.front.prompt import build_requests, is_large
from gpu_engine.front.responses import delta_response, model_info, stats_response
from gpu_engine.front.text_output import SequenceOutput
from gpu_engine.front.validation import check, given_id
from gpu_engine.ops.access import CallRecord
from gpu_engine.ops.metrics_requests import RequestWatch
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _Call:
    """A running Generate call."""

    record: CallRecord
    inbox: Inbox = field(default_factory=Inbox)
    outputs: list[SequenceOutput] = field(default_factory=list)
    """Empty until the sequences are submitted."""
    aborted: bool = False
    """The request was aborted before its sequences were submitted."""


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Serves one engine. Made on the event loop."""

    def __init__(
        self,
        engine: EngineCore,
        model: Model,
        limits: Limits,
        grammar: GrammarAccess | None,
        *,
        version: str,
        watch: RequestWatch | None = None,
        pacer: StreamPacer | None = None,
    ) -> None:
        """Args: see below.

        grammar: access to the grammar process; None on a server without one.
        watch: records every Generate call; None: with metrics that are not exported.
        pacer: spaces the responses of a stream; None: bounded by `limits.stream_pace_s`.
        """
        self._engine = engine
        self._model = model
        self._limits = limits
        self._grammar = grammar
        self._version = version
        self._watch = watch or RequestWatch(CollectorRegistry())
        self._handles = GrammarHandles(limits.grammar_handles_bytes)
        self._scopes = DraftScopes(model.tokenizer, limits)
        self._mailbox = Mailbox(asyncio.get_running_loop())
        self._pacer = pacer or StreamPacer(limits.stream_pace_s)
        self._calls: dict[str, _Call] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._warm = asyncio.Event()
        self._finished: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    async def Generate(  # type: ignore[override]  # the stub knows generators only
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Stream one answer.

        Written with `context.write` and not as a generator, so that its `finally` runs as soon as the call ends.
        """
        with self._watch.call(tuple(context.invocation_metadata() or ())) as record:
            async with _ErrorToStatus(context, self._failed, record):
                await self._generate(request, context, record)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a running request, by its id."""
        return pb.AbortResponse(aborted=self.abort(request.request_id))

    async def Compile(self, request: pb.CompileRequest, context: Context) -> pb.CompileResponse:
        """Compile a grammar ahead of time and give it an id."""
        async with _ErrorToStatus(context, self._failed, CallRecord()):
            if self._draining:
                raise ShuttingDown("the server is shutting down")
            return await self._handles.compile(request, self._grammar.compile if self._grammar else None)
        raise AssertionError("abort raises")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Describe the model and the limits."""
        backends = self._grammar.backends if self._grammar else ()
        return model_info(self._model, self._engine.config, self._limits, backends, self._version)

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Return the counters of the engine and the gauges of the grammar process."""
        grammar = await self._grammar.stats() if self._grammar else GrammarStats()
        response = stats_response(self._engine.stats(), finished=self._finished, failed=self._failed)
        response.grammar_starts = grammar.starts
        response.grammar_ready = grammar.ready
        response.matchers = grammar.matchers
        response.cached_grammars = grammar.cached_grammars
        return response

    def abort(self, request_id: str) -> bool:
        """End the request's sequences with ABORTED; return False when there is no such running request."""
        call = self._calls.get(request_id)
        if call is None:
            return False
        if not call.outputs:
            call.aborted = True
            return True
        self._engine.abort(request_id)
        return any(not output.ended for output in call.outputs)

    def warm(self) -> None:
        """Let requests through, also those that arrived before the engine was warm."""
        self._warm.set()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait up to `timeout_s` for the running ones, then abort these."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("draining took longer than %.1f s: %d requests are aborted", timeout_s, len(self._calls))
            for request_id in tuple(self._calls):
                self.abort(request_id)

    async def _generate(self, message: pb.GenerateRequest, context: Context, record: CallRecord) -> None:
        arrived_s = time.monotonic()
        record.set_request_id(given_id(message.request_id))
        if self._draining:
            raise ShuttingDown("the server is shutting down")
        await self._warm.wait()
        checked = check(message, self._limits, self._calls, self._handles.spec if self._grammar else None)
        record.begin(checked)
        call = self._calls[checked.request_id] = _Call(record)
        self._idle.clear()
        try:
            if checked.grammar:
                self._start_compile(checked.request_id, checked.grammar, call.inbox)
            scope = self._scopes.of(checked, self._client_of(context))
            for request in await self._build(checked, call.inbox, arrived_s, scope):
                if call.aborted:
                    request.sink(TokenEvent(request.index, finish=FinishReason.ABORTED))
                else:
                    self._engine.submit(request)
                call.outputs.append(self._output(request, checked))
            await self._stream(call, context, omit_token_ids=checked.omit_token_ids)
        finally:
            self._release(checked, call)

    def _start_compile(self, request_id: str, grammar: GrammarSpec, inbox: Inbox) -> None:
        if self._grammar is None:
            raise GrammarNotConfigured("grammar: this server runs without a grammar process (its setting grammar=none)")

        # An invalid grammar ends the request at once, not when a slot is free.
        self._grammar.prepare(request_id, grammar, inbox.fail)

    def _client_of(self, context: Context) -> bytes:
        metadata = tuple(context.invocation_metadata() or ())
        return client_identity(metadata, context.peer_identities(), checks_tokens=self._limits.checks_tokens)

    async def _build(self, checked: Checked, inbox: Inbox, arrived_s: float, scope: DraftScope | None) -> list[Request]:
        sink = self._mailbox.sink(inbox)
        arguments = (checked, self._model.tokenizer, self._limits, sink, arrived_s, scope)
        if is_large(checked):
            return await asyncio.to_thread(build_requests, *arguments)
        return build_requests(*arguments)

    def _output(self, request: Request, checked: Checked) -> SequenceOutput:
        decode_ids = self._model.tokenizer.backend_tokenizer.decode
        skip = checked.skip_special_tokens

        def decode(ids: Any) -> str:
            return str(decode_ids(ids, skip_special_tokens=skip))

        return SequenceOutput(request, decode, with_text=not checked.omit_text)

    async def _stream(self, call: _Call, context: Context, *, omit_token_ids: bool) -> None:
        running = len(call.outputs)
        while running:
            for index, events in (await call.inbox.take()).items():
                output = call.outputs[index]
                if output.ended:
                    continue
                delta = output.take(events)
                if delta.matched_stop is not None:
                    self._engine.drop(output.request)
                if response := delta_response(output, delta, omit_token_ids=omit_token_ids):
                    await context.write(response)
                    self._pacer.response_sent()
                if delta.error:
                    raise delta.error
                if delta.finish:
                    running -= 1
                    self._finished[delta.finish.name] += 1
                    call.record.finished(output.request, delta.finish, output.completion_tokens, output.finished_s)
            if running:
                # Events that arrive meanwhile are merged into one response; the end of a sequence ends the pause.
                await call.inbox.pause(self._pacer.pause_s(len(self._calls)))

    def _release(self, checked: Checked, call: _Call) -> None:
        for output in call.outputs:
            if not output.ended:
                self._engine.drop(output.request)
        if checked.grammar and self._grammar:
            call.record.compiled_s = self._grammar.compiled_s(checked.request_id)
            self._grammar.forget(checked.request_id)
        del self._calls[checked.request_id]
        if not self._calls:
            self._idle.set()

    def __repr__(self) -> str:
        return f"<EngineServicer calls={len(self._calls)} draining={self._draining}>"


class _ErrorToStatus:
    """Turns an error into the gRPC status of its call."""

    def __init__(self, context: Context, failed: Counter[str], record: CallRecord) -> None:
        self._context = context
        self._failed = failed
        self._record = record

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return  # the call succeeded, or was cancelled and has no client any more
        if self._context.cancelled() or self._context.done():
            log.debug("the client left while an answer was written: %r", error)
            return
        if not isinstance(error, LockstepError):
            log.error("a request failed by a defect", exc_info=error)
            error = InternalError(f"internal error ({type(error).__name__}); the server's log has the details")
        status = status_of(error)
        self._failed[status.name] += 1
        self._record.status = status.name
        await self._context.abort(status, str(error))
