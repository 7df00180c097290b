"""Started processes that compile one grammar at a time each, and are killed when their time is over.

Invariant: a caller waits for a free worker for at most `queue_s`, and then for its own compilation for at most
`timeout_s`: the time after other compilations and the start of a worker never count as compile time. A worker that
exceeds `timeout_s` is killed and replaced. A crash is an error of one request. Not thread-safe: one event loop owns a
pool.

Not responsible for: the order of the compilations (see queue.py), a process and its pipes (see process.py).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from grammar_service.compile.loader import Artifact
from grammar_service.compile.process import CompileProcess, exit_error
from grammar_service.compile.queue import NO_TENANT, CompileQueue, QueueFullError, Share
from grammar_service.compile.worker import IDLE
from grammar_service.config import CompileLimits
from grammar_service.errors import GrammarServiceError, InternalError, LimitExceeded, from_wire
from grammar_service.grammar.value import Grammar
from grammar_service.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Bound on the start of a worker: importing torch on a busy machine takes seconds."""

COMMAND = (sys.executable, "-m", "grammar_service.compile.worker")
COMMAND_IDLE = (*COMMAND, IDLE)
STARVED = 0.2
"""A worker at idle priority that had less than this share of a core until its time limit was starved."""

StartWorker = Callable[[Sequence[str]], Awaitable[CompileProcess]]
"""Starts a command as a compile worker, which waits for its first frame."""


class CompilePool:
    """Workers of one backend with one vocabulary.

    Args:
        backend: name of the backend.
        vocabulary: each worker receives it at its start.
        workers: number of processes.
        limits: limits of one compilation.
        queue: compilations that may wait for a worker, not counting accepted sequences. Tenants share these
            places by weight.
        queue_s: longest wait for a worker, in seconds; accepted sequences wait for as long as it takes.
        command: the command line of a process that speaks the protocol of worker.py.
        fallback: replaces `command` for good once a worker of it was starved at its time limit: other processes leave
            no core idle. The compilation is tried again in such a worker. (): `command` does not run at idle priority.
        start: starts a command.
    """

    def __init__(
        self,
        backend: str,
        vocabulary: Vocabulary,
        *,
        workers: int,
        limits: CompileLimits,
        queue: int,
        queue_s: float,
        command: Sequence[str] = COMMAND,
        fallback: Sequence[str] = (),
        start: StartWorker = CompileProcess.start,
    ) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._limits = limits
        self._max_waiting, self._queue_s = queue, queue_s
        self._command, self._fallback, self._start_worker = command, fallback, start
        self._idle: set[CompileProcess] = set()
        """Workers of a command that has a fallback."""
        self._closed = False
        self._compile_queue = CompileQueue(workers, queue_s, max_waiting=queue)
        self._spare: list[asyncio.Task[CompileProcess]] = [self._launch() for _ in range(workers)]
        self._all: set[CompileProcess] = set()
        self._reaping: set[asyncio.Task[int]] = set()
        self.started = 0
        self.killed = 0
        self.crashed = 0

    def _launch(self) -> asyncio.Task[CompileProcess]:
        return asyncio.create_task(self._start(), name=f"start-{self._backend}-compile-worker")

    async def _start(self) -> CompileProcess:
        try:
            worker = await self._start_worker(self._command)
        except OSError as error:  # too few descriptors, too little memory, or no process ids left, for now
            logger.error("a compile worker of %s cannot be started: %s", self._backend, error)
            raise LimitExceeded(
                f"compile_workers: no compile worker of {self._backend} can be started ({error.strerror}); try again"
            ) from error
        self._all.add(worker)
        if self._fallback:
            self._idle.add(worker)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await worker.exchange(self._start_message(worker), self._vocabulary.tokenizer_json)
        except (EOFError, TimeoutError) as error:
            logger.error(
                "a compile worker of %s did not start; its last output: %s", self._backend, worker.stderr_tail()
            )
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

    def _start_message(self, worker: CompileProcess) -> dict[str, Any]:
        limits = {
            "artifact_fd": worker.artifact_fd,
            "memory_mb": self._limits.memory_mb,
            "max_depth": self._limits.max_depth,
            "max_chain": self._limits.max_chain,
            "max_artifact_bytes": self._limits.max_artifact_bytes,
        }
        vocabulary = self._vocabulary
        about = {"size": vocabulary.size, "stop_ids": vocabulary.stop_ids}
        return {"backend": self._backend, **about, "limits": limits}

    async def ready(self) -> None:
        """Wait until every worker has started. Raises what their start raised."""
        await asyncio.gather(*(asyncio.shield(task) for task in self._spare))

    async def compile(
        self,
        grammar: Grammar,
        *,
        allow_unenforced: bool = False,
        name: str = "",
        accepted: bool = False,
        share: Share = NO_TENANT,
    ) -> Artifact:
        """Compile in a free worker. Cancelling the call kills the worker's process.

        Args:
            grammar: to be compiled.
            allow_unenforced: leave out parts that the backend cannot enforce.
            name: argument of a later `promote`.
            accepted: for an accepted sequence: comes before the others, and no limit of the queue rejects it.
            share: the tenant whose turn it takes.

        Raises InvalidGrammar, NotSupported, LimitExceeded (nesting, time, memory, size, length of the queue, time in
        the queue), InternalError (crash).
        """
        try:
            await self._compile_queue.acquire(name, accepted=accepted, share=share)
        except QueueFullError:
            raise LimitExceeded(f"compile_queue: {self._max_waiting} compilations are waiting already") from None
        except TimeoutError:
            raise LimitExceeded(
                f"no compile worker of {self._backend} was free within {self._queue_s:g} s, and the "
                "compilation did not begin; try again"
            ) from None
        try:
            while True:  # each time with one worker less that may be starved
                try:
                    return await self._compile(grammar, allow_unenforced)
                except _StarvedError:
                    continue
        finally:
            self._compile_queue.release(share)

    def promote(self, name: str) -> None:
        """Treat the waiting compilations of this name as accepted from now on."""
        self._compile_queue.promote(name)

    async def _compile(self, grammar: Grammar, allow_unenforced: bool) -> Artifact:
        task, worker = await self._take_worker()
        head = {
            "kind": grammar.kind,
            "whitespace": grammar.whitespace,
            "reading": asdict(grammar.reading),
            "allow_unenforced": allow_unenforced,
        }
        begun, cpu_s = time.monotonic(), worker.cpu_s()
        healthy = False
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                reply = await worker.exchange(head, grammar.text.encode())
                data = await worker.take_artifact(reply.get("artifact_bytes", 0))
            if output := worker.stderr_tail():
                logger.debug("a compile worker of %s wrote: %s", self._backend, output)
            healthy = True
        except TimeoutError:
            self.killed += 1
            self._check_starved(worker, worker.cpu_s() - cpu_s)
            logger.warning("killed a compilation after %.1f s: %r", time.monotonic() - begun, grammar)
            raise LimitExceeded(
                f"compile_timeout_s: {self._backend} did not compile the grammar within {self._limits.timeout_s:g} s"
            ) from None
        except EOFError:
            self.crashed += 1
            code, output = await worker.end(), worker.stderr_tail()
            logger.error("a compile worker of %s exited with %d on %r: %s", self._backend, code, grammar, output)
            raise exit_error(self._backend, code, output, self._limits.memory_mb) from None
        finally:
            if healthy:
                self._spare.append(task)
            else:
                self._reap(worker)
                if not self._closed:
                    self._spare.append(self._launch())
        if "error" in reply:
            raise from_wire(reply["error"], reply["message"])
        return Artifact(data, reply["plan"], reply["compile_ms"])

    def _check_starved(self, worker: CompileProcess, cpu_s: float) -> None:
        """Raise _StarvedError if a worker at idle priority, in its whole time, had too little of a core to judge by."""
        if worker in self._idle and cpu_s < STARVED * self._limits.timeout_s:
            if self._fallback:
                logger.warning(
                    "compile_priority: in %g s a compilation had %.2f s of a core, since no core was idle; from now on "
                    "compile workers of %s have a low priority",
                    self._limits.timeout_s,
                    cpu_s,
                    self._backend,
                )
                self._command, self._fallback = self._fallback, ()
            raise _StarvedError

    async def _take_worker(self) -> tuple[asyncio.Task[CompileProcess], CompileProcess]:
        """Take a spare worker. A worker that exited while it was idle, or could not be started before, is replaced, and
        is no error of this grammar."""
        for i, task in enumerate(self._spare):
            if task.done() and not task.cancelled() and task.exception() is not None:
                self._spare[i] = self._launch()
        while True:
            task = self._spare.pop(self._first_started())
            try:
                worker = await asyncio.shield(task)
            except GrammarServiceError:
                self._spare.append(self._launch())
                raise
            except asyncio.CancelledError:
                self._spare.append(task)
                raise
            if not worker.has_exited:
                return task, worker
            self.crashed += 1
            logger.error("an idle compile worker of %s exited: %s", self._backend, worker.stderr_tail())
            self._reap(worker)
            self._spare.append(self._launch())

    def _first_started(self) -> int:
        return next((i for i, task in enumerate(self._spare) if task.done()), 0)

    def _reap(self, worker: CompileProcess) -> None:
        task = asyncio.create_task(self._discard(worker))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    async def _discard(self, worker: CompileProcess) -> int:
        self._all.discard(worker)
        self._idle.discard(worker)
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
            "waiting": self._compile_queue.num_waiting,
            "started": self.started,
            "killed": self.killed,
            "crashed": self.crashed,
        }

    def __repr__(self) -> str:
        return f"<CompilePool {self._backend} {self.stats()}>"


class _StarvedError(Exception):
    """A compilation ended at its time limit, and its worker at idle priority had hardly run."""
