"""Artifacts into compiled grammars, in the sidecar: on few threads, of low priority, with a deep stack.

Invariant: at most LOADERS loads run at once, so what they hold meanwhile is bounded by as many artifacts; each ran once
in a compile worker before, on a smaller stack. No compilation happens here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from grammar_service.backends.backend import Backend, Compiled
from grammar_service.compile.artifact import Artifact
from grammar_service.compile.proof import LOADER_STACK_BYTES
from grammar_service.compile.worker import NICENESS
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.errors import GrammarServiceError, InternalError, LimitExceeded
from grammar_service.grammar.value import Grammar
from grammar_service.grammar.vocabulary import Vocabulary

LARGE_BYTES = 4 << 20
"""What a library builds and frees while it reads so much is given back: glibc would keep ten times as much for ever."""
LOADERS = 2
"""One could be held up by a large artifact for a second; the others wait behind it only when there are two of them."""


class CompileLoader:
    """Threads that load. Owned by one event loop; `close` ends them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOADERS, thread_name_prefix="load", initializer=_be_polite)
        before = threading.stack_size(LOADER_STACK_BYTES)
        try:
            # The pool starts a thread with a task, and none when one is idle: all have to be busy once.
            gate = threading.Barrier(LOADERS)
            for started in [self._threads.submit(gate.wait) for _ in range(LOADERS)]:
                started.result()
        finally:
            threading.stack_size(before)

    async def load(
        self, backend: Backend, grammar: Grammar, artifact: Artifact, vocabulary: Vocabulary
    ) -> tuple[Compiled, CompletionPlan]:
        """Return the compiled form, and what is known of its end. Raises LimitExceeded, InternalError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, _load, backend, grammar, artifact, vocabulary)
        except GrammarServiceError as error:
            raise InternalError(f"{backend.name} loaded the grammar in a worker and not again: {error}") from error
        except MemoryError:
            raise LimitExceeded("the compiled grammar does not fit into the sidecar's memory") from None
        except Exception as error:  # each library has its own
            raise InternalError(f"{backend.name} cannot load the grammar: {error}") from error

    async def read_texts(self, vocabulary: Vocabulary) -> None:
        """Do what the first plan of a vocabulary needs here."""
        await asyncio.get_running_loop().run_in_executor(self._threads, TokenTexts.of, vocabulary)

    def close(self) -> None:
        """Let the threads end with what they are doing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __repr__(self) -> str:
        return f"<CompileLoader {LOADERS} threads>"


def _load(
    backend: Backend, grammar: Grammar, artifact: Artifact, vocabulary: Vocabulary
) -> tuple[Compiled, CompletionPlan]:
    try:
        return backend.load(grammar, artifact.data), CompletionPlan.from_wire(artifact.plan, TokenTexts.of(vocabulary))
    finally:
        if len(artifact.data) > LARGE_BYTES and hasattr(_LIBC, "malloc_trim"):
            _LIBC.malloc_trim(0)  # some milliseconds, without the GIL


_LIBC = ctypes.CDLL(None)
"""musl's gives memory back by itself, and has no such function."""


def _be_polite() -> None:
    # On Linux a thread has its own niceness. Steps must not feel a load.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
