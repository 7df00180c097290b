"""Compiles a grammar's text once: checks it, chooses a backend, looks in the caches, starts one compilation.

Invariant: equal grammars of one owner share one compilation and one cache entry. Failures are not cached, so a grammar
that exceeded its time may succeed later. A compilation without a waiter is killed. Not thread-safe: one event loop owns
a compiler.

Not responsible for: the compilation, which runs in other processes (see pool.py); loading its result (see loader.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grammar_service.backends.backend import Backend, Compiled
from grammar_service.backends.composed import verified_schema
from grammar_service.backends.json_schema.closed_objects import with_closed_objects
from grammar_service.backends.json_schema.unenforced import UNVERIFIED
from grammar_service.backends.registry import NAMES, installed, load_backend
from grammar_service.compile.disk_cache import DiskCache, artifact_key
from grammar_service.compile.forks import Forks
from grammar_service.compile.loader import Artifact, CompileLoader
from grammar_service.compile.owned_cache import OwnedCache, Owner
from grammar_service.compile.pool import COMMAND_IDLE, CompilePool, StartWorker
from grammar_service.compile.process import COMMAND, START_TIMEOUT_S, CompileProcess
from grammar_service.compile.queue import NO_TENANT, Share
from grammar_service.completion.plan import CompletionPlan
from grammar_service.config import CACHE_BYTES, QUEUE_S, GrammarConfig
from grammar_service.errors import (
    GrammarServiceError,
    InternalError,
    InvalidGrammar,
    LimitExceeded,
    NotEnforced,
    NotSupported,
    UnknownGrammar,
)
from grammar_service.grammar.value import SCHEMA_KINDS, Grammar, Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from service_runtime.single_flight import SingleFlight

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Name that selects the first backend which enforces all of the grammar."""

_NO_BOUNDS: Mapping[str, Any] = {}

ABANDONED_S = 0.25
"""Grace time of a compilation without a waiter: most end within it, and a killed worker costs the start of another."""

NO_OWNER = Owner()

MAX_CHOICES = 4096
"""Bound on the grammars whose backend, chosen by AUTO, is remembered."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled grammar in the cache."""

    grammar_id: str
    backend: str
    compiled: Compiled
    compile_ms: float
    """0: the artifact came from the disk."""
    plan: CompletionPlan
    """What is known of the grammar's answers before their first token."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the caller should know about the grammar, one line each."""
        return self.compiled.warnings


@dataclass(frozen=True, slots=True)
class _Order:
    """How a grammar is to be compiled, and for whom; see `Compiler.compile`."""

    allow_unenforced: bool
    accepted: bool
    owner: Owner
    share: Share


@dataclass(frozen=True, slots=True)
class Cleared:
    """What `Compiler.clear` dropped."""

    dropped: int
    kept: int
    """Grammars that are in use."""
    files: int
    freed_bytes: int
    """Bytes of memory (estimated) and of files."""


class Compiler:
    """Grammars of one vocabulary. `ready` starts the default backend's workers; others start with their first use."""

    def __init__(
        self,
        config: GrammarConfig,
        vocabulary: Vocabulary,
        command: Sequence[str] = (),
        *,
        start: StartWorker | None = None,
        load: Callable[[str, Vocabulary], Backend] = load_backend,
        loader: CompileLoader | None = None,
        disk: DiskCache | None = None,
    ) -> None:
        """Args: see below.

        command: starts a compile worker; (): the project's own, at the priority that `config` names.
        start: starts a process of it; None: forks the project's own from a process that has read the vocabulary.
        load: makes a backend by its name.
        loader: loads artifacts; ended with this object. None: a new loader.
        disk: the artifacts on disk; None: the cache that `config` names.
        """
        idle = config.compile_priority == "idle" and not command
        self._command = command or (COMMAND_IDLE if idle else COMMAND)
        self._fallback: Sequence[str] = COMMAND if idle else ()
        self._config = config
        self._vocabulary = vocabulary
        self._pools: dict[str, CompilePool] = {}
        self._forks: list[Forks] = []
        """Of each pool, unless `start` was given."""
        self._backends: dict[str, asyncio.Task[Backend]] = {}
        self._flights: SingleFlight[str, tuple[Entry, bool]] = SingleFlight(ABANDONED_S)
        self._accepted: set[str] = set()
        """Keys of running compilations that an accepted sequence waits for."""
        self._start = start or (CompileProcess.start if command else None)
        self._load = load
        self._loader = loader or CompileLoader()
        on_disk = config.cache_bytes and config.cache_dir
        self._disk = disk or (DiskCache(Path(config.cache_dir), config.cache_dir_bytes) if on_disk else None)
        self._cache: OwnedCache[Entry] = OwnedCache(config.cache_bytes or CACHE_BYTES)
        self._choices: OrderedDict[str, str] = OrderedDict()
        self._closed = False
        self.compiled = 0
        self.hits = 0
        self.rejected = 0
        self.limited = 0

    async def ready(self) -> None:
        """Wait until the default backend has read the vocabulary, or raise its error; then start its workers.

        The workers start later because they would take the cores from that, and grammars on disk need no worker.
        """
        await asyncio.gather(
            asyncio.shield(self._backend(self._config.backend)), self._loader.read_texts(self._vocabulary)
        )
        self._pool(self._config.backend)

    async def compile(
        self,
        kind: Kind,
        source: str,
        whitespace: Whitespace,
        backend: str,
        *,
        allow_unenforced: bool = False,
        verify: bool = False,
        bounds: Mapping[str, Any] = _NO_BOUNDS,
        closed_objects: bool | None = None,
        accepted: bool = False,
        owner: Owner = NO_OWNER,
        share: Share = NO_TENANT,
    ) -> tuple[Entry, bool]:
        """Return the cache entry of a grammar, and whether it was cached or being compiled for an earlier call.

        Args:
            backend: one of NAMES, or AUTO.
            allow_unenforced: leave out parts that cannot be enforced; the entry has a warning for each.
            verify: check on the answer the parts that cannot be enforced, if that is possible.
            bounds: fields of `Bounds`, in place of the server's.
            closed_objects: close the objects of schemas, in place of the server's setting.
            accepted: for an accepted sequence: comes before the others, and no limit of the queue rejects it.
            owner: shares compilations and cached grammars with no other one.
            share: the tenant whose turn in the queue a new compilation takes.

        Raises InvalidGrammar, InvalidField, LimitExceeded, NotSupported, InternalError.
        """
        try:
            size, limit = len(source.encode()), self._config.max_grammar_bytes
            if size > limit:
                raise LimitExceeded(f"max_grammar_bytes: the grammar has {size} bytes, the limit is {limit}")
            grammar = parse(kind, source, whitespace, self._config.max_grammar_depth)
            if kind in SCHEMA_KINDS:
                grammar = replace(grammar, reading=replace(self._config.reading, **bounds))
                grammar = with_closed_objects(grammar, closed_objects, self._config.closed_objects)
            self._vocabulary.refuse_special(grammar)
            checked = replace(grammar, reading=replace(grammar.reading, verify=verify))
            before = self._verified_before(backend, checked, _Order(False, accepted, owner, share))
            if before is not None and not allow_unenforced:
                self.hits += 1
                return before, True
            # A fully enforced grammar needs no verification, and is shared with other requests.
            try:
                found = await self._from(backend, grammar, _Order(allow_unenforced, accepted, owner, share))
            except NotEnforced:
                if verified_schema(checked) is None:
                    raise
            else:
                unverified = any(line.startswith(UNVERIFIED) for line in found[0].warnings)
                if allow_unenforced or not unverified or verified_schema(checked) is None:
                    return found
            return await self._from(backend, checked, _Order(False, accepted, owner, share))
        except InvalidGrammar:
            self.rejected += 1
            raise
        except LimitExceeded:
            self.limited += 1
            raise

    def get(self, grammar_id: str) -> Entry:
        """Return the entry of a grammar id. Raises UnknownGrammar when it has left the cache."""
        entry = self._cache.get(grammar_id)
        if entry is None:
            raise UnknownGrammar(f"grammar_id: {grammar_id!r} is not in the cache; compile the grammar again")
        return entry

    async def clear(self, in_use: Collection[str], *, disk: bool) -> Cleared:
        """Drop every grammar that is not `in_use` (grammar ids), and with `disk` the files.

        Compilations that run are not stopped, and their grammars are kept.
        """
        dropped, memory = self._cache.clear(in_use)
        kept = len(self._cache)
        files, size = await asyncio.to_thread(self._disk.clear) if disk and self._disk else (0, 0)
        return Cleared(dropped, kept, files, memory + size)

    async def close(self) -> None:
        """Kill the workers and drop the cache."""
        self._closed = True
        await self._flights.close()
        for task in self._backends.values():
            task.cancel()
        await asyncio.gather(*self._backends.values(), return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        await asyncio.gather(*(forks.close() for forks in self._forks))
        self._loader.close()
        self._cache.clear()

    def stats(self) -> dict[str, int]:
        """Return counters since the start, and gauges."""
        return {
            "cached_grammars": len(self._cache),
            "cache_bytes": self._cache.num_bytes,
            "compiled": self.compiled,
            "cache_hits": self.hits,
            "compile_rejected": self.rejected,
            "compile_limited": self.limited,
        }

    def _verified_before(self, backend: str, grammar: Grammar, order: _Order) -> Entry | None:
        """Return the entry of a grammar that is verified, which it is only after it was refused otherwise."""
        if not grammar.reading.verify:
            return None
        key = _key(grammar, backend, order)
        return self._cached(self._choices.get(key, "") if backend == AUTO else key)

    async def _from(self, backend: str, grammar: Grammar, order: _Order) -> tuple[Entry, bool]:
        if backend == AUTO:
            return await self._choose(grammar, order)
        return await self._one(grammar, backend, order)

    async def _choose(self, grammar: Grammar, order: _Order) -> tuple[Entry, bool]:
        """Try the installed backends, the default first: all strictly, then with unenforced parts if allowed."""
        names = [self._config.backend, *(name for name in NAMES if name != self._config.backend and installed(name))]
        choice = _key(grammar, AUTO, order)
        known = self._cached(self._choices.get(choice, ""))
        if known is not None:
            self.hits += 1
            return known, True
        rejections: list[tuple[str, GrammarServiceError]] = []
        for allowed in (False, True) if order.allow_unenforced else (False,):
            rejections.clear()
            for name in names:
                try:
                    entry, hit = await self._one(grammar, name, replace(order, allow_unenforced=allowed))
                except GrammarServiceError as error:
                    rejections.append((name, error))
                    continue
                self._choices[choice] = entry.grammar_id
                if len(self._choices) > MAX_CHOICES:
                    self._choices.popitem(last=False)
                return entry, hit
        raise _rejected_by_all(rejections)

    def _cached(self, key: str) -> Entry | None:
        """Return the entry that may be used in place of a compilation."""
        return self._cache.get(key) if self._config.cache_bytes else None

    async def _one(self, grammar: Grammar, backend: str, order: _Order) -> tuple[Entry, bool]:
        key = _key(grammar, backend, order)
        entry = self._cached(key)
        if entry is not None:
            self.hits += 1
            return entry, True
        if order.accepted:
            # An equal compilation that this call joins, in whatever state, counts as accepted from now on.
            self._accepted.add(key)
            if pool := self._pools.get(backend):  # a grammar on disk needs no worker
                pool.promote(key)
        (entry, stored), joined = await self._flights.run(key, lambda: self._compile_once(key, grammar, backend, order))
        self.hits += joined or stored
        return entry, joined or stored

    async def _compile_once(self, key: str, grammar: Grammar, backend: str, order: _Order) -> tuple[Entry, bool]:
        """Return a new cache entry, and whether its artifact was on disk."""
        try:
            return await self._load_or_compile(key, grammar, backend, order)
        finally:
            self._accepted.discard(key)

    async def _load_or_compile(self, key: str, grammar: Grammar, backend: str, order: _Order) -> tuple[Entry, bool]:
        disk, allow_unenforced, owner = self._disk, order.allow_unenforced, order.owner
        name = artifact_key(
            grammar, backend, self._vocabulary.digest, allow_unenforced=allow_unenforced, owner=owner.name
        )
        data = await asyncio.to_thread(disk.get, name) if disk else None
        loader = await asyncio.shield(self._backend(backend))
        if disk and data is not None:
            try:
                artifact = Artifact.unpack(data)
                compiled, plan = await self._loader.load(loader, grammar, artifact, self._vocabulary)
                return self._store(Entry(key, backend, compiled, 0.0, plan), owner), True
            except (ValueError, InternalError) as error:
                logger.warning("cache_dir: %s; the grammar is compiled again", error)
                await asyncio.to_thread(disk.remove, name)
        artifact = await self._pool(backend).compile(
            grammar,
            allow_unenforced=allow_unenforced,
            name=key,
            accepted=key in self._accepted,
            share=order.share,
        )
        compiled, plan = await self._loader.load(loader, grammar, artifact, self._vocabulary)
        if disk:
            await asyncio.to_thread(disk.put, name, artifact.pack())
        self.compiled += 1
        return self._store(Entry(key, backend, compiled, artifact.compile_ms, plan), owner), False

    def _store(self, entry: Entry, owner: Owner) -> Entry:
        self._cache.put(entry.grammar_id, entry, entry.compiled.memory_bytes, owner)
        return entry

    def _pool(self, backend: str) -> CompilePool:
        pool = self._pools.get(backend)
        if pool is None:
            if self._closed:
                raise InternalError(f"the compile workers of {backend} are being ended")
            start = self._start
            if start is None:
                self._forks.append(Forks(backend, self._vocabulary))
                start = self._forks[-1].start
            pool = self._pools[backend] = CompilePool(
                backend,
                self._vocabulary,
                workers=self._config.workers,
                limits=self._config.compile_limits,
                queue=self._config.compile_queue,
                queue_s=QUEUE_S,
                command=self._command,
                fallback=self._fallback,
                start=start,
            )
        return pool

    def _backend(self, backend: str) -> asyncio.Task[Backend]:
        task = self._backends.get(backend)
        if task is None or (task.done() and task.exception() is not None):
            task = self._backends[backend] = asyncio.create_task(
                asyncio.to_thread(self._load, backend, self._vocabulary), name=f"load-{backend}"
            )
            task.add_done_callback(_retrieve_exception)
        return task

    def __repr__(self) -> str:
        return f"<Compiler {self.stats()} {self._flights!r}>"


def attempt_limit_s(config: GrammarConfig) -> float:
    """Return the longest time that the limits allow for one grammar on one backend, in seconds.

    It waits for a worker, and once more if it is slow; a compilation for an accepted sequence may wait longer. A worker
    at idle priority may be starved: with the share of a slow compilation, and once more with the whole share.
    """
    tries = 3 if config.compile_priority == "idle" else 1
    return 2 * QUEUE_S + tries * (START_TIMEOUT_S + config.compile_timeout_s)


def _key(grammar: Grammar, backend: str, order: _Order) -> str:
    text = f"{grammar.key(backend)}{order.allow_unenforced:d}"
    return hashlib.blake2b(text.encode(), digest_size=16, key=order.owner.name.encode()).hexdigest()


def _rejected_by_all(rejections: list[tuple[str, GrammarServiceError]]) -> GrammarServiceError:
    """Return one error with the reason of every backend. A limit wins: the grammar may pass with a higher one."""
    kinds = [type(error) for _, error in rejections]
    order = (LimitExceeded, NotEnforced, InvalidGrammar, NotSupported)
    kind = next((kind for kind in order if kind in kinds), InternalError)
    reasons = (str(error) if str(error).startswith(name) else f"{name}: {error}" for name, error in rejections)
    return kind("no backend accepts the grammar. " + " | ".join(reasons))


def _retrieve_exception(task: asyncio.Task[Backend]) -> None:
    if not task.cancelled():
        task.exception()
