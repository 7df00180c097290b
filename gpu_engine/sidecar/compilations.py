"""Compilations in the grammar process: one RPC for any number of equal grammars that arrive together.

The invariant: while a compilation runs, an equal spec joins it; its result belongs to every request that holds a ticket
for it, and when the last of them has left, the RPC is cancelled, by which the grammar process knows to stop. Finished
ones are not kept here, because the grammar process has the cache and must see which grammars are in use. A grammar
process that dies in the middle costs a retry on the next one. Not here: slots (`grammar_client.py`), and who is not let
through (`grammar_admission.py`).
"""

from __future__ import annotations

import asyncio
import logging
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
from gpu_engine.api.owned_tasks import OwnedTasks
from gpu_engine.api.ports import Compiled
from gpu_engine.api.request import GrammarSpec
from gpu_engine.sidecar.admission import Admission
from gpu_engine.sidecar.link import GrammarLink
from protos.grammar.v1 import grammar_pb2 as gpb

log = logging.getLogger(__name__)

COMPILE_MARGIN_S = 30.0
"""On top of the compile limit, which the grammar process enforces: time in its queue."""


@dataclass(slots=True, eq=False)
class _Running:
    """A compilation, and how many wait for it."""

    key: tuple[GrammarSpec, bool]
    """What, and whether its sequence was accepted before."""
    task: asyncio.Task[Compiled]
    waiters: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """The compilation that a request waits for."""

    running: _Running
    joined: bool
    """An earlier request had started it."""
    failed: Callable[[LockstepError], None]
    """Ends the request."""


class GrammarCompiler:
    """Used on the event loop. Tasks belong to `tasks`, whose owner ends them."""

    def __init__(self, config: ServerConfig, link: GrammarLink, tasks: OwnedTasks, admission: Admission) -> None:
        self._wait_s = config.grammar_wait_s
        self._timeout_s = config.compile_timeout_s + COMPILE_MARGIN_S
        self._link = link
        self._tasks = tasks
        self._tickets: dict[str, _Ticket] = {}
        self._running: dict[tuple[GrammarSpec, bool], _Running] = {}
        self._admission = admission

    def prepare(self, request_id: str, spec: GrammarSpec, failed: Callable[[LockstepError], None]) -> None:
        """Start or join the compilation; `failed` is called when it fails, or by `fail_compiled`.

        Raises LimitExceeded when the grammar process has enough to do.
        """
        joined = (spec, False) in self._running or (spec, True) in self._running
        ticket = self._tickets[request_id] = _Ticket(self._join(spec), joined, failed)

        def done(task: asyncio.Task[Compiled]) -> None:
            if not task.cancelled() and isinstance(error := task.exception(), LockstepError):
                failed(error)

        ticket.running.task.add_done_callback(done)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        ticket = self._tickets.pop(request_id, None)
        if ticket:
            self._leave(ticket.running)

    def compiled_s(self, request_id: str) -> float:
        """Return `time.monotonic()` when the request's grammar was compiled; 0.0: it is not, or none was asked for."""
        ticket = self._tickets.get(request_id)
        task = ticket.running.task if ticket else None
        failed = task is None or not task.done() or task.cancelled() or task.exception() is not None
        return 0.0 if task is None or failed else task.result().ready_s

    def fail_compiled(self, error: LockstepError) -> None:
        """End every request whose grammar was compiled; the others learn of an outage from their compilation."""
        for ticket in list(self._tickets.values()):
            if ticket.running.task.done():
                ticket.failed(error)

    async def result(self, request_id: str, spec: GrammarSpec) -> Compiled:
        """Return what the request's ticket stands for; without one compile now. Raises what `failed` is told."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return await self.again(spec, accepted=True)
        ticket.running.waiters += 1
        compiled = await self._wait(ticket.running)
        return replace(compiled, cache_hit=compiled.cache_hit or ticket.joined)

    async def again(self, spec: GrammarSpec, *, accepted: bool = False) -> Compiled:
        """Compile whatever the tickets say: the grammar process has dropped an earlier result. Raises LockstepError.

        What is `accepted`, as a slot's grammar is, is refused by no queue, here or there.
        """
        return await self._wait(self._join(spec, accepted=accepted))

    def _join(self, spec: GrammarSpec, *, accepted: bool = False) -> _Running:
        """Start or join a compilation; whoever joins also leaves. Raises LimitExceeded, unless it is `accepted`.

        An accepted one joins none that was not: the grammar process joins them, and hears that it is accepted.
        """
        running = self._running.get((spec, True)) or self._running.get((spec, accepted))
        if running is None:
            limit = 0 if accepted else self._link.max_compilations
            counts = self._admission.enter(spec, self._link.attached, limit)
            task = self._tasks.spawn(self._compile(spec, accepted), f"compile {spec.kind.name}")
            running = self._running[spec, accepted] = _Running((spec, accepted), task)
            task.add_done_callback(lambda _: self._end(running))
            if counts:
                task.add_done_callback(lambda _: self._admission.leave(spec))
        running.waiters += 1
        return running

    async def _wait(self, running: _Running) -> Compiled:
        try:
            # Shielded: others may wait for the same task when this waiter is cancelled.
            return await asyncio.shield(running.task)
        finally:
            self._leave(running)

    def _leave(self, running: _Running) -> None:
        running.waiters -= 1
        if not running.waiters and not running.task.done():
            # Out of the table first: who asks now must not join a task that is being cancelled.
            self._end(running)
            running.task.cancel()

    def _end(self, running: _Running) -> None:
        if self._running.get(running.key) is running:
            del self._running[running.key]

    async def _compile(self, spec: GrammarSpec, accepted: bool) -> Compiled:
        message = gpb.CompileRequest(
            kind=cast("gpb.Kind", spec.kind.value),
            source=spec.source,
            whitespace=cast("gpb.Whitespace", spec.whitespace),
            backend=cast("gpb.Backend", spec.backend),
            allow_unenforced=spec.allow_unenforced,
            accepted=accepted,
        )
        while True:
            await self._link.ready(self._wait_s)
            attached = self._link.attached
            try:
                response = await self._link.stub.Compile(message, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise grammar_error(error) from error
                # The RPC breaks a moment before or after the segment socket: only another connection is worth a retry.
                await self._link.attached_after(attached, self._wait_s)
                continue
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                continue  # nobody has left: the channel to the last grammar process was closed under the call
            self._admission.compiled(spec, attached)
            return Compiled(
                grammar_id=response.grammar_id,
                backend=int(response.backend),
                cache_hit=response.cache_hit,
                compile_ms=response.compile_ms,
                warnings=tuple(response.warnings),
                memory_bytes=response.memory_bytes,
                min_tokens=response.min_tokens,
                closing_tokens=response.closing_tokens,
                attached=attached,
                ready_s=time.monotonic(),
            )

    def __repr__(self) -> str:
        return f"<GrammarCompiler tickets={len(self._tickets)} running={len(self._running)} {self._admission!r}>"


def grammar_error(error: grpc.aio.AioRpcError) -> LockstepError:
    """Return the engine's error for a status of the grammar process. The one place that knows both."""
    # `source` is a field of the protocol between the processes; the client's own is called by its kind.
    message = (error.details() or error.code().name).removeprefix("source: ")
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest("grammar", message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return LimitExceeded(f"grammar: {message}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotSupported(f"grammar: {message}")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.FAILED_PRECONDITION:
            return GrammarUnavailable(
                f"the grammar process does not answer ({error.code().name}: {message}); try again"
            )
        case code:
            log.error("the grammar process failed: %s %s", code, message)
            return InternalError(f"the grammar process failed ({code.name}); the server's log has the details")
