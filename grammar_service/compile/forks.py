"""Compile workers that start within milliseconds: a prepared process, which has read the vocabulary, forks them.

A worker that starts on its own imports its library and reads the tokenizer, which takes a second or more on busy cores.
Without a fork, the compilation after a slow one would wait for that. Memory pages that a forked worker does not write
are shared with the other workers.

multiprocessing's forkserver prepares modules but not a vocabulary, starts a second helper process, and lives as long as
any of its children, so it is not used.

Invariant: a prepared process has one thread, or workers are started without it. It ends with this process, and its
workers end with it; a prepared process that has ended is replaced at the next start of a worker. Not thread-safe: one
event loop owns an object.

Not responsible for: the prepared process's own code (see worker.py), when a worker starts (see pool.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Sequence

from grammar_service.compile.process import COMMAND, START_TIMEOUT_S, CompileProcess, MemoryFiles
from grammar_service.compile.worker import FORKS, IDLE
from grammar_service.errors import InternalError, from_wire
from grammar_service.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_MESSAGE_BYTES = 64
ANSWER_S = 30.0
"""After so long without an answer the prepared process is killed, and its workers with it."""
_TRIES = 2
"""A prepared process may have been killed since the last worker started."""


class Forks:
    """Starts the workers of one backend with one vocabulary. `close` ends the prepared process and all its workers.

    A prepared process that takes longer than `answer_s` to fork or to kill a worker is replaced.
    """

    def __init__(self, backend: str, vocabulary: Vocabulary, answer_s: float = ANSWER_S) -> None:
        self._backend, self._vocabulary, self._answer_s = backend, vocabulary, answer_s
        self._preparing: asyncio.Task[_Prepared] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        """Of prepared processes that have ended by themselves."""

    async def start(self, command: Sequence[str]) -> CompileProcess:
        """Return a worker that waits for its first frame; with IDLE in `command`, one of idle priority.

        Raises OSError (no process or descriptor is left), InternalError (the prepared process does not start), and the
        errors of a vocabulary that the library cannot read.
        """
        for _ in range(_TRIES):
            prepared = await self._prepared()
            try:
                alone = prepared.num_threads > 1
                worker = await (CompileProcess.start(command) if alone else prepared.fork(idle=IDLE in command))
            except EOFError:
                continue
            worker.ordinary_s = prepared.ordinary_s
            return worker
        raise InternalError(f"a compile worker of {self._backend} did not start: the process that forks it ended")

    async def close(self) -> None:
        """End the prepared process. Its workers end with it."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait({self._preparing})
            if (prepared := _result(self._preparing)) is not None:
                await prepared.close()
        await asyncio.gather(*self._closing)

    async def _prepared(self) -> _Prepared:
        """Return the prepared process, or a new one if it has ended or could not be started."""
        preparing = self._preparing
        if preparing is None or preparing.done():
            before = _result(preparing)
            if before is not None and before.has_ended:
                logger.error(
                    "the process that forks compile workers of %s has ended; another is started", self._backend
                )
                closing = asyncio.create_task(before.close(), name="close-prepared")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            if preparing is None or before is None or before.has_ended:
                preparing = self._preparing = asyncio.create_task(
                    _prepare(self._backend, self._vocabulary, self._answer_s),
                    name=f"prepare-{self._backend}-compile-workers",
                )
        return await asyncio.shield(preparing)

    def __repr__(self) -> str:
        return f"<Forks {self._backend} {self._preparing!r}>"


def _result(preparing: asyncio.Task[_Prepared] | None) -> _Prepared | None:
    """Return what a task that has ended prepared, if it did."""
    if preparing is None or preparing.cancelled() or preparing.exception() is not None:
        return None
    return preparing.result()


async def _prepare(backend: str, vocabulary: Vocabulary, answer_s: float) -> _Prepared:
    """Start a prepared process, and wait until it has read the vocabulary."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = await CompileProcess.start((*COMMAND, FORKS, str(theirs.fileno())), theirs.fileno())
    except BaseException:
        control.close()
        raise
    about = {"backend": backend, "size": vocabulary.size, "stop_ids": vocabulary.stop_ids}
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            reply = await process.exchange(about, vocabulary.tokenizer_json)
        if "error" in reply:
            raise from_wire(reply["error"], reply["message"])
        if reply["threads"] > 1:
            logger.warning(
                "%s starts %d threads, so its compile workers are not forked: each is started by itself",
                backend,
                reply["threads"] - 1,
            )
        return _Prepared(process, control, reply["threads"], reply["ordinary_s"], answer_s)
    except BaseException as error:
        tail = process.stderr_tail()
        control.close()
        await process.kill()
        if not isinstance(error, EOFError | TimeoutError):
            raise
        logger.error("the process that forks compile workers of %s did not start; its last output: %s", backend, tail)
        raise InternalError(f"a compile worker of {backend} did not start") from error


class _Prepared:
    """A prepared process. The caller must `close` it."""

    def __init__(
        self,
        process: CompileProcess,
        control: socket.socket,
        num_threads: int,
        ordinary_s: float,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.num_threads, self.ordinary_s, self.answer_s = num_threads, ordinary_s, answer_s
        self.has_ended = False
        self._process, self._control = process, control
        control.setblocking(False)
        self._asked: deque[asyncio.Future[_Worker]] = deque()
        """Requests for a worker, the first one to be answered first."""
        self._workers: dict[int, _Worker] = {}
        """By process id, until they have ended."""
        self._reading = asyncio.create_task(self._read(), name="forked-workers")

    async def fork(self, *, idle: bool) -> CompileProcess:
        """Return a new worker. Raises OSError, and EOFError when the prepared process has ended."""
        if self.has_ended:
            raise EOFError
        ours, theirs = socket.socketpair()
        try:
            with theirs, MemoryFiles() as files:
                asked: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
                request = f"fork {IDLE}" if idle else "fork"
                try:
                    descriptors = [theirs.fileno(), files.artifact_fd, files.appending_fd]
                    socket.send_fds(self._control, [request.encode()], descriptors)
                except (BrokenPipeError, ConnectionResetError) as error:
                    self._end()
                    raise EOFError from error
                self._asked.append(asked)
                try:
                    async with asyncio.timeout(self.answer_s):
                        worker = await asked
                except TimeoutError as error:  # stopped, or without a core for so long: another one is started
                    await self.end()
                    raise EOFError from error
                # A worker whose start is cancelled from here on finds its connection closed, and exits.
                worker.stdout, worker.stdin = await asyncio.open_unix_connection(sock=ours)
                return _ForkedProcess(worker, *files.keep())
        except BaseException:
            ours.close()
            raise

    def kill(self, pid: int) -> None:
        """Let the prepared process kill a worker: only it knows that the id is still the worker's."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and the workers with it
            self._control.send(f"kill {pid}".encode())

    async def end(self) -> None:
        """Kill the process, and its workers with it."""
        await self._process.kill()
        self._end()

    async def close(self) -> None:
        """End the process."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._end()
        self._control.close()
        await self._process.kill()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while message := await loop.sock_recv(self._control, _MESSAGE_BYTES):
                self._handle(*message.decode().split())
        except ConnectionResetError:
            pass  # it ended with a request unread
        self._end()

    def _handle(self, word: str, number: str, status: str = "") -> None:
        if word == "ended":
            self._workers.pop(int(number)).ended.set_result(int(status))
            return
        asked = self._asked.popleft()
        if word == "refused":
            if not asked.cancelled():
                asked.set_exception(OSError(int(number), os.strerror(int(number))))
            return
        worker = self._workers[int(number)] = _Worker(self, int(number))
        if not asked.cancelled():
            asked.set_result(worker)

    def _end(self) -> None:
        """Note that the process has ended: the kernel kills its workers then."""
        self.has_ended = True
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(EOFError())
        self._asked.clear()
        for worker in self._workers.values():
            worker.ended.set_result(-signal.SIGKILL)
        self._workers.clear()


class _Worker:
    """What `CompileProcess` uses of a process that is not a child of this one."""

    def __init__(self, parent: _Prepared, pid: int) -> None:
        self.pid = pid
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._parent = parent

    @property
    def returncode(self) -> int | None:
        """See `Running`."""
        return self.ended.result() if self.ended.done() else None

    @property
    def is_orphan(self) -> bool:
        """Whether the prepared process has ended."""
        return self._parent.has_ended

    def kill(self) -> None:
        """See `Running`."""
        if not self.ended.done():
            self._parent.kill(self.pid)

    async def killed(self) -> int:
        """Kill the process, and its parent if that does not do it. Returns the exit code."""
        self.kill()
        try:
            async with asyncio.timeout(self._parent.answer_s):
                return await self.wait()
        except TimeoutError:
            await self._parent.end()
            return await self.wait()

    async def wait(self) -> int:
        """See `Running`."""
        return await asyncio.shield(self.ended)


class _ForkedProcess(CompileProcess):
    has_vocabulary = True

    def __init__(self, worker: _Worker, artifact_fd: int, stderr_fd: int) -> None:
        super().__init__(worker, artifact_fd, stderr_fd)
        self._worker = worker

    @property
    def is_lost(self) -> bool:
        """See `CompileProcess`."""
        return self._worker.is_orphan

    async def _end_now(self) -> int:
        return await self._worker.killed()

    @property
    def has_exited(self) -> bool:
        """Whether the process has exited: the kernel closes the other end of its connection then."""
        writer = self._process.stdin
        if self._process.returncode is not None or writer is None or writer.is_closing():
            return True
        connection = select.poll()
        connection.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(connection.poll(0))

    async def kill(self) -> int:
        """Kill the process, close its memory files and the connection, and return the exit code."""
        try:
            return await super().kill()
        finally:
            if self._process.stdin is not None:
                self._process.stdin.close()
