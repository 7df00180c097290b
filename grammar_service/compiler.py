"""From a grammar's text to its compiled form, once: checks, cache, single flight, processes that can be killed.

Invariant: equal grammars share one compilation and one cache entry; what failed is not remembered, so a grammar that
ran out of time may succeed later. Compiling happens in other processes (`compile_pool`); here a grammar is only
loaded, in a thread of low priority. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from grammar_service.backends import Backend, Compiled, load_backend
from grammar_service.compile_pool import COMMAND, CompilePool
from grammar_service.config import GrammarConfig
from grammar_service.errors import GrammarServiceError, InvalidGrammar, LimitExceeded, UnknownGrammar
from grammar_service.grammar import Grammar, Kind, Whitespace, parse
from grammar_service.vocabulary import Vocabulary

_NICENESS = 5


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled grammar in the cache."""

    grammar_id: str
    backend: str
    compiled: Compiled
    compile_ms: float


class Compiler:
    """Grammars of one vocabulary. Workers of the default backend start at once, others when first asked for."""

    def __init__(self, config: GrammarConfig, vocabulary: Vocabulary, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._config = config
        self._vocabulary = vocabulary
        self._pools: dict[str, CompilePool] = {}
        self._backends: dict[str, asyncio.Task[Backend]] = {}
        self._flights: dict[str, asyncio.Task[Entry]] = {}
        self._cache: collections.OrderedDict[str, Entry] = collections.OrderedDict()
        self._cache_bytes = 0
        self.compiled = 0
        self.hits = 0
        self.rejected = 0
        self.limited = 0
        self._pool(config.backend)

    async def ready(self) -> None:
        """Wait until the default backend has taken the vocabulary, or raise why not; its workers start meanwhile."""
        await asyncio.shield(self._backend(self._config.backend))

    async def compile(self, kind: Kind, source: str, whitespace: Whitespace, backend: str) -> tuple[Entry, bool]:
        """Return the cache entry of a grammar and whether it was there (or on its way) already.

        Raises InvalidGrammar, LimitExceeded, NotSupported, InternalError.
        """
        try:
            size = len(source.encode())
            if size > self._config.max_grammar_bytes:
                raise LimitExceeded(
                    f"max_grammar_bytes: the grammar has {size} bytes, the limit is {self._config.max_grammar_bytes}"
                )
            grammar = parse(kind, source, whitespace)
            self._vocabulary.refuse_special(grammar)
            key = grammar.key(backend)
            entry = self._cache.get(key)
            if entry is not None:
                self._cache.move_to_end(key)
                self.hits += 1
                return entry, True
            flight = self._flights.get(key)
            if flight is not None:
                self.hits += 1
                return await asyncio.shield(flight), True
            flight = asyncio.create_task(self._fly(key, grammar, backend), name=f"compile-{key}")
            self._flights[key] = flight
            flight.add_done_callback(lambda task: self._landed(key, task))
            return await asyncio.shield(flight), False
        except InvalidGrammar:
            self.rejected += 1
            raise
        except LimitExceeded:
            self.limited += 1
            raise

    def get(self, grammar_id: str) -> Entry:
        """Return the entry that Compile named. Raises UnknownGrammar when it has left the cache."""
        entry = self._cache.get(grammar_id)
        if entry is None:
            raise UnknownGrammar(f"grammar_id: {grammar_id!r} is not in the cache; compile the grammar again")
        self._cache.move_to_end(grammar_id)
        return entry

    async def close(self) -> None:
        """Kill the workers and forget everything."""
        for task in (*self._flights.values(), *self._backends.values()):
            task.cancel()
        await asyncio.gather(*self._flights.values(), *self._backends.values(), return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._cache.clear()
        self._cache_bytes = 0

    def stats(self) -> dict[str, int]:
        """Return counters since the start, and gauges."""
        return {
            "cached_grammars": len(self._cache),
            "cache_bytes": self._cache_bytes,
            "compiled": self.compiled,
            "cache_hits": self.hits,
            "compile_rejected": self.rejected,
            "compile_limited": self.limited,
        }

    async def _fly(self, key: str, grammar: Grammar, backend: str) -> Entry:
        artifact = await self._pool(backend).compile(grammar)
        loader = await asyncio.shield(self._backend(backend))
        compiled = await asyncio.to_thread(_politely, loader, grammar, artifact.data)
        entry = Entry(key, backend, compiled, artifact.compile_ms)
        self.compiled += 1
        self._store(entry)
        return entry

    def _landed(self, key: str, task: asyncio.Task[Entry]) -> None:
        del self._flights[key]
        if not task.cancelled():
            # Every caller may have gone; asking for the exception says that it was seen.
            task.exception()

    def _store(self, entry: Entry) -> None:
        size = entry.compiled.memory_bytes
        if size > self._config.cache_bytes:
            limit = self._config.cache_bytes
            raise LimitExceeded(f"cache_bytes: the compiled grammar has {size} bytes, the limit is {limit}")
        self._cache[entry.grammar_id] = entry
        self._cache_bytes += size
        while self._cache_bytes > self._config.cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= oldest.compiled.memory_bytes

    def _pool(self, backend: str) -> CompilePool:
        pool = self._pools.get(backend)
        if pool is None:
            pool = self._pools[backend] = CompilePool(
                backend,
                self._vocabulary,
                workers=self._config.compile_workers,
                timeout_s=self._config.compile_timeout_s,
                memory_mb=self._config.compile_memory_mb,
                queue=self._config.compile_queue,
                command=self._command,
            )
        return pool

    def _backend(self, backend: str) -> asyncio.Task[Backend]:
        task = self._backends.get(backend)
        if task is None or (task.done() and task.exception() is not None):
            task = self._backends[backend] = asyncio.create_task(
                asyncio.to_thread(load_backend, backend, self._vocabulary), name=f"load-{backend}"
            )
            task.add_done_callback(_seen)
        return task

    def __repr__(self) -> str:
        return f"<Compiler {self.stats()}>"


def _seen(task: asyncio.Task[Backend]) -> None:
    if not task.cancelled():
        task.exception()


def _politely(backend: Backend, grammar: Grammar, artifact: bytes) -> Compiled:
    # On Linux a thread has its own niceness. A load may take as long as the compilation did; steps must not feel it.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    try:
        return backend.load(grammar, artifact)
    except GrammarServiceError:
        raise
    except MemoryError:
        raise LimitExceeded("the compiled grammar does not fit into the sidecar's memory") from None
