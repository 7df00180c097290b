"""Warm processes that compile, one grammar each at a time, killed at the end of their time.

Invariant: a caller waits at most for a free worker and then `timeout_s`; a worker that overran is dead and replaced
before the next caller needs it. A crash is an error of one request. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grammar_service.compile_worker import pack, unpack
from grammar_service.errors import GrammarServiceError, InternalError, LimitExceeded, from_wire
from grammar_service.grammar import Grammar
from grammar_service.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Bound on a worker's start; importing torch on a busy machine takes seconds."""

COMMAND = (sys.executable, "-m", "grammar_service.compile_worker")

_LINGER_S = 1.0
"""A worker whose pipe is closed gets this long to be gone."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a worker made."""

    data: bytes
    compile_ms: float
    """Time of the compilation itself, without waiting and transport."""


@dataclass(slots=True, eq=False)
class _Process:
    process: asyncio.subprocess.Process
    loads_torch: bool = False

    async def exchange(self, frame: bytes) -> tuple[dict[str, Any], bytes]:
        """Send one frame, return the reply. Raises EOFError when the process is gone."""
        reader, writer = self.process.stdout, self.process.stdin
        if reader is None or writer is None:
            raise EOFError
        try:
            writer.write(frame)
            await writer.drain()
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            return unpack(await reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EOFError from error

    async def end(self) -> int:
        """Reap a process that has closed its pipe and return the exit code; kill it when it lingers.

        Waiting first matters: a kill looks whether the process is dead, and thereby takes its exit code from the loop.
        """
        try:
            async with asyncio.timeout(_LINGER_S):
                return await self.process.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Kill and reap; return the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return await self.process.wait()


def _environment() -> dict[str, str]:
    """Return ours, in which a child finds this package wherever it was started."""
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


class CompilePool:
    """Workers of one backend with one vocabulary.

    Args:
        backend: name of the backend.
        vocabulary: what each worker gets at its start.
        workers: how many.
        timeout_s: bound on one compilation.
        memory_mb: bound on what a worker may allocate beyond its start.
        queue: compilations that may wait for a worker.
        command: what to start; speaks as `compile_worker` does.
    """

    def __init__(
        self,
        backend: str,
        vocabulary: Vocabulary,
        *,
        workers: int,
        timeout_s: float,
        memory_mb: int,
        queue: int,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._queue = queue
        self._command = command
        self._waiting = 0
        self._closed = False
        self._slots = asyncio.Semaphore(workers)
        self._spare: list[asyncio.Task[_Process]] = [self._launch() for _ in range(workers)]
        self._all: set[_Process] = set()
        self._reaping: set[asyncio.Task[int]] = set()
        self.started = 0
        self.killed = 0
        self.crashed = 0

    def _launch(self) -> asyncio.Task[_Process]:
        return asyncio.create_task(self._start(), name=f"start-{self._backend}-compile-worker")

    async def _start(self) -> _Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(),
        )
        worker = _Process(process)
        self._all.add(worker)
        head = {
            "backend": self._backend,
            "size": self._vocabulary.size,
            "stop_ids": self._vocabulary.stop_ids,
            "memory_mb": self._memory_mb,
        }
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply, _ = await worker.exchange(pack(head, self._vocabulary.tokenizer_json))
        except (EOFError, TimeoutError) as error:
            await self._discard(worker)
            raise InternalError(f"a compile worker of {self._backend} did not start") from error
        except asyncio.CancelledError:
            await asyncio.shield(self._discard(worker))
            raise
        if "error" in reply:
            await self._discard(worker)
            raise from_wire(reply["error"], reply["message"])
        self.started += 1
        worker.loads_torch = reply["modules"]
        return worker

    async def ready(self) -> None:
        """Wait until every worker has started. Raises what their start raised."""
        await asyncio.gather(*(asyncio.shield(task) for task in self._spare))

    async def compile(self, grammar: Grammar) -> Artifact:
        """Compile in a free worker.

        Raises InvalidGrammar, NotSupported, LimitExceeded (time, memory, queue), InternalError (a crash).
        """
        if self._waiting >= self._queue:
            raise LimitExceeded(f"compile_queue: {self._queue} compilations are waiting already")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._compile(grammar)
        finally:
            self._slots.release()

    async def _compile(self, grammar: Grammar) -> Artifact:
        task = self._spare.pop(self._first_started())
        try:
            worker = await asyncio.shield(task)
        except GrammarServiceError:
            self._spare.append(self._launch())
            raise
        except asyncio.CancelledError:
            self._spare.append(task)
            raise
        frame = pack({"kind": grammar.kind, "whitespace": grammar.whitespace}, grammar.text.encode())
        begun = time.monotonic()
        healthy = False
        try:
            async with asyncio.timeout(self._timeout_s):
                reply, body = await worker.exchange(frame)
            healthy = True
        except TimeoutError:
            self.killed += 1
            logger.warning("killed a compilation after %.1f s: %r", time.monotonic() - begun, grammar)
            raise LimitExceeded(
                f"compile_timeout_s: the grammar did not compile within {self._timeout_s:g} s"
            ) from None
        except EOFError:
            self.crashed += 1
            code = await worker.end()
            logger.error("a compile worker of %s ended with %d on %r", self._backend, code, grammar)
            raise InternalError(f"the compile worker of {self._backend} crashed on the grammar (exit {code})") from None
        finally:
            if healthy:
                self._spare.append(task)
            else:
                self._reap(worker)
                if not self._closed:
                    self._spare.append(self._launch())
        if "error" in reply:
            raise from_wire(reply["error"], reply["message"])
        return Artifact(body, reply["compile_ms"])

    def _first_started(self) -> int:
        return next((i for i, task in enumerate(self._spare) if task.done()), 0)

    def _reap(self, worker: _Process) -> None:
        task = asyncio.create_task(self._discard(worker))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    async def _discard(self, worker: _Process) -> int:
        self._all.discard(worker)
        return await worker.kill()

    async def close(self) -> None:
        """Kill every worker."""
        self._closed = True
        for task in self._spare:
            task.cancel()
        await asyncio.gather(*self._spare, *self._reaping, return_exceptions=True)
        await asyncio.gather(*(self._discard(worker) for worker in list(self._all)))

    def stats(self) -> dict[str, int]:
        """Return counters since the start, and gauges."""
        return {
            "workers": len(self._all),
            "waiting": self._waiting,
            "started": self.started,
            "killed": self.killed,
            "crashed": self.crashed,
        }

    def __repr__(self) -> str:
        return f"<CompilePool {self._backend} {self.stats()}>"
