"""Compilations in the grammar process: one RPC for any number of equal grammars that arrive together.

Invariant: a grammar that is compiled for several requests at once is compiled by one flight (see
service_runtime/single_flight.py). When the last request that waits for a flight has left, its RPC is cancelled, and the
grammar process stops. Results are not kept here: the grammar process has the cache, and must see which grammars are in
use. When a grammar process dies during a compilation, the next one is asked again.

A grammar has one limit for its whole way, from its admission here to the result: `grammar_wait_s`, and
`compile_timeout_s` for each library that is tried. Whatever takes the time counts: a turn of the tenant, the queue and
the start of a worker, checks, the proof, a second attempt, the load of the result. At the limit the RPC is cancelled,
and the grammar process kills the worker. The time begins again with each new grammar process; the wait for one has its
own limit. A sequence that holds a slot is not ended by this limit. The grammar process also has limits on the wait
for a worker and on a compilation, and names the one that was reached. The deadline of the RPC is longer than all of
them together: when it passes, the process gives no answer.

Not responsible for: which compilations are sent (see compile_admission.py), slots and matchers (see client.py), the
connection (see link.py).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import grpc

from gpu_engine.api.config import ServerConfig
from gpu_engine.api.errors import (
    GrammarUnavailable,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    LockstepError,
    NotSupported,
)
from gpu_engine.api.ports import Compiled
from gpu_engine.api.request import GrammarSpec
from gpu_engine.sidecar.compile_admission import CompileAdmission, Place
from gpu_engine.sidecar.link import GrammarLink
from protos.grammar.v1 import grammar_pb2 as gpb
from service_runtime.owned_tasks import OwnedTasks
from service_runtime.single_flight import Flight, SingleFlight

log = logging.getLogger(__name__)

_TOOL_FIELD = re.compile(r"tools\.tools\[\d+\]\.\w+(/[^ ]*)?")
"""A message of the grammar process about a part of a composed grammar begins with the field of the request."""

COMPILE_MARGIN_S = 30.0
"""Time to load a result, and to answer on a busy machine, on top of the limits that the grammar process enforces."""
AUTO_ATTEMPTS = 2
"""The most attempts with each backend under BACKEND_AUTO: strictly, and with parts that are not enforced."""


@dataclass(frozen=True, slots=True)
class _Key:
    """What a flight compiles."""

    spec: GrammarSpec
    accepted: bool
    """The grammar's sequence holds a slot: the grammar process must not refuse it for a full queue."""

    def __repr__(self) -> str:
        return f"compile {self.spec.kind.name}"  # a source may have megabytes


_Flight = Flight[_Key, Compiled]


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """The compilation that a request waits for."""

    flight: _Flight
    joined: bool
    """An earlier request had started the flight."""
    failed: Callable[[LockstepError], None]
    """Ends the request."""


class GrammarCompiler:
    """Used on the event loop. Its tasks belong to `tasks`, whose owner ends them."""

    def __init__(self, config: ServerConfig, link: GrammarLink, tasks: OwnedTasks, admission: CompileAdmission) -> None:
        self._wait_s = config.grammar_wait_s
        self._compile_s = config.compile_timeout_s
        self._link = link
        self._tickets: dict[str, _Ticket] = {}
        self._flights: SingleFlight[_Key, Compiled] = SingleFlight(spawn=tasks.spawn)
        self._admission = admission

    def prepare(self, request_id: str, spec: GrammarSpec, failed: Callable[[LockstepError], None]) -> None:
        """Start or join the compilation of a request's grammar.

        `failed` is called when the compilation fails, or by `fail_compiled`. Raises LimitExceeded when the grammar
        process has no place for it.
        """
        flight, joined = self._join(spec)
        self._tickets[request_id] = _Ticket(flight, joined, failed)

        def done(task: asyncio.Task[Compiled]) -> None:
            if not task.cancelled() and isinstance(error := task.exception(), LockstepError):
                failed(error)

        flight.task.add_done_callback(done)

    def forget(self, request_id: str) -> None:
        """Leave the compilation of a request that has ended."""
        ticket = self._tickets.pop(request_id, None)
        if ticket:
            self._flights.leave(ticket.flight)

    def compiled_s(self, request_id: str) -> float:
        """Return `time.monotonic()` of the moment when the request's grammar was compiled; 0.0: it is not."""
        ticket = self._tickets.get(request_id)
        task = ticket.flight.task if ticket else None
        failed = task is None or not task.done() or task.cancelled() or task.exception() is not None
        return 0.0 if task is None or failed else task.result().ready_s

    def fail_compiled(self, error: LockstepError) -> None:
        """End every request whose grammar is compiled; the others fail with their compilation."""
        for ticket in list(self._tickets.values()):
            if ticket.flight.task.done():
                ticket.failed(error)

    async def result(self, request_id: str, spec: GrammarSpec) -> Compiled:
        """Return the result of the request's compilation; without one, compile now. Raises LockstepError."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return await self.compile(spec, accepted=True)
        self._flights.retain(ticket.flight)
        try:
            compiled = await self._flights.wait(ticket.flight)
            return replace(compiled, cache_hit=compiled.cache_hit or ticket.joined)
        finally:
            del ticket  # see `SingleFlight.wait`

    async def compile(self, spec: GrammarSpec, *, accepted: bool = False) -> Compiled:
        """Compile a grammar for no request, or again after the grammar process has dropped it. Raises LockstepError.

        `accepted`: the grammar's sequence holds a slot, so no queue may refuse it, neither here nor there.
        """
        return await self._flights.wait(self._join(spec, accepted=accepted)[0])

    def _join(self, spec: GrammarSpec, *, accepted: bool = False) -> tuple[_Flight, bool]:
        """Join a flight, or start one; return it, and whether it was there. Raises LimitExceeded, unless `accepted`.

        An accepted compilation joins no flight that the grammar process may refuse; the grammar process joins both.
        """
        key = _Key(spec, accepted=True)
        if self._flights.get(key) is None:
            key = _Key(spec, accepted)
        if (running := self._flights.get(key)) is not None:
            self._flights.retain(running)
            return running, True
        place = self._admission.admit(spec, self._link, accepted=accepted)
        flight, joined = self._flights.join(key, lambda: self._compile_in(place, spec, accepted=accepted))
        flight.task.add_done_callback(lambda _: place.give_back())
        return flight, joined

    async def _compile_in(self, place: Place, spec: GrammarSpec, *, accepted: bool) -> Compiled:
        message, attached = compile_message(spec, accepted=accepted), self._link.attached
        limit = asyncio.timeout(None if accepted else self._limit_s(spec))
        try:
            async with limit, place.turn():
                while True:
                    await self._link.ready(self._wait_s)
                    if attached != self._link.attached and not accepted:
                        limit.reschedule(asyncio.get_running_loop().time() + self._limit_s(spec))
                    attached = self._link.attached
                    if compiled := await self._compile(message, spec):
                        return compiled
        except TimeoutError:
            compile_s = self._limit_s(spec) - self._wait_s
            raise LimitExceeded(
                f"grammar: compile_timeout_s: the grammar was not ready within {self._limit_s(spec):g} s of its "
                f"admission: {self._wait_s:g} s to wait (grammar_wait_s) and {compile_s:g} s to compile; try again"
            ) from None
        finally:
            del limit  # has this task, which has the error: a cycle without this line

    async def _compile(self, message: gpb.CompileRequest, spec: GrammarSpec) -> Compiled | None:
        """Compile with the process that is attached; None: it was lost meanwhile."""
        attached, timeout_s = self._link.attached, self._timeout_s(spec)
        try:
            response = await self._link.stub.Compile(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise grammar_error(error, "Compile", timeout_s) from error
            # The RPC breaks a moment before or after the segment socket: a retry needs another connection.
            await self._link.attached_after(attached, self._wait_s)
            return None
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return None  # no waiter has left: the channel to the last grammar process was closed during the call
        self._admission.queue.compiled(spec, attached)
        return Compiled(
            grammar_id=response.grammar_id,
            backend=int(response.backend),
            cache_hit=response.cache_hit,
            compile_ms=response.compile_ms,
            warnings=tuple(response.warnings),
            memory_bytes=response.memory_bytes,
            min_tokens=response.min_tokens,
            known_answer_tokens=response.known_answer_tokens,
            verified=response.verified,
            attached=attached,
            ready_s=time.monotonic(),
        )

    def _limit_s(self, spec: GrammarSpec) -> float:
        """Return the limit of a grammar's whole way."""
        libraries = max(1, len(self._link.backends)) if spec.backend == gpb.BACKEND_AUTO else 1
        return self._wait_s + libraries * (self._link.compile_timeout_s or self._compile_s)

    def _timeout_s(self, spec: GrammarSpec) -> float:
        """Return the deadline of a Compile: what the limits of the attached process allow, and a margin."""
        attempts = AUTO_ATTEMPTS * len(self._link.backends) if spec.backend == gpb.BACKEND_AUTO else 1
        return attempts * (self._link.attempt_limit_s or self._compile_s) + COMPILE_MARGIN_S

    def __repr__(self) -> str:
        return f"<GrammarCompiler tickets={len(self._tickets)} {self._flights!r} {self._admission!r}>"


def compile_message(spec: GrammarSpec, *, accepted: bool) -> gpb.CompileRequest:
    """Return the message of a grammar. `accepted`: of a sequence that is accepted already."""
    message = gpb.CompileRequest(
        kind=cast("gpb.Kind", spec.kind.value),
        source=spec.source,
        whitespace=cast("gpb.Whitespace", spec.whitespace),
        backend=cast("gpb.Backend", spec.backend),
        allow_unenforced=spec.allow_unenforced,
        verify=spec.verify,
        accepted=accepted,
        closed_objects=spec.closed_objects,
        **dict(spec.bounds),  # type: ignore[arg-type]
    )
    if spec.owner is not None:
        message.owner, message.owner_bytes = spec.owner.space, spec.owner.max_bytes
    if spec.owner is not None or spec.client:
        message.tenant, message.tenant_weight = spec.turn_of
    return message


def grammar_error(error: grpc.aio.AioRpcError, call: str, timeout_s: float) -> LockstepError:
    """Return the engine's error for a gRPC status of the grammar process.

    Args:
        error: the status.
        call: name of the RPC, for the message of a deadline.
        timeout_s: its deadline, in seconds.
    """
    # `source` is a field of the protocol between the two processes; in the client's request it has another name.
    message = (error.details() or error.code().name).removeprefix("source: ")
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            field, found, rest = message.partition(": ")
            return (
                InvalidRequest(field, rest)
                if found and _TOOL_FIELD.match(field)
                else InvalidRequest("grammar", message)
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return LimitExceeded(f"grammar: {message}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotSupported(f"grammar: {message}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            # The process itself never answers with this status: its own limits are RESOURCE_EXHAUSTED.
            return GrammarUnavailable(f"the grammar process gave no answer to {call} within {timeout_s:g} s; try again")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.FAILED_PRECONDITION:
            return GrammarUnavailable(
                f"the grammar process does not answer ({error.code().name}: {message}); try again"
            )
        case code:
            log.error("the grammar process failed: %s; DEBUG has its message", code.name)
            log.debug("the grammar process failed: %s", message)  # it may quote the grammar
            return InternalError(f"the grammar process failed ({code.name}); the server's log has the details")
