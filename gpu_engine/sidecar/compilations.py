"""Compilations in the grammar process: one RPC for any number of equal grammars that arrive together.

Invariant: a grammar that is compiled for several requests at once is compiled by one flight (see
service_runtime/single_flight.py). When the last request that waits for a flight has left, its RPC is cancelled, and the
grammar process stops. Results are not kept here: the grammar process has the cache, and must see which grammars are in
use. When a grammar process dies during a compilation, the next one is asked again.

The grammar process has its own limits on the wait for a worker and on a compilation, and names the one that was
reached. The deadline of the RPC is longer than all of them together: when it passes, the process gives no answer.

`Admission` refuses compilations that the grammar process would refuse anyway, so that a flood of them costs no RPC.

Not responsible for: slots and matchers (see client.py), the connection (see link.py).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from gpu_engine.api.request import GrammarOwner, GrammarSpec
from gpu_engine.sidecar.link import GrammarLink
from gpu_engine.sidecar.tenant_compile_limiter import TenantCompileLimiter
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
MAX_KNOWN = 16384
"""Grammars that are remembered as compiled, by their hash. On a collision, both are treated as known."""


@dataclass(slots=True)
class _Places:
    """The compilations of one tenant on one backend."""

    weight: float
    taken: int = 0


@dataclass(slots=True)
class Admission:
    """Counts the compilations under way, by the backend that was asked for, and refuses those above its limit.

    Invariant: a compilation that is refused here would have found the queue of the grammar process full, by the limit
    that the process itself gave (Configure). Grammars that the process is known to have are answered at once, and need
    no place. A sequence that holds a slot was accepted before and is never refused, but its compilation counts.

    Above the limit a tenant's compilation is sent while another tenant has more of them over its weight: the grammar
    process gives it the place of that tenant's newest one (see grammar_service/compile/queue.py).
    """

    max_known: int = MAX_KNOWN
    refused: int = 0
    """Compilations that were not sent."""
    _running: dict[int, dict[str, _Places]] = field(default_factory=dict)
    """Backend -> tenant, "" for none -> its compilations."""
    _known: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _attached: int = 0
    """The number of the grammar process that has the known grammars."""

    def enter(self, spec: GrammarSpec, attached: int, limit: int) -> bool:
        """Admit a compilation; return whether it takes a place, and needs a call of `leave`. Raises LimitExceeded.

        Args:
            attached: the number of the grammar process (`GrammarLink.attached`).
            limit: compilations that one backend of this process takes at once; 0: no limit.
        """
        if self.knows(spec, attached):
            self._known.move_to_end(hash(spec))
            return False
        all_places = self._running.setdefault(spec.backend, {})
        tenant, weight = ("", 1.0) if spec.owner is None else (spec.owner.tenant, spec.owner.weight)
        mine = all_places.get(tenant) or _Places(weight)
        mine.weight = weight
        full = 0 < limit <= sum(places.taken for places in all_places.values())
        if full and (mine.taken + 1) / weight >= max(places.taken / places.weight for places in all_places.values()):
            self.refused += 1
            raise LimitExceeded(f"grammar: compile_queue: {limit} compilations run or wait already; try again")
        mine.taken += 1
        all_places[tenant] = mine
        return True

    def knows(self, spec: GrammarSpec, attached: int) -> bool:
        """Return whether the grammar process of this number is known to have the grammar."""
        return attached == self._attached and hash(spec) in self._known

    def leave(self, spec: GrammarSpec) -> None:
        """Give back the place of a compilation that has ended."""
        all_places, tenant = self._running[spec.backend], "" if spec.owner is None else spec.owner.tenant
        all_places[tenant].taken -= 1
        if not all_places[tenant].taken:
            del all_places[tenant]

    def compiled(self, spec: GrammarSpec, attached: int) -> None:
        """Remember that the grammar process of this number has the grammar."""
        if attached != self._attached:
            self._attached = attached
            self._known.clear()
        self._known[hash(spec)] = None
        self._known.move_to_end(hash(spec))
        if len(self._known) > self.max_known:
            self._known.popitem(last=False)

    def forget_known(self) -> None:
        """Forget which grammars the grammar process has: it dropped them."""
        self._known.clear()

    def __repr__(self) -> str:
        running = sum(places.taken for tenants in self._running.values() for places in tenants.values())
        return f"<Admission running={running} known={len(self._known)} refused={self.refused}>"


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

    def __init__(self, config: ServerConfig, link: GrammarLink, tasks: OwnedTasks, admission: Admission) -> None:
        self._wait_s = config.grammar_wait_s
        self._attempt_s = config.compile_timeout_s
        self._link = link
        self._tickets: dict[str, _Ticket] = {}
        self._flights: SingleFlight[_Key, Compiled] = SingleFlight(spawn=tasks.spawn)
        self._admission = admission
        self._limiter = TenantCompileLimiter()

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
        if self._flights.get(key) is not None:
            return self._flights.join(key, lambda: self._compile(spec, accepted))
        if spec.owner is not None and not accepted and not self._admission.knows(spec, self._link.attached):
            return self._join_in_turn(key, spec, spec.owner)
        limit = 0 if accepted else self._link.max_compilations
        takes_place = self._admission.enter(spec, self._link.attached, limit)
        flight, joined = self._flights.join(key, lambda: self._compile(spec, accepted))
        if takes_place:
            flight.task.add_done_callback(lambda _: self._admission.leave(spec))
        return flight, joined

    def _join_in_turn(self, key: _Key, spec: GrammarSpec, owner: GrammarOwner) -> tuple[_Flight, bool]:
        """Start a flight that waits for its tenant's turn, and only then for a place. Raises LimitExceeded."""
        self._limiter.admit(owner)
        flight, joined = self._flights.join(key, lambda: self._compile_in_turn(spec, owner))
        flight.task.add_done_callback(lambda _: self._limiter.ended(owner))
        return flight, joined

    async def _compile_in_turn(self, spec: GrammarSpec, owner: GrammarOwner) -> Compiled:
        async with self._limiter.turn(owner):
            takes_place = self._admission.enter(spec, self._link.attached, self._link.max_compilations)
            try:
                return await self._compile(spec, accepted=False)
            finally:
                if takes_place:
                    self._admission.leave(spec)

    async def _compile(self, spec: GrammarSpec, accepted: bool) -> Compiled:
        message = gpb.CompileRequest(
            kind=cast("gpb.Kind", spec.kind.value),
            source=spec.source,
            whitespace=cast("gpb.Whitespace", spec.whitespace),
            backend=cast("gpb.Backend", spec.backend),
            allow_unenforced=spec.allow_unenforced,
            verify=spec.verify,
            accepted=accepted,
            **dict(spec.bounds),  # type: ignore[arg-type]
        )
        if spec.owner is not None:
            message.owner, message.owner_bytes = spec.owner.space, spec.owner.max_bytes
            message.tenant, message.tenant_weight = spec.owner.tenant, spec.owner.weight
        while True:
            await self._link.ready(self._wait_s)
            attached = self._link.attached
            timeout_s = self._timeout_s(spec)
            try:
                response = await self._link.stub.Compile(message, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise grammar_error(error, "Compile", timeout_s) from error
                # The RPC breaks a moment before or after the segment socket: a retry needs another connection.
                await self._link.attached_after(attached, self._wait_s)
                continue
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                continue  # no waiter has left: the channel to the last grammar process was closed during the call
            self._admission.compiled(spec, attached)
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

    def _timeout_s(self, spec: GrammarSpec) -> float:
        """Return the deadline of a Compile: what the limits of the attached process allow, and a margin."""
        attempts = AUTO_ATTEMPTS * len(self._link.backends) if spec.backend == gpb.BACKEND_AUTO else 1
        return attempts * (self._link.attempt_limit_s or self._attempt_s) + COMPILE_MARGIN_S

    def __repr__(self) -> str:
        return f"<GrammarCompiler tickets={len(self._tickets)} {self._flights!r} {self._admission!r}>"


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
