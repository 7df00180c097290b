"""Started processes that compile one grammar at a time each, and are killed when their time is over.

Most grammars compile within milliseconds, and a few take seconds. A slow compilation gives its place to the next one:
one that has had SLOW_S of a core, and SLOW_TIMES the time of an ordinary schema with this library and vocabulary. It
goes on next to it, if fewer than `workers` slow ones run; otherwise it is killed, waits for one of these places, and
begins again there. It is killed only if another worker has started. Small and large grammars have places of their own,
and large ones, which are often slow, also while they are slow. So a small grammar waits for no more than that time of
each small one before it, or for the start of one worker.

Idle priority counts only within a session where Linux divides the cores by session (sched(7), autogroup). So a slow
compilation at idle priority also has a smaller share; if it reaches its time limit with that, it is tried once more
with the share that it began with.

Invariant: a caller waits for a free worker for at most `queue_s`, once more if its compilation is slow, and then for
its own compilation for at most `timeout_s`, once more for each worker at idle priority that was starved: the time after
other compilations and the start of a worker never count as compile time. A worker that exceeds `timeout_s` is killed
and replaced. A crash is an error of one request. Not thread-safe: one event loop owns a pool.

Not responsible for: the order of the compilations (see queue.py), a process and its pipes (see process.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grammar_service.compile.loader import Artifact
from grammar_service.compile.process import COMMAND, START_TIMEOUT_S, CompileProcess, exit_error
from grammar_service.compile.queue import NO_TENANT, CompileQueue, QueueFullError, Share
from grammar_service.compile.worker import IDLE, REFUSED_S
from grammar_service.config import CompileLimits
from grammar_service.errors import GrammarServiceError, InternalError, LimitExceeded, from_wire
from grammar_service.grammar.value import Grammar
from grammar_service.grammar.vocabulary import Vocabulary
from service_runtime.exhausted import exhausted

logger = logging.getLogger(__name__)

COMMAND_IDLE = (*COMMAND, IDLE)
SLOW_S = 0.25
"""A compilation that needs more time of a core gives its place to the next one, unless ordinary ones take as long."""
SLOW_TIMES = 2.0
"""One that needs less than these times of a core of an ordinary schema is not slow: with xgrammar, five properties of
an open object take 0.26 s and more, by the size of the vocabulary."""
LONG_S = 1.0
"""So does one that is not done after this time, if it can go on: its worker gets little of a core."""
SMALL_BYTES = 1 << 10
"""A grammar of at most this size is small: it takes much less work than most that are longer."""
LARGE_BYTES = 8 << 10
"""A longer grammar is large: few people write one by hand."""
NUM_QUEUES = 5
"""Of small, middle and large grammars, and of slow ones: large, and others."""
SLOW_NICENESS = 15
"""The niceness of the session of a slow compilation at idle priority: a ninth of the share that a worker starts with.
Five compilations at a time, with that share each, would take more of the cores than the engine gets."""
STARVED = 0.2
"""A worker at idle priority that had less than this share of a core until its time limit was starved."""

StartWorker = Callable[[Sequence[str]], Awaitable[CompileProcess]]
"""Starts a command as a compile worker, which waits for its first frame."""


class CompilePool:
    """Workers of one backend with one vocabulary.

    Args:
        backend: name of the backend.
        vocabulary: each worker receives it at its start.
        workers: compilations of small grammars at a time, as many of middle size, as many large ones, and next to
            them as many slow ones, large or not. So many processes and one more are started ahead of need, so that the
            compilation after a slow one does not wait for a start.
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
        small, middle, large, slow, slow_large = (
            CompileQueue(workers, queue_s, max_waiting=queue) for _ in range(NUM_QUEUES)
        )
        self._small, self._middle, self._large = _Queues(small, slow), _Queues(middle, slow), _Queues(large, slow_large)
        """Large grammars delay no other one, and those of middle size no small one that is not slow."""
        self._queues = (small, middle, large, slow, slow_large)
        self._all: set[CompileProcess] = set()
        self._starting: set[asyncio.Task[CompileProcess]] = set()
        self._reaping: set[asyncio.Task[int]] = set()
        self._most_spare = workers + 1
        self._spare = [self._launch() for _ in range(self._most_spare)]
        self._places: set[_Place] = set()
        """Of the compilations that wait or run."""
        self.started = 0
        self.killed = 0
        self.yielded = 0
        """Slow compilations that were killed, and began again."""
        self.crashed = 0

    def _launch(self) -> asyncio.Task[CompileProcess]:
        task = asyncio.create_task(self._start(), name=f"start-{self._backend}-compile-worker")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return task

    def _add_spare(self) -> None:
        """Start a worker ahead of need. Nothing starts once the pool is closed."""
        if not self._closed:
            self._spare.append(self._launch())

    async def _start(self) -> CompileProcess:
        command, is_idle = self._command, bool(self._fallback)  # both may change during the start
        try:
            worker = await self._start_worker(command)
        except OSError as error:  # too few descriptors, too little memory, or no process ids left, for now
            logger.error("a compile worker of %s cannot be started: %s", self._backend, exhausted(error))
            raise LimitExceeded(
                f"compile_workers: no compile worker of {self._backend} can be started ({error.strerror}); try again"
            ) from error
        self._all.add(worker)
        if is_idle:
            self._idle.add(worker)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                body = b"" if worker.has_vocabulary else self._vocabulary.tokenizer_json
                reply = await worker.exchange(self._start_message(worker), body)
        except (EOFError, TimeoutError) as error:
            logger.error(
                "a compile worker of %s did not start; its last output: %s", self._backend, worker.stderr_tail()
            )
            await self._discard(worker)
            raise InternalError(f"a compile worker of {self._backend} did not start") from error
        except asyncio.CancelledError:
            await self._discard(worker)
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
        size = len(grammar.text)
        queues = self._small if size <= SMALL_BYTES else self._middle if size <= LARGE_BYTES else self._large
        place = _Place(queues, queues.first, name, share, accepted)
        self._places.add(place)
        try:
            await self._enter(place)
            lost = False
            while True:  # each time in another place, or with one worker less that may be starved
                try:
                    return await self._compile(grammar, allow_unenforced, place)
                except _StarvedError:
                    continue
                except _LostError as error:
                    if lost:
                        raise error.reported from None
                    lost = True
                except _SlowError:
                    place.leave()
                    place.queue = place.queues.slow
                    await self._enter(place)
                    self._add_spare()
        finally:
            self._places.remove(place)
            place.leave()

    async def _enter(self, place: _Place) -> None:
        """Wait for a place of the queue. Raises LimitExceeded."""
        try:
            await place.queue.acquire(place.name, accepted=place.accepted, share=place.share)
        except QueueFullError:
            raise LimitExceeded(f"compile_queue: {self._max_waiting} compilations are waiting already") from None
        except TimeoutError:
            did = "is slow" if place.is_slow else "did not begin"
            raise LimitExceeded(
                f"no compile worker of {self._backend} was free within {self._queue_s:g} s, and the "
                f"compilation {did}; try again"
            ) from None
        place.is_held = True

    def promote(self, name: str) -> None:
        """Treat the compilations of this name as accepted from now on, also one that has yet to wait once more."""
        for place in self._places:
            place.accepted |= place.name == name
        for queue in self._queues:
            queue.promote(name)

    async def _until_slow(self, answer: asyncio.Task[Any], worker: CompileProcess, place: _Place) -> None:
        """Wait until the compilation is done, or has given its place to the next one. Raises _SlowError."""
        waited_s, cpu_s, slow_s = 0.0, worker.cpu_s(), max(SLOW_S, SLOW_TIMES * worker.ordinary_s)
        while not (await asyncio.wait({answer}, timeout=SLOW_S))[0]:
            waited_s += SLOW_S
            heavy = worker.cpu_s() - cpu_s >= slow_s
            if (heavy or waited_s >= LONG_S) and self._give_place(place):
                return
            if heavy and any(spare.done() for spare in self._spare):
                self.yielded += 1
                raise _SlowError

    def _give_place(self, place: _Place) -> bool:
        """Give the place of a slow compilation to the next one; False: it may not go on next to it."""
        if not place.queues.slow.try_acquire(place.share):
            return False
        place.leave()
        place.queue, place.is_held = place.queues.slow, True
        self._add_spare()
        return True

    async def _compile(self, grammar: Grammar, allow_unenforced: bool, place: _Place) -> Artifact:
        task, worker = await self._take_worker()
        head = {
            "kind": grammar.kind,
            "whitespace": grammar.whitespace,
            "reading": asdict(grammar.reading),
            "allow_unenforced": allow_unenforced,
        }
        begun, cpu_s = time.monotonic(), worker.cpu_s()
        healthy = lowered = False
        answer = asyncio.create_task(_answer(worker, head, grammar.text.encode()), name="compilation")
        answer.add_done_callback(_retrieve_exception)  # of one that ends after its caller has left
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                if not place.is_slow:
                    await self._until_slow(answer, worker, place)
                if place.is_slow and worker in self._idle and not (place.accepted or place.was_starved):
                    lowered = await _lower(answer, worker)
                reply, data = await answer
            if output := worker.stderr_tail():
                logger.debug("a compile worker of %s wrote: %s", self._backend, output)
            healthy = not lowered
        except TimeoutError:
            self.killed += 1
            self._check_starved(worker, worker.cpu_s() - cpu_s, place if lowered else None)
            logger.warning("killed a compilation after %.1f s: %r", time.monotonic() - begun, grammar)
            raise LimitExceeded(
                f"compile_timeout_s: {self._backend} did not compile the grammar within {self._limits.timeout_s:g} s"
            ) from None
        except EOFError:
            self.crashed += 1
            code, output = await worker.end(), worker.stderr_tail()
            logger.error("a compile worker of %s exited with %d on %r: %s", self._backend, code, grammar, output)
            reported = exit_error(self._backend, code, output, self._limits.memory_mb)
            raise _LostError(reported) if worker.is_lost else reported from None
        finally:
            answer.cancel()
            if healthy:
                self._keep(task, worker)
            else:
                self._reap(worker)
                if len(self._spare) < self._most_spare:
                    self._add_spare()
        if "error" in reply:
            raise from_wire(reply["error"], reply["message"])
        return Artifact(data, reply["plan"], reply["compile_ms"])

    def _check_starved(self, worker: CompileProcess, cpu_s: float, lowered: _Place | None) -> None:
        """Raise _StarvedError if a worker at idle priority, in its whole time, had too little of a core to judge by.

        A compilation with the smaller share of a slow one, in the place `lowered`, has the whole share the next time.
        """
        if worker in self._idle and cpu_s < STARVED * self._limits.timeout_s:
            if lowered is not None:
                lowered.was_starved = True
            elif self._fallback:
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
        for task in [*self._spare]:
            if task.done() and not task.cancelled() and task.exception() is not None:
                self._spare.remove(task)
                self._add_spare()
        while True:
            if not self._spare:
                self._add_spare()
            if self._closed:
                raise InternalError(f"the compile workers of {self._backend} are being ended")
            task = self._spare.pop(self._last_started())
            try:
                worker = await asyncio.shield(task)
            except GrammarServiceError:
                self._add_spare()
                raise
            except asyncio.CancelledError:
                self._spare.append(task)
                raise
            if not worker.has_exited:
                return task, worker
            self.crashed += 1
            logger.error("an idle compile worker of %s exited: %s", self._backend, worker.stderr_tail())
            self._reap(worker)
            self._add_spare()

    def _keep(self, task: asyncio.Task[CompileProcess], worker: CompileProcess) -> None:
        """Make a worker a spare one, in place of one that has not started yet if there are enough."""
        if len(self._spare) >= self._most_spare:
            starting = next((spare for spare in self._spare if not spare.done()), None)
            if starting is None:
                self._reap(worker)
                return
            self._spare.remove(starting)
            starting.cancel()
        self._spare.append(task)

    def _last_started(self) -> int:
        """Return which spare worker is next: the one that compiled last, or else the first that will have started."""
        return next((i for i in reversed(range(len(self._spare))) if self._spare[i].done()), 0)

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
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, *self._spare, return_exceptions=True)
        for worker in self._all:
            self._reap(worker)
        while self._reaping:  # a compilation that ends meanwhile adds its worker
            await asyncio.gather(*self._reaping)

    def stats(self) -> dict[str, int]:
        """Return counters since the start, and gauges."""
        return {
            "workers": len(self._all),
            "waiting": sum(queue.num_waiting for queue in self._queues),
            "started": self.started,
            "killed": self.killed,
            "yielded": self.yielded,
            "crashed": self.crashed,
        }

    def __repr__(self) -> str:
        return f"<CompilePool {self._backend} {self.stats()}>"


@dataclass(frozen=True, slots=True)
class _Queues:
    """The places of grammars of one size."""

    first: CompileQueue
    slow: CompileQueue
    """Of slow compilations, which go on next to the others."""


@dataclass(slots=True, eq=False)
class _Place:
    """The place of one compilation in a queue."""

    queues: _Queues
    queue: CompileQueue
    """One of `queues`."""
    name: str
    share: Share
    accepted: bool
    is_held: bool = False
    was_starved: bool = False
    """It reached its time limit with the share of a slow compilation."""

    @property
    def is_slow(self) -> bool:
        """Whether it is a place of slow compilations."""
        return self.queue is self.queues.slow

    def leave(self) -> None:
        """Give the place to the next compilation."""
        if self.is_held:
            self.is_held = False
            self.queue.release(self.share)


async def _answer(worker: CompileProcess, head: dict[str, Any], text: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a worker's reply to a grammar, and the artifact."""
    reply = await worker.exchange(head, text)
    return reply, await worker.take_artifact(reply.get("artifact_bytes", 0))


async def _lower(answer: asyncio.Task[Any], worker: CompileProcess) -> bool:
    """Give a slow compilation its share of the cores; False: it ended before."""
    while not worker.weigh(SLOW_NICENESS):
        if (await asyncio.wait({answer}, timeout=random.uniform(*REFUSED_S)))[0]:
            return False
    return True


def _retrieve_exception(answer: asyncio.Task[tuple[dict[str, Any], bytes]]) -> None:
    if not answer.cancelled():
        answer.exception()


class _SlowError(Exception):
    """A compilation is slow, and no place of a slow one is free."""


class _LostError(Exception):
    """A worker ended because the process that forked it did. The compilation is tried once more."""

    def __init__(self, reported: GrammarServiceError) -> None:
        super().__init__()
        self.reported = reported


class _StarvedError(Exception):
    """A compilation ended at its time limit, and its worker at idle priority had hardly run."""
