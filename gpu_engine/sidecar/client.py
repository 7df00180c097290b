"""The engine's client of the grammar process: a matcher for every guided slot, from `open` to `close`.

Invariant: every `open` is followed by exactly one of grammar_opened, grammar_failed, a newer `open` of the same slot,
or `close`. When the grammar process is lost, the engine opens every slot again. Two threads call in here: the event
loop (`prepare`, `forget`, `stats`, ...), and the engine's thread (`open` and `close`, which only post to the loop).

Not responsible for: the connection (see link.py), compilations (see compilations.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from gpu_engine.api.config import ServerConfig
from gpu_engine.api.errors import GrammarUnavailable, InternalError, InvalidRequest, LockstepError
from gpu_engine.api.ports import ClearedGrammars, Compiled, GrammarEvents, GrammarLibrary, GrammarStats
from gpu_engine.api.request import GrammarExact, GrammarSpec, Request
from gpu_engine.sidecar.compilations import GrammarCompiler, grammar_error
from gpu_engine.sidecar.compile_admission import CompileAdmission
from gpu_engine.sidecar.link import GrammarLink
from protos.grammar.v1 import grammar_pb2 as gpb
from service_runtime.logs import REQUEST_ID
from service_runtime.owned_tasks import OwnedTasks
from service_runtime.repetition import RepetitionLimit

log = logging.getLogger(__name__)

BIND_TIMEOUT_S = 10.0
STATS_TIMEOUT_S = 1.0
CLEAR_TIMEOUT_S = 30.0


class AbortWord(Protocol):
    """The word in the segment that ends every wait of the engine's step; `EngineEnd` implements this."""

    def set_abort(self) -> None:
        """End all waits, until the word is cleared."""

    def clear_abort(self) -> None:
        """Let steps wait again."""


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot between `open` and `close`."""

    request_id: str
    spec: GrammarSpec
    max_tokens: int
    repetition: RepetitionLimit | None = None
    exact: GrammarExact | None = None
    """Of an exact answer, whose rows are not narrowed near `max_tokens`."""
    task: asyncio.Task[None] | None = None
    binding: bool = False
    """A Bind is under way: the matcher may exist when a Release is sent, so the Release waits for it."""
    bound_in: int = 0
    """Number of the grammar process (`GrammarLink.attached`) that confirmed the matcher; 0: none has."""
    in_hand: bool = False
    """The grammar process has the Bind, and the grammar is compiled: a crash now may be due to this matcher."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer of a slot, as the grammar process has to know it."""

    committed: tuple[int, ...]
    dead_texts: tuple[bytes, ...] = ()
    """It begins with none of them from here on."""
    first: int | None = None
    """A way back is asked for, over the tokens after the first so many; None: a matcher is."""


class GrammarClient:
    """Made on the event loop. `attach` is called before any other method."""

    def __init__(self, config: ServerConfig, abort_word: AbortWord) -> None:
        self._config = config
        self._wait_s = config.grammar_wait_s
        self._abort_word = abort_word
        self._loop = asyncio.get_running_loop()
        self._tasks = OwnedTasks(LockstepError)
        self._link: GrammarLink
        self._compiler: GrammarCompiler
        self._engine: GrammarEvents
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._outage: asyncio.TimerHandle | None = None
        self._was_lost = self._closed = False
        self.serves = False
        """Guided requests are served, or wait for a process for at most `grammar_wait_s`."""
        self.admission = CompileAdmission()
        """Read for its count of refusals; the compiler changes it."""

    def attach(self, engine: GrammarEvents, link: GrammarLink) -> None:
        """Connect engine and client: the engine is built with this client, and the client reports to the engine."""
        self._engine = engine
        self._link = link
        self._compiler = GrammarCompiler(self._config, link, self._tasks, self.admission)

    @property
    def guided_by(self) -> int:
        """Number of the attached grammar process while it has confirmed a matcher of this engine; else 0."""
        now = self._link.attached if self._link.up else 0
        return now if any(state.bound_in == now for state in self._slots.values()) else 0

    # ---- for the servicer, on the event loop -----------------------------------------------------------------------

    @property
    def backends(self) -> tuple[int, ...]:
        """Installed backends, the default first; empty before the first connection."""
        return self._link.backends

    def library_of(self, backend: int) -> GrammarLibrary:
        """Return what masks the answers of a backend in the last attached process."""
        return GrammarLibrary(
            dict(zip(self._link.backends, self._link.versions, strict=False)).get(backend, ""), self._link.defaults
        )

    def prepare(self, request_id: str, spec: GrammarSpec, failed: Callable[[LockstepError], None]) -> None:
        """Start to compile a request's grammar; `failed` is called if that fails. Raises LimitExceeded."""
        self._compiler.prepare(request_id, spec, failed)

    def forget(self, request_id: str) -> None:
        """Leave the compilation of a request that has ended."""
        self._compiler.forget(request_id)

    def compiled_s(self, request_id: str) -> float:
        """Return `time.monotonic()` of the moment when the request's grammar was compiled; 0.0: it is not."""
        return self._compiler.compiled_s(request_id)

    async def compile(self, spec: GrammarSpec) -> Compiled:
        """Compile a grammar for no request. Raises LockstepError."""
        return await self._compiler.compile(spec)

    async def stats(self) -> GrammarStats:
        """Return the gauges of the grammar process; zeros while it does not answer."""
        starts = self._link.attached
        if self._link.up:
            try:
                stats = await self._link.stub.GetStats(gpb.GetStatsRequest(), timeout=STATS_TIMEOUT_S)
                return GrammarStats(starts, True, stats.matchers, stats.cached_grammars)
            except grpc.aio.AioRpcError as error:
                log.warning("the grammar process does not answer GetStats: %s", error.details())
        return GrammarStats(starts=starts)

    async def clear_cache(self, *, disk: bool) -> ClearedGrammars:
        """Have the grammar process drop the compiled grammars that no matcher uses; with `disk` also the files.

        Raises GrammarUnavailable while no grammar process is attached.
        """
        if not self._link.up:
            raise GrammarUnavailable("the grammar process is not there; try again")
        try:
            cleared = await self._link.stub.ClearCache(gpb.ClearCacheRequest(disk=disk), timeout=CLEAR_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise grammar_error(error, "ClearCache", CLEAR_TIMEOUT_S) from error
        self.admission.queue.forget_known()
        return ClearedGrammars(cleared.dropped, cleared.kept, cleared.files, cleared.freed_bytes)

    async def metrics(self, timeout_s: float) -> bytes | None:
        """Return the grammar process's metrics in Prometheus' text format; None while it does not answer."""
        if not self._link.up:
            return None
        try:
            response = await self._link.stub.GetMetrics(gpb.GetMetricsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            log.debug("the grammar process does not answer GetMetrics: %s", error.details())
            return None
        return response.exposition

    # ---- for the engine, on its thread -----------------------------------------------------------------------------

    def open(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        dead_texts: tuple[bytes, ...] = (),
    ) -> None:
        """Request a matcher for the slot, advanced over `committed`; grammar_opened or grammar_failed follows."""
        self._loop.call_soon_threadsafe(self._open, (slot, slot_gen), request, _Answer(committed, dead_texts))

    def backtrack(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        first: int,
        dead_texts: tuple[bytes, ...],
    ) -> None:
        """Ask for a way back of the slot's answer; grammar_backtracked or grammar_failed follows."""
        self._loop.call_soon_threadsafe(self._open, (slot, slot_gen), request, _Answer(committed, dead_texts, first))

    def forked(self, slot: int, slot_gen: int, request: Request, before: tuple[int, int] | None) -> None:
        """Note a matcher that the step plane has made, in place of `before`."""
        self._loop.call_soon_threadsafe(self._forked, (slot, slot_gen), request, before)

    def close(self, slot: int, slot_gen: int) -> None:
        """Release the slot's matcher."""
        self._loop.call_soon_threadsafe(self._close, (slot, slot_gen))

    # ---- for the link and the supervisor, on the event loop --------------------------------------------------------

    def link_silent(self) -> None:
        """End the waits of the running step, and pause guided slots."""
        self._abort_word.set_abort()
        self._engine.grammar_silent()

    def link_alive(self) -> None:
        """Let guided slots go on: the process shows life again."""
        self._abort_word.clear_abort()
        self._engine.grammar_alive()

    def link_lost(self) -> None:
        """Pause guided slots; end them when no grammar process is attached within `grammar_wait_s`."""
        self._was_lost = True
        self._abort_word.set_abort()
        self._engine.grammar_lost([key for key, state in self._slots.items() if state.in_hand])
        for state in self._slots.values():
            if state.task:
                state.task.cancel()  # the engine opens each slot again when a grammar process is attached
        self._outage = self._loop.call_later(self._wait_s, self._fail_guided)

    def link_restored(self) -> None:
        """Have the engine open every guided slot again: a grammar process is attached."""
        self.serves = True
        if self._outage:
            self._outage.cancel()
            self._outage = None
        if self._was_lost:
            self._abort_word.clear_abort()
            self._engine.grammar_restored()

    def give_up(self, reason: str) -> None:
        """End guided requests, and refuse new ones with `reason` until a grammar process is attached."""
        self._link.give_up(reason)
        self._fail_guided()

    async def aclose(self) -> None:
        """Cancel all tasks of this client. The owner of the link closes the link."""
        self._closed = True
        if self._outage:
            self._outage.cancel()
        await self._tasks.aclose()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _fail_guided(self) -> None:
        self.serves = False
        error = GrammarUnavailable("the grammar process was lost and did not come back; try again")
        for slot, slot_gen in self._slots:
            self._engine.grammar_failed(slot, slot_gen, error)
        # A request that still waits for a slot has no matcher to fail, and would wait for ever in its next slot.
        self._compiler.fail_compiled(error)

    def _open(self, key: tuple[int, int], request: Request, answer: _Answer) -> None:
        if self._closed or request.grammar is None:
            return
        if (old := self._slots.get(key)) and old.task:
            old.task.cancel()
        sampling = request.sampling
        exact = sampling.grammar_exact
        state = _Slot(request.request_id, request.grammar, sampling.max_tokens, sampling.repetition, exact)
        self._slots[key] = state
        state.task = self._tasks.spawn(self._open_slot(key, state, answer), f"open slot {key[0]}.{key[1]}")

    def _forked(self, key: tuple[int, int], request: Request, before: tuple[int, int] | None) -> None:
        old = self._slots.pop(before, None) if before else None
        if old is not None and old.task:
            old.task.cancel()  # its Bind may still arrive: the grammar process drops the matcher of an older owner
        if not self._closed and request.grammar is not None:
            bound_in = self._link.attached if self._link.up else 0
            state = _Slot(request.request_id, request.grammar, request.sampling.max_tokens, bound_in=bound_in)
            self._slots[key] = state

    async def _open_slot(self, key: tuple[int, int], state: _Slot, answer: _Answer) -> None:
        REQUEST_ID.set(state.request_id)
        found: gpb.BacktrackResponse | None
        try:
            compiled = await self._compiler.result(state.request_id, state.spec)
            state.binding = True
            try:
                found = await self._bind(key, state, compiled, answer)
            except _EvictedError:
                compiled = await self._compiler.compile(state.spec, accepted=True)
                found = await self._bind(key, state, compiled, answer)
        except _EvictedError:
            evicted = GrammarUnavailable("the grammar process evicts grammars too fast; try again")
            self._engine.grammar_failed(*key, evicted)
        except LockstepError as error:
            self._engine.grammar_failed(*key, error)
        except Exception as error:
            self._engine.grammar_failed(*key, InternalError(f"the slot was not opened ({type(error).__name__})"))
            raise  # for the log
        else:
            if found is not None:
                self._go_back(key, answer, found)
                return
            self._engine.grammar_opened(
                *key,
                compile_ms=compiled.compile_ms,
                cache_hit=compiled.cache_hit,
                backend=compiled.backend,
                warnings=compiled.warnings,
                verified=compiled.verified,
            )
        finally:
            state.binding = False

    def _go_back(self, key: tuple[int, int], answer: _Answer, found: gpb.BacktrackResponse) -> None:
        """Report the way back, which must take at least one token back and none that was sent."""
        if found.found and not (answer.first or 0) <= found.num_tokens < len(answer.committed):
            words = f"the grammar process goes back to {found.num_tokens} of {len(answer.committed)} tokens"
            self._engine.grammar_failed(*key, InternalError(f"{words}, and {answer.first} were sent"))
            return
        self._engine.grammar_backtracked(*key, found.num_tokens if found.found else -1, tuple(found.dead_texts))

    async def _bind(
        self, key: tuple[int, int], state: _Slot, compiled: Compiled, answer: _Answer
    ) -> gpb.BacktrackResponse | None:
        """Have the grammar process make a matcher, or return its way back if the answer asks for that."""
        if state.max_tokens < compiled.min_tokens:
            raise InvalidRequest(
                "sampling.max_tokens",
                f"leaves {state.max_tokens} tokens, no answer of this grammar has fewer than {compiled.min_tokens}",
            )
        await self._link.ready(self._wait_s)
        attached = self._link.attached
        binds = answer.first is None
        message = _bind_request(key, state, compiled, answer) if binds else _backtrack_request(state, compiled, answer)
        # A process that has not compiled the grammar answers NOT_FOUND, and cannot crash over the matcher.
        state.in_hand = compiled.attached == attached
        try:
            if isinstance(message, gpb.BacktrackRequest):
                return await self._link.stub.Backtrack(message, timeout=BIND_TIMEOUT_S)
            await self._link.stub.Bind(message, timeout=BIND_TIMEOUT_S)
            state.bound_in = attached
            return None
        except grpc.aio.AioRpcError as error:
            match error.code():
                case grpc.StatusCode.NOT_FOUND:
                    raise _EvictedError from error
                case grpc.StatusCode.INVALID_ARGUMENT:
                    # The tokens were chosen under this grammar's masks: a refusal is a defect of this project.
                    log.error("the grammar process refused committed tokens; DEBUG has its message")
                    log.debug("the grammar process refused committed tokens: %s", error.details())  # it has a token
                    raise InternalError("the grammar process refused tokens that it had allowed") from error
                case grpc.StatusCode.UNAVAILABLE:
                    # The link is about to notice the loss, and `link_lost` cancels this task while it waits here.
                    await self._link.attached_after(attached, self._wait_s)
            raise grammar_error(error, "Bind" if binds else "Backtrack", BIND_TIMEOUT_S) from error
        finally:
            state.in_hand = False

    def _close(self, key: tuple[int, int]) -> None:
        state = self._slots.pop(key, None)
        if state is None or self._closed:
            return
        if state.task and not state.binding:
            state.task.cancel()
        self._tasks.background(self._release(key, state), f"release slot {key[0]}.{key[1]}")

    async def _release(self, key: tuple[int, int], state: _Slot) -> None:
        if state.task:
            await asyncio.wait([state.task])
        if not self._link.up:
            return  # the matchers were lost with the process
        try:
            await self._link.stub.Release(gpb.ReleaseRequest(slot=key[0], slot_gen=key[1]), timeout=BIND_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                log.warning("releasing slot %d.%d failed: %s", *key, error.details())

    def __repr__(self) -> str:
        return f"<GrammarClient slots={len(self._slots)} {self._compiler!r} {self._tasks!r}>"


class _EvictedError(Exception):
    """The grammar process does not know the grammar id any more."""


def _bind_request(key: tuple[int, int], state: _Slot, compiled: Compiled, answer: _Answer) -> gpb.BindRequest:
    message = gpb.BindRequest(
        slot=key[0],
        slot_gen=key[1],
        grammar_id=compiled.grammar_id,
        committed_tokens=answer.committed,
        max_tokens=state.max_tokens if state.exact is None else 0,
        request_id=REQUEST_ID.get(),
        dead_texts=answer.dead_texts,
        any_spelling=state.exact is not None and state.exact.any_spelling,
    )
    if (limit := state.repetition) is not None:
        message.repetition_max_pattern_size = limit.max_pattern_size
        message.repetition_min_pattern_size = limit.min_pattern_size
        message.repetition_min_count, message.min_tokens = limit.min_count, limit.min_tokens
    return message


def _backtrack_request(state: _Slot, compiled: Compiled, answer: _Answer) -> gpb.BacktrackRequest:
    return gpb.BacktrackRequest(
        grammar_id=compiled.grammar_id,
        committed_tokens=answer.committed,
        max_tokens=state.max_tokens,
        dead_texts=answer.dead_texts,
        first_position=answer.first or 0,
    )
