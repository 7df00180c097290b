"""The running requests of every service on the public port, and the life of one of them.

Invariant: however a request ends (answer, error, cancel, deadline, lost connection), its `finally` releases all that it
holds: its sequences in the engine, its compile ticket, its request id. An error becomes what a client may see in one
place, `public_error`. A slow client delays no other: its events wait in its Inbox and are merged into one response per
sequence when it reads.

Not responsible for: messages (a service checks its own and makes its own responses), tokenisation (see prompt.py),
many requests in one call (see generate_many.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from gpu_engine.api.admission import EngineAdmission
from gpu_engine.api.errors import (
    GrammarNotConfigured,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    LockstepError,
    ShuttingDown,
    WrongRole,
    status_of,
)
from gpu_engine.api.limits import Limits
from gpu_engine.api.output_tensors import most_bytes
from gpu_engine.api.page_transfer import PrefillElsewhere
from gpu_engine.api.ports import EngineCore, GrammarAccess, Model
from gpu_engine.api.request import (
    FinishReason,
    GrammarSpec,
    Outputs,
    Request,
    SuffixScope,
    Telemetry,
    TokenEvent,
    ValidatedRequest,
)
from gpu_engine.front.caller import Accounts, Caller, CallerAccount, TenantView, refuse_stranger
from gpu_engine.front.mailbox import Inbox, Mailbox
from gpu_engine.front.pacing import StreamPacer
from gpu_engine.front.prompt import build_requests, is_large
from gpu_engine.front.receipts import Receipts
from gpu_engine.front.suffix_scopes import SuffixScopes, client_identity, client_key
from gpu_engine.front.text_output import Delta, SequenceOutput
from gpu_engine.front.tokens.field_logprobs import FieldScorer
from gpu_engine.front.tokens.value_events import ValueEvents
from gpu_engine.front.tools.composition import planned
from gpu_engine.front.tools.parts import AnswerLayout
from gpu_engine.front.validation import given_id
from gpu_engine.ops.access import CallRecord, Ended
from gpu_engine.ops.metrics_requests import RequestWatch
from service_runtime.aborted_calls import send

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

Check = Callable[[TenantView], ValidatedRequest]
"""Returns the validated request, given what it can see of the server. Raises LockstepError."""

Respond = Callable[[SequenceOutput, Delta], Iterable[Any]]
"""Returns the messages to send for what is new of one sequence, in their order."""

Write = Callable[[Any], Awaitable[None]]
"""Sends one message to the client; returns when there is room for another."""

Rename = Callable[[str], str]
"""Returns the name that a service has for a field of our own request."""

MANY_NUMBERS = 2048
"""More log-probabilities than this take some milliseconds to put into a message."""

MANY_BYTES = 1 << 20
"""More bytes of tensors than this take some milliseconds to put into a message."""


@dataclass(slots=True)
class Call:
    """A request, from its arrival to its last response."""

    request_id: str = ""
    """Empty until the request is checked."""
    record: CallRecord = field(default_factory=CallRecord)
    inbox: Inbox = field(default_factory=Inbox)
    outputs: list[SequenceOutput] = field(default_factory=list)
    """Empty until the sequences are submitted."""
    output_bytes: int = 0
    """The most bytes of tensors that its sequences may return."""
    aborted: bool = False
    """The request was aborted before its sequences were submitted."""
    fetch: asyncio.Task[None] | None = None
    """Another engine prefills its prompt."""
    account: CallerAccount | None = None
    """The tenant's account, once its limits have let the request through."""
    counted: int = 0
    """Sequences that count in the account."""


class Calls:
    """The calls to one engine; its services share one of these. Made and used on the event loop."""

    def __init__(
        self,
        engine: EngineCore,
        model: Model,
        limits: Limits,
        grammar: GrammarAccess | None,
        *,
        watch: RequestWatch | None = None,
        pacer: StreamPacer | None = None,
        prefills: PrefillElsewhere | None = None,
        accounts: Accounts | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        """Args: see below.

        grammar: access to the grammar process; None on a server without one.
        watch: records every Generate call; None: with metrics that are not exported.
        pacer: spaces the responses of a stream; None: bounded by `limits.stream_pace_s`.
        prefills: other engines that prefill the prompts; None: this engine does.
        accounts: of callers; None: all callers are alike.
        receipts: makes the receipts of answers; None: the server has none.
        """
        self.engine, self.model, self.limits, self.grammar = engine, model, limits, grammar
        self.admission = EngineAdmission.of(engine.config)
        """How many requests the engine takes."""
        self.finished: Counter[str] = Counter()
        """Sequences by the name of their finish reason."""
        self.failed: Counter[str] = Counter()
        """Calls by the name of their gRPC status, without successful ones."""
        self.watch = watch or RequestWatch(CollectorRegistry())
        self._prefills = prefills
        self._accounts = accounts
        self.receipts = receipts
        self._scopes = SuffixScopes(model.tokenizer, limits)
        self._mailbox = Mailbox(asyncio.get_running_loop())
        self._pacer = pacer or StreamPacer(limits.stream_pace_s)
        self._running: dict[str, Call] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._at_drain: set[Callable[[], None]] = set()
        self._warm = asyncio.Event()

    async def generate(
        self, context: Context, request_id: str, check: Check, respond: Respond, rename: Rename | None = None
    ) -> None:
        """Run one Generate call to its end: write its responses, or abort it with the status of its error.

        `request_id` is the client's, "" for none. Errors name fields as `rename` does. Written with `send` and
        not as a generator, so that the `finally` runs as soon as the call ends.
        """
        caller = self.caller_of(context)
        with self.watch.call(caller.metadata, caller.tenant) as record:
            async with self.errors_to_status(context, record, rename):
                await self.answer(Call(record=record), caller, request_id, check, respond, partial(send, context))

    def errors_to_status(
        self, context: Context, record: CallRecord | None = None, rename: Rename | None = None
    ) -> ErrorToStatus:
        """Return a context in which an error ends the gRPC call with its status. `record`: the record of a request."""
        return ErrorToStatus(self, context, record or CallRecord(), rename)

    def count_failure(
        self, error: Exception, record: CallRecord, rename: Rename | None = None
    ) -> tuple[grpc.StatusCode, str]:
        """Count a request that failed; return the status and the text that its client gets."""
        failure = public_error(error, rename)
        status = status_of(failure)
        self.failed[status.name] += 1
        record.status = status.name
        return status, str(failure)

    def caller_of(self, context: Context) -> Caller:
        """Return the client of a gRPC call."""
        metadata = tuple(context.invocation_metadata() or ())
        identities = context.peer_identities()
        if self._accounts is not None:
            account = self._accounts.account_of_call(metadata, identities)
            return Caller(metadata, b"" if account is None else account.identity, account)
        return Caller(metadata, client_identity(metadata, identities, checks_tokens=self.limits.checks_tokens))

    def visible_to(self, caller: Caller) -> TenantView:
        """Return what a caller can see of the server. Raises NotAdmitted if the server has tenants and the caller is
        none of them."""
        if self._accounts is not None and caller.account is None:
            raise refuse_stranger()
        return TenantView(self._running.keys(), self.engine.adapters, caller.account)

    def abort(self, request_id: str, caller: Caller) -> bool:
        """End the sequences of one of the caller's requests with ABORTED; return False when it has no such running
        request. Raises NotAdmitted."""
        if (account := self.visible_to(caller).account) is not None:
            request_id = account.internal_id(request_id)
        call = self._running.get(request_id)
        return call is not None and self.end(call)

    def end(self, call: Call) -> bool:
        """End the sequences of a request with ABORTED, also before they are there; return False when they had ended."""
        if not call.outputs:
            call.aborted = True
            return True
        if all(output.ended for output in call.outputs):
            return False
        self.engine.abort(call.request_id)
        return True

    def warm(self) -> None:
        """Let requests through, also requests that arrived before the engine was warm."""
        self._warm.set()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait up to `timeout_s` for the running ones, then abort these."""
        self._draining = True
        for end in tuple(self._at_drain):
            end()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("draining took longer than %.1f s: %d requests are aborted", timeout_s, len(self._running))
            for call in tuple(self._running.values()):
                self.end(call)

    def at_drain(self, end: Callable[[], None]) -> Callable[[], None]:
        """Call `end` when `drain` begins: it ends streams that would never end. Returns what withdraws it."""
        self._at_drain.add(end)
        return lambda: self._at_drain.discard(end)

    def refuse_if_draining(self) -> None:
        """Raise ShuttingDown once `drain` was called."""
        if self._draining:
            raise ShuttingDown("the server is shutting down")

    async def until_warm(self) -> None:
        """Wait for `warm`."""
        await self._warm.wait()

    @property
    def serving(self) -> bool:
        """The engine is warm, and new requests are taken."""
        return self._warm.is_set() and not self._draining

    def sequences(self) -> Iterable[SequenceOutput]:
        """Yield the submitted sequences of the running calls."""
        for call in self._running.values():
            yield from call.outputs

    def __len__(self) -> int:
        return len(self._running)

    async def answer(
        self, call: Call, caller: Caller, request_id: str, check: Check, respond: Respond, write: Write
    ) -> None:
        """Run one request to its end: `write` its responses, one at a time. Raises the error of a request that failed.

        `call` is new, with the record of the request; `request_id` is the client's, "" for none.
        """
        arrived_s = time.monotonic()
        call.record.set_request_id(given_id(request_id))
        self.refuse_if_draining()
        if self.engine.config.transfer.role == "prefill":
            raise WrongRole("role: this server has role=prefill and generates nothing; ask an engine with role=decode")
        await self._warm.wait()
        visible = self.visible_to(caller)
        asked, layout = planned(check(visible), self.model.tokenizer)
        valid = asked if visible.account is None else visible.account.own(asked)
        grammar = valid.params.grammar
        call.record.begin(valid)
        call.request_id = valid.request_id
        self._running[valid.request_id] = call
        self._idle.clear()
        try:
            if visible.account is not None:
                _enter(visible.account, call, valid)
            if grammar:
                client = client_key(caller.identity, valid.params.scheduling.client_id)
                self._start_compile(valid.request_id, replace(grammar, client=client), call.inbox)
            scope = self._scopes.of(asked.params, caller.identity)
            requests = await self._build(valid, call.inbox, arrived_s, scope)
            if self.receipts is not None and valid.params.outputs.receipt is not None:
                await self.receipts.ready()
            if call.account is not None:
                call.account.charge_prompt(len(requests[0].prompt_ids))
            self._reserve_outputs(call, requests)
            wanted = self._prefills.begin(requests) if self._prefills and not call.aborted else None
            telemetry = Telemetry()
            for request in requests:
                if call.aborted:
                    request.sink(TokenEvent(request.index, finish=FinishReason.ABORTED))
                elif request.beams is None or request.index == 0:  # a beam search is one sequence to the engine
                    telemetry = self.engine.submit(request, awaits_pages=wanted is not None)
                call.outputs.append(self._output(request, telemetry, layout))
            if self._prefills and wanted:
                call.fetch = self._prefills.start(wanted, requests)
            await self._stream(call, respond, write)
        finally:
            self._release(call, grammar)

    def _reserve_outputs(self, call: Call, requests: list[Request]) -> None:
        """Count the tensors that the sequences may return until the call ends: a client that reads slowly leaves them
        here. Raises LimitExceeded."""
        call.output_bytes = sum(
            most_bytes(request.outputs.tensors, len(request.prompt_ids), request.sampling.max_tokens)
            for request in requests
        )
        if not call.output_bytes:
            return
        total, limit = sum(each.output_bytes for each in self._running.values()), self.limits.output_memory_bytes
        if total > limit:
            raise LimitExceeded(
                f"the tensors of running requests and of this one may have {total} bytes; output_memory_bytes = {limit}"
            )

    def _start_compile(self, request_id: str, grammar: GrammarSpec, inbox: Inbox) -> None:
        if self.grammar is None:
            raise GrammarNotConfigured("grammar: this server runs without a grammar process (its setting grammar=none)")

        # An invalid grammar ends the request at once, not when a slot is free.
        self.grammar.prepare(request_id, grammar, inbox.fail)

    async def _build(
        self, valid: ValidatedRequest, inbox: Inbox, arrived_s: float, suffix_scope: SuffixScope | None
    ) -> list[Request]:
        build = partial(
            build_requests,
            valid,
            tokenizer=self.model.tokenizer,
            limits=self.limits,
            sink=self._mailbox.sink(inbox),
            arrived_s=arrived_s,
            suffix_scope=suffix_scope,
        )
        return await asyncio.to_thread(build) if is_large(valid) else build()

    def _output(self, request: Request, telemetry: Telemetry, layout: AnswerLayout | None) -> SequenceOutput:
        decode_ids = self.model.tokenizer.backend_tokenizer.decode
        skip = request.response.skip_special_tokens

        def decode(ids: Any) -> str:
            return str(decode_ids(ids, skip_special_tokens=skip))

        def decode_special(ids: Any) -> str:
            return str(decode_ids(ids, skip_special_tokens=False))

        return SequenceOutput(
            request,
            decode,
            telemetry=telemetry,
            parser=layout.parser() if layout else None,
            fields=FieldScorer() if request.outputs.field_logprobs else None,
            values=_value_events(request.outputs),
            receipt=self.receipts.begin(request) if self.receipts is not None else None,
            decode_special=decode_special if layout and layout.special_text else None,
            reasoning=layout.reasoning_tokens() if layout else None,
        )

    async def _stream(self, call: Call, respond: Respond, write: Write) -> None:
        running = len(call.outputs)
        while running:
            for index, events in (await call.inbox.take()).items():
                output = call.outputs[index]
                if output.ended:
                    continue
                delta = output.take(events)
                if call.account is not None:
                    call.account.charge_answer(len(delta.token_ids))
                if delta.matched_stop is not None:
                    self.engine.drop(output.request)
                for response in await _responses(respond, output, delta):
                    await write(response)
                    self._pacer.response_sent()
                if delta.error:
                    raise delta.error
                if delta.finish:
                    running -= 1
                    self.finished[delta.finish.name] += 1
                    ended = Ended(
                        request=output.request,
                        telemetry=output.telemetry,
                        finish=delta.finish,
                        completion_tokens=output.completion_tokens,
                        finished_s=output.finished_s,
                    )
                    call.record.ended.append(ended)
            if running:
                # Events that arrive meanwhile are merged into one response; the end of a sequence ends the pause.
                await call.inbox.pause(self._pacer.pause_s(len(self._running)))

    def _release(self, call: Call, grammar: GrammarSpec | None) -> None:
        if call.account is not None:
            call.account.leave(call.counted)
        if call.fetch is not None:
            call.fetch.cancel()
        for output in call.outputs:
            if not output.ended:
                self.engine.drop(output.request)
        if grammar and self.grammar:
            call.record.compiled_s = self.grammar.compiled_s(call.request_id)
            self.grammar.forget(call.request_id)
        del self._running[call.request_id]
        if not self._running:
            self._idle.set()

    def __repr__(self) -> str:
        return f"<Calls running={len(self._running)} draining={self._draining}>"


def _enter(account: CallerAccount, call: Call, valid: ValidatedRequest) -> None:
    """Count a request in its tenant's account. Raises LimitExceeded."""
    beams = valid.params.beams
    width = valid.n if beams is None else beams.width
    account.enter(width, together=beams is not None)
    call.account, call.counted = account, width


async def _responses(respond: Respond, output: SequenceOutput, delta: Delta) -> Iterable[Any]:
    """Return the messages, which are made off the event loop where they have many numbers."""
    scores = delta.prompt_logprobs
    numbers = 0 if scores is None else scores.top_ids_NM.size + scores.logprob_N.size
    if delta.ended:  # the last message may have the numbers of the whole answer and of the prompt
        numbers += _numbers_of(output)
    if numbers > MANY_NUMBERS or sum(rows.data.size for rows in delta.outputs) > MANY_BYTES:
        return await asyncio.to_thread(lambda: list(respond(output, delta)))
    return respond(output, delta)


def _value_events(outputs: Outputs) -> ValueEvents | None:
    if not outputs.value_events and outputs.items_of is None:
        return None
    scored = outputs.num_logprobs is not None
    return ValueEvents(values=outputs.value_events, items_of=outputs.items_of, scored=scored)


def _numbers_of(output: SequenceOutput) -> int:
    """Return how many log-probabilities the sequence has."""
    request = output.request
    of_prompt, of_answer = request.outputs.prompt_logprobs, request.outputs.num_logprobs
    numbers = 0 if of_prompt is None else len(request.prompt_ids) * (1 + of_prompt)
    return numbers if of_answer is None else numbers + output.completion_tokens * (1 + of_answer)


def public_error(error: Exception, rename: Rename | None = None) -> LockstepError:
    """Return what a client may see of `error`, with fields as `rename` names them. A defect is logged."""
    if not isinstance(error, LockstepError):
        log.error("a request failed by a defect", exc_info=error)
        return InternalError(f"internal error ({type(error).__name__}); the server's log has the details")
    if rename and isinstance(error, InvalidRequest):
        return InvalidRequest(rename(error.field), error.problem)
    return error


class ErrorToStatus:
    """Turns an error into the gRPC status of its call."""

    def __init__(self, calls: Calls, context: Context, record: CallRecord, rename: Rename | None) -> None:
        self._calls, self._context, self._record, self._rename = calls, context, record, rename

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return  # the call succeeded, or was cancelled and has no client any more
        if self._context.cancelled() or self._context.done():
            log.debug("the client left while an answer was written: %r", error)
            return
        status, problem = self._calls.count_failure(error, self._record, self._rename)
        try:
            await self._context.abort(status, problem)
        except grpc.aio.InternalError as gone:  # the client left meanwhile
            raise asyncio.CancelledError from gone
