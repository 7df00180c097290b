"""Loads artifacts into the grammar process, on few threads of low priority with a deep stack.

Invariant: at most NUM_LOADERS loads run at once, which bounds their memory. Each artifact was loaded once in a compile
worker before, on a smaller stack.

Not responsible for: compilation (see pool.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from grammar_service.backends.backend import Backend, Compiled
from grammar_service.compile.proof import LOADER_STACK_BYTES
from grammar_service.compile.worker import NICENESS
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.errors import GrammarServiceError, InternalError, LimitExceeded
from grammar_service.grammar.value import Grammar
from grammar_service.grammar.vocabulary import Vocabulary

LARGE_BYTES = 4 << 20
"""After the load of a larger artifact, freed memory is returned to the system: glibc would keep ten times its size."""
NUM_LOADERS = 2
"""A large artifact may hold one thread for a second; the others then use the second thread."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """On its way from a worker or the disk to the loader. Its contents are not checked."""

    data: bytes
    plan: Any
    """Argument of `CompletionPlan.from_wire`."""
    compile_ms: float = 0.0
    """Time of only the compilation, without queue, proof and transport; 0: the artifact came from the disk."""

    def pack(self) -> bytes:
        """Return the artifact as bytes, without the time."""
        return json.dumps(self.plan).encode() + b"\n" + self.data

    @staticmethod
    def unpack(packed: bytes) -> Artifact:
        """Return the artifact that `pack` was called on. Raises ValueError for any other bytes."""
        at = packed.index(b"\n")
        return Artifact(packed[at + 1 :], json.loads(packed[:at]))


class CompileLoader:
    """The loading threads. One event loop owns them; `close` ends them."""

    def __init__(self, threads: Executor | None = None) -> None:
        """Args: `threads` run the loads, and are shut down with this object; None: NUM_LOADERS new ones."""
        self._threads = threads or _deep_threads()

    async def load(
        self, backend: Backend, grammar: Grammar, artifact: Artifact, vocabulary: Vocabulary
    ) -> tuple[Compiled, CompletionPlan]:
        """Return the compiled grammar and its completion plan. Raises LimitExceeded, InternalError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, _load, backend, grammar, artifact, vocabulary)
        except GrammarServiceError as error:
            raise InternalError(
                f"{backend.name} loaded the grammar in a compile worker, but not in the grammar process: {error}"
            ) from error
        except MemoryError:
            raise LimitExceeded("the compiled grammar does not fit into the memory of the grammar process") from None
        except Exception as error:  # each library has its own exceptions
            raise InternalError(f"{backend.name} cannot load the grammar: {error}") from error

    async def read_texts(self, vocabulary: Vocabulary) -> None:
        """Prepare the token texts of a vocabulary, which the first completion plan needs."""
        await asyncio.get_running_loop().run_in_executor(self._threads, TokenTexts.of, vocabulary)

    def close(self) -> None:
        """End the threads after their present load. Does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __repr__(self) -> str:
        return f"<CompileLoader {NUM_LOADERS} threads>"


def _deep_threads() -> ThreadPoolExecutor:
    """Return NUM_LOADERS threads of low priority with a deep stack, all of them started."""
    threads = ThreadPoolExecutor(NUM_LOADERS, thread_name_prefix="load", initializer=_lower_thread_priority)
    before = threading.stack_size(LOADER_STACK_BYTES)
    try:
        # The pool starts a thread only when none is idle, so all of them must be busy once.
        gate = threading.Barrier(NUM_LOADERS)
        for started in [threads.submit(gate.wait) for _ in range(NUM_LOADERS)]:
            started.result()
    finally:
        threading.stack_size(before)
    return threads


def _load(
    backend: Backend, grammar: Grammar, artifact: Artifact, vocabulary: Vocabulary
) -> tuple[Compiled, CompletionPlan]:
    try:
        return backend.load(grammar, artifact.data), CompletionPlan.from_wire(artifact.plan, TokenTexts.of(vocabulary))
    finally:
        if len(artifact.data) > LARGE_BYTES and hasattr(_LIBC, "malloc_trim"):
            _LIBC.malloc_trim(0)  # some milliseconds, without the GIL


_LIBC = ctypes.CDLL(None)
"""Has no `malloc_trim` with musl, which returns memory by itself."""


def _lower_thread_priority() -> None:
    # On Linux each thread has its own niceness. A load must not slow down steps.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
