"""The Grammar service: protobuf messages in and out, and errors as status codes.

Invariant: a Bind is acknowledged only after its matcher is in the worker's inbox. So a record that is posted after the
acknowledgement meets the new matcher.

Not responsible for: compilation (see compile/compiler.py), mask rows (see fill/worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

from grammar_service.backends.backend import Matcher, MatcherFailed, spelled_freely
from grammar_service.backends.reasoning import ReasoningCompiled
from grammar_service.backends.registry import NAMES, installed, installed_version
from grammar_service.backends.verified import avoiding, find_way_back, is_verified
from grammar_service.compile.compiler import AUTO, Compiler, Entry, attempt_limit_s
from grammar_service.compile.owned_cache import Owner
from grammar_service.compile.pool import NUM_QUEUES
from grammar_service.compile.queue import Share
from grammar_service.completion.budget import CompletionBudget
from grammar_service.config import GrammarConfig
from grammar_service.errors import (
    GrammarServiceError,
    InternalError,
    InvalidField,
    NotConfigured,
    NotSupported,
)
from grammar_service.fill.matchers import MatcherRejected, SlotMatcher
from grammar_service.fill.worker import Worker
from grammar_service.grammar.value import BOUNDS, Kind, Whitespace
from grammar_service.grammar.vocabulary import Vocabulary
from grammar_service.metrics import GrammarMetrics
from protos.grammar.v1 import grammar_pb2 as pb
from protos.grammar.v1 import grammar_pb2_grpc as pb_grpc
from service_runtime.repetition import MAX_COUNT, MAX_PATTERN_SIZE, MIN_COUNT, RepetitionLimit
from shared_mem.layout import Layout

logger = logging.getLogger(__name__)

_BACKENDS = {"xgrammar": pb.BACKEND_XGRAMMAR, "llguidance": pb.BACKEND_LLGUIDANCE}
_BACKEND_NAMES = {number: name for name, number in _BACKENDS.items()} | {pb.BACKEND_AUTO: AUTO}
ATTACH_WAIT_S = 2.0
"""Bound on the wait for a worker: the engine may call before its segment, just received, has one."""

MAX_OWNER_BYTES = 64
"""The names of owners are keys of digests."""
MIN_TENANT_WEIGHT, MAX_TENANT_WEIGHT = 0.01, 100.0
_MANY_TOKENS = 64
"""More committed tokens than this are replayed off the event loop, and so are tokens near `max_tokens`."""


@asynccontextmanager
async def _statuses(context: Any) -> AsyncIterator[None]:
    try:
        yield
    except GrammarServiceError as error:
        if isinstance(error, InternalError):
            logger.error("%s", error)
        await context.abort(grpc.StatusCode[error.status], str(error))


class GrammarServicer(pb_grpc.GrammarServicer):
    """State of a grammar process: at most one vocabulary with its compiler, at most one engine with its worker."""

    def __init__(
        self, config: GrammarConfig, new_compiler: Callable[[GrammarConfig, Vocabulary], Compiler] = Compiler
    ) -> None:
        self._config, self._new_compiler = config, new_compiler
        self._vocabulary: Vocabulary | None = None
        self._compiler: Compiler | None = None
        self._configuring = asyncio.Lock()
        self._worker: Worker | None = None
        self._layout: Layout | None = None
        self._attachment = asyncio.Event()
        self._bound: dict[int, tuple[int, str]] = {}
        """By slot: slot_gen and grammar id of its matcher."""
        self.metrics = GrammarMetrics(lambda: self._compiler.stats() if self._compiler else {})

    def attach(self, worker: Worker, layout: Layout) -> None:
        """Serve an engine whose segment is mapped and whose worker runs."""
        self._worker, self._layout = worker, layout
        self.metrics.attach(worker)
        self._attachment.set()

    def detach(self) -> None:
        """Forget the worker of an engine that has disconnected. Compiled grammars stay for the next engine."""
        self._worker = self._layout = None
        self._bound.clear()
        self.metrics.detach()
        self._attachment.clear()

    async def close(self) -> None:
        """End the compile workers, also of a vocabulary that is being configured."""
        async with self._configuring:
            if self._compiler is not None:
                await self._compiler.close()

    async def Configure(self, request: pb.ConfigureRequest, context: Any) -> pb.ConfigureResponse:
        """See grammar.proto."""
        async with _statuses(context), self._configuring:
            vocabulary = await asyncio.to_thread(
                Vocabulary.load, request.tokenizer_json, request.vocab_size, tuple(request.stop_token_ids)
            )
            if self._vocabulary is None or self._vocabulary.digest != vocabulary.digest:
                await self._replace(vocabulary)
        names = [self._config.backend, *(name for name in NAMES if name != self._config.backend and installed(name))]
        return pb.ConfigureResponse(
            backends=[_BACKENDS[name] for name in names],
            versions=[installed_version(name) for name in names],
            pid=os.getpid(),
            # Each of the queues has as many places; what one of them cannot take is refused here.
            max_compilations=NUM_QUEUES * (self._config.workers + self._config.compile_queue),
            attempt_limit_s=attempt_limit_s(self._config),
            compile_timeout_s=self._config.compile_timeout_s,
            defaults=self._config.answer_defaults,
        )

    async def _replace(self, vocabulary: Vocabulary) -> None:
        old, self._compiler, self._vocabulary = self._compiler, None, None
        self._bound.clear()
        if self._worker is not None:
            self._worker.drop_all()
        if old is not None:
            await old.close()
        compiler = self._new_compiler(self._config, vocabulary)
        try:
            await compiler.ready()
        except BaseException:
            await compiler.close()
            raise
        self._compiler, self._vocabulary = compiler, vocabulary
        logger.debug("configured: %r", vocabulary)

    async def Compile(self, request: pb.CompileRequest, context: Any) -> pb.CompileResponse:
        """See grammar.proto."""
        async with _statuses(context):
            compiler = self._configured()
            kind = _kind(request.kind)
            if len(request.owner.encode()) > MAX_OWNER_BYTES:
                raise InvalidField("owner", f"has more than {MAX_OWNER_BYTES} bytes")
            share = _share(request)
            if request.whitespace not in pb.Whitespace.values():
                raise InvalidField("whitespace", f"{request.whitespace} is unknown")
            whitespace = Whitespace(request.whitespace or self._config.default_whitespace)
            backend = self._config.backend
            if request.backend:
                backend = _BACKEND_NAMES.get(request.backend, "")
                if not backend:
                    raise InvalidField("backend", f"{request.backend} is unknown")
                if backend != AUTO and not installed(backend):
                    raise NotSupported(f"backend: {backend} is not installed in this sidecar")
            with self.metrics.compilation(kind.name.lower()) as compiled:
                entry, hit = await compiler.compile(
                    kind,
                    request.source,
                    whitespace,
                    backend,
                    allow_unenforced=request.allow_unenforced,
                    verify=request.verify,
                    bounds={name: getattr(request, name) for name in BOUNDS if request.HasField(name)},
                    closed_objects=request.closed_objects if request.HasField("closed_objects") else None,
                    accepted=request.accepted,
                    owner=Owner(request.owner, request.owner_bytes),
                    share=share,
                )
                compiled(entry.backend, hit, entry.compile_ms)
            return pb.CompileResponse(
                grammar_id=entry.grammar_id,
                backend=_BACKENDS[entry.backend],
                cache_hit=hit,
                compile_ms=entry.compile_ms,
                memory_bytes=entry.compiled.memory_bytes,
                warnings=entry.warnings,
                min_tokens=entry.plan.min_tokens,
                known_answer_tokens=len(entry.plan.path or ()),
                verified=is_verified(entry.compiled),
            )
        raise AssertionError("abort raises")

    async def Bind(self, request: pb.BindRequest, context: Any) -> pb.BindResponse:
        """See grammar.proto."""
        async with _statuses(context):
            entry = self._configured().get(request.grammar_id)
            worker = await self._attached(request.slot)
            tokens = list(request.committed_tokens)
            try:
                limit = request.max_tokens
                repetition = _repetition(request)
                new_budget = partial(CompletionBudget, entry.plan, limit, repetition=repetition) if limit else None
                if request.any_spelling:
                    # The first one of a grammar compiles it again.
                    freely = await asyncio.to_thread(spelled_freely, entry.compiled)
                    new_matcher: Callable[[], Matcher] = freely.matcher
                else:
                    new_matcher = _new_matcher(entry, limit, request.dead_texts)
                arguments = (request.slot_gen, new_matcher, tokens, new_budget)
                if len(tokens) > _MANY_TOKENS or (limit and not entry.plan.is_far(limit - len(tokens))):
                    state = await asyncio.to_thread(SlotMatcher.bind, *arguments)
                else:
                    state = SlotMatcher.bind(*arguments)
            except MatcherRejected as error:
                raise InvalidField(f"committed_tokens[{error.index}]", str(error)) from None
            except MatcherFailed as error:
                raise InternalError(f"the matcher failed: {error}") from None
            state.request_id = request.request_id
            worker.bind(request.slot, state)
            self._bound[request.slot] = (request.slot_gen, request.grammar_id)
        return pb.BindResponse()

    async def Backtrack(self, request: pb.BacktrackRequest, context: Any) -> pb.BacktrackResponse:
        """See grammar.proto."""
        async with _statuses(context):
            entry = self._configured().get(request.grammar_id)
            tokens, first = list(request.committed_tokens), request.first_position
            if first > len(tokens):
                raise InvalidField("first_position", f"{first} is more than the {len(tokens)} committed tokens")
            new_matcher = _new_matcher(entry, request.max_tokens, request.dead_texts)
            try:
                found = await asyncio.to_thread(find_way_back, new_matcher, tokens, first)
            except MatcherFailed as error:
                raise InternalError(f"the matcher failed: {error}") from None
            if found is None:
                return pb.BacktrackResponse()
            return pb.BacktrackResponse(found=True, num_tokens=found.num_tokens, dead_texts=found.dead)
        raise AssertionError("abort raises")

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """See grammar.proto."""
        async with _statuses(context):
            if self._worker is not None:
                worker = await self._attached(request.slot)
                worker.release(request.slot, request.slot_gen)
            bound = self._bound.get(request.slot)
            if bound is not None and bound[0] <= request.slot_gen:
                del self._bound[request.slot]
        return pb.ReleaseResponse()

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Any) -> pb.ClearCacheResponse:
        """See grammar.proto."""
        async with _statuses(context):
            in_use = {grammar_id for _, grammar_id in self._bound.values()}
            cleared = await self._configured().clear(in_use, disk=request.disk)
            return pb.ClearCacheResponse(
                dropped=cleared.dropped, kept=cleared.kept, freed_bytes=cleared.freed_bytes, files=cleared.files
            )
        raise AssertionError("abort raises")

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        """See grammar.proto."""
        response = pb.GetStatsResponse()
        if self._compiler is not None:
            for name, value in self._compiler.stats().items():
                setattr(response, name, value)
        worker, layout = self._worker, self._layout
        if worker is not None and layout is not None:
            stats, kinds = worker.stats(), worker.rows_by_kind()
            response.matchers = int(stats["matchers"])
            response.records = int(stats["records"])
            response.fill_p50_us = stats["fill_p50_us"]
            response.fill_p99_us = stats["fill_p99_us"]
            response.rows_filled = kinds["APPLY"] + kinds["FORCED"] + kinds["DEAD_END"]
            response.rows_by_kind.update(kinds)
            response.generation = layout.generation
        return response

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        """See grammar.proto."""
        return pb.GetMetricsResponse(exposition=self.metrics.exposition())

    def _configured(self) -> Compiler:
        if self._compiler is None:
            raise NotConfigured("the sidecar has no tokenizer yet: call Configure first")
        return self._compiler

    async def _attached(self, slot: int) -> Worker:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTACH_WAIT_S):
                await self._attachment.wait()
        worker, layout, vocabulary = self._worker, self._layout, self._vocabulary
        if worker is None or layout is None:
            raise NotConfigured("no segment is attached: send it to segment.sock first")
        if vocabulary is not None and vocabulary.size != layout.vocab_size:
            raise NotConfigured(f"vocab_size: {vocabulary.size} in Configure, {layout.vocab_size} in the segment")
        if slot >= layout.num_slots:
            raise InvalidField("slot", f"{slot} is not in [0, {layout.num_slots})")
        return worker


def _new_matcher(entry: Entry, limit: int, dead_texts: Sequence[bytes]) -> Callable[[], Matcher]:
    """Return a factory of matchers at the start of an answer of at most `limit` tokens (0: any length)."""
    compiled = avoiding(entry.compiled, dead_texts)
    if limit and isinstance(compiled, ReasoningCompiled):
        return partial(compiled.matcher, entry.plan.closing_at(limit))
    return compiled.matcher


def _repetition(request: pb.BindRequest) -> RepetitionLimit | None:
    """Return the limit of a Bind; None without one. Raises InvalidField."""
    longest, shortest = request.repetition_max_pattern_size, request.repetition_min_pattern_size
    if not longest:
        return None
    for name, value, least, most in (
        ("repetition_max_pattern_size", longest, 1, MAX_PATTERN_SIZE),
        ("repetition_min_pattern_size", shortest, 1, longest),
        ("repetition_min_count", request.repetition_min_count, MIN_COUNT, MAX_COUNT),
    ):
        if not least <= value <= most:
            raise InvalidField(name, f"{value} is not in [{least}, {most}]")
    return RepetitionLimit(longest, shortest, request.repetition_min_count, request.min_tokens)


def _share(request: pb.CompileRequest) -> Share:
    """Return whose turn a Compile takes. Raises InvalidField."""
    if len(request.tenant.encode()) > MAX_OWNER_BYTES:
        raise InvalidField("tenant", f"has more than {MAX_OWNER_BYTES} bytes")
    weight = request.tenant_weight or 1.0
    if not MIN_TENANT_WEIGHT <= weight <= MAX_TENANT_WEIGHT:
        raise InvalidField("tenant_weight", f"{weight:g} is not in [{MIN_TENANT_WEIGHT:g}, {MAX_TENANT_WEIGHT:g}]")
    return Share(request.tenant, weight)


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise InvalidField("kind", "is required" if number == 0 else f"{number} is unknown") from None
