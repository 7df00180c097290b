"""A simulated grammar process: the real server, servicer, compiler and worker over simulated threads and sockets.

It also is the child of the engine's supervisor (`Child`), and it starts compile workers whose frames the real worker's
code answers. Invariant: a process that ends closes its descriptors and sockets, as the kernel does, and cleans up
nothing else.

Not responsible for: when it ends (see faults.py), the command line, signals but SIGTERM and SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import cache
from pathlib import Path
from typing import Any

from grammar_service.backends.backend import Backend
from grammar_service.backends.registry import load_backend
from grammar_service.compile import worker as compile_worker
from grammar_service.compile.compiler import Compiler
from grammar_service.compile.disk_cache import DiskCache
from grammar_service.compile.loader import CompileLoader
from grammar_service.compile.process import CompileProcess
from grammar_service.completion.texts import TokenTexts
from grammar_service.config import CompileLimits, GrammarConfig
from grammar_service.grammar.vocabulary import Vocabulary
from grammar_service.server import Platform, serve_engines
from grammar_service.servicer import GrammarServicer
from shared_mem.errors import PeerGone
from shared_mem.segment import Segment
from tools.simulation.event_loop import SimLoop
from tools.simulation.faults import CompileFault, Faults
from tools.simulation.matchers import SimBackend
from tools.simulation.plane import SimGrammarEnd
from tools.simulation.threads import SimThreads
from tools.simulation.wire import SimListener, SimServer, SimSocket
from tools.simulation.world import Process, World

_LENGTH_BYTES = 4
_START_S = (0.01, 0.1)
_COMPILE_S = (0.0005, 0.02)
_EXIT_S = 0.002


class Machine:
    """What the simulated processes share: the supervisor's environment, and which grammar process listens."""

    def __init__(
        self,
        world: World,
        engine: SimLoop,
        config: GrammarConfig,
        directory: Path,
        faults: Faults,
    ) -> None:
        """Args: see below.

        world: of the run.
        engine: the engine's event loop.
        config: of each grammar process.
        directory: of the disk cache.
        faults: of the run.
        """
        self.world, self.engine, self.config, self.directory, self.faults = world, engine, config, directory, faults
        self.processes: list[GrammarChild] = []

    @property
    def listening(self) -> GrammarChild | None:
        """The grammar process that serves in the directory now."""
        child = self.processes[-1] if self.processes else None
        return child if child is not None and child.process.alive and child.serves else None

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> GrammarChild:
        """Start a grammar process, as `ChildProcess.start` does. Raises OSError."""
        self.faults.before_start()
        child = GrammarChild(self, len(self.processes) + 1)
        self.processes.append(child)
        return child

    def server(self) -> SimServer | None:
        """Return the gRPC server that listens now."""
        return None if self.listening is None else self.listening.server

    def hand_over(self, segment: Segment) -> Callable[[Path], SimSocket]:
        """Return the hand-over of `segment`; it runs on a thread of the engine."""

        def hand_over(_: Path) -> SimSocket:
            self.world.sleep(self.world.between(0, 0.001))
            self.faults.before_connect()
            child = self.listening
            if child is None:
                raise PeerGone("no grammar process listens")
            ours, theirs = SimSocket.pair(self.engine.process, child.process)
            theirs.segment_fd = segment.fileno()
            child.sockets.append(theirs)
            child.loop.call_soon(child.listener.connect, theirs)
            if not self.world.wait(lambda: theirs.acknowledged or theirs.closed, 5.0) or not theirs.acknowledged:
                ours.close()
                raise PeerGone("the grammar process did not take the segment")
            return ours

        return hand_over


class GrammarChild:
    """One grammar process, as the supervisor sees it (`Child`), and what runs in it."""

    def __init__(self, machine: Machine, number: int) -> None:
        self._machine, self._world, self.pid = machine, machine.world, 1000 + number
        self.process = Process(machine.world, f"sidecar{number}")
        self.loop = SimLoop(self.process)  # type: ignore[abstract]  # it has what the two processes use
        self.listener, self.serves = SimListener(), False
        self.threads = SimThreads(self.process)
        self.servicer = GrammarServicer(machine.config, self._new_compiler)
        self.server = SimServer(self.process, self.loop, self.servicer)
        self.segments: list[Segment] = []
        self.sockets: list[SimSocket] = []
        """Its ends of the segment connections."""
        self.output = asyncio.StreamReader(loop=machine.engine)
        self._ended = asyncio.Event()
        self._reaped: int | None = None
        self._engines: asyncio.Task[None] | None = None
        self._stopping = False
        self.process.at_end.append(self._gone)
        self.loop.call_later(self._world.between(*_START_S), self._serve)

    # -- the child of the supervisor ---------------------------------------------------------------------------------

    @property
    def returncode(self) -> int | None:
        """See `Child`."""
        return self._reaped

    def send(self, number: signal.Signals) -> None:
        """See `Child`."""
        if number == signal.SIGKILL:
            self.process.end(-int(number))
        elif self.process.alive and not self._stopping:
            self._stopping = True
            self.loop.call_soon(lambda: self.loop.create_task(self._stop(), name="stop"))

    async def wait(self) -> int:
        """See `Child`."""
        await self._ended.wait()
        assert self.process.exit_code is not None
        self._reaped = self.process.exit_code
        return self._reaped

    def reset(self) -> None:
        """Break every connection; the process goes on."""
        self.server.reset()
        for sock in self.sockets:
            sock.close()

    def _gone(self) -> None:
        self.serves = False
        for segment in self.segments:
            segment.close()
        engine = self._machine.engine
        engine.call_later(self._world.between(0, _EXIT_S), self.output.feed_eof)
        engine.call_later(self._world.between(0, _EXIT_S), self._ended.set)

    # -- inside the process ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        machine, threads = self._machine, self.threads
        platform = Platform(self._receive, self._end_of, self.process.end, threads, collect=lambda: None)
        self.serves = True
        work = serve_engines(self.listener, self.servicer, machine.config, platform)  # type: ignore[arg-type]
        self._engines = self.loop.create_task(work, name="engines")
        self._engines.add_done_callback(self._engines_ended)

    def _engines_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._world.note(f"{self.process.name} fails: {task.exception()!r}")
            self.loop.call_soon(self.process.end, 1)

    async def _stop(self) -> None:
        """End in order, as `grammar_service.server` does."""
        if self._engines is not None:
            self._engines.cancel()
            await asyncio.gather(self._engines, return_exceptions=True)
        self.serves = False
        await self.servicer.close()
        self.loop.call_soon(self.process.end, 0)

    def _receive(self, connection: Any) -> Segment:
        """Map the engine's segment; on a thread of the process."""
        self._world.point("sidecar maps the segment")
        self._machine.faults.before_map()
        segment = Segment.attach(os.dup(connection.segment_fd))
        self.segments.append(segment)
        connection.acknowledged = True
        return segment

    def _end_of(self, segment: Segment) -> SimGrammarEnd:
        return SimGrammarEnd(segment, self.process, self._machine.faults.cut)

    def _new_compiler(self, config: GrammarConfig, vocabulary: Vocabulary) -> Compiler:
        machine = self._machine
        return Compiler(
            config,
            vocabulary,
            start=self._start_worker,
            load=lambda name, _: SimBackend(_backend(name, vocabulary), machine.world, machine.faults),
            loader=CompileLoader(_NO_THREADS),
            disk=DiskCache(machine.directory, 1 << 20, machine.faults.open_file),
        )

    async def _start_worker(self, command: Sequence[str]) -> CompileProcess:
        self._machine.faults.before_worker()
        return SimCompileProcess(self.process, self.loop, self._machine.faults)


class SimCompileProcess(CompileProcess):
    """A compile worker: the grammar process's side is real, and so is the code that answers its frames."""

    def __init__(self, parent: Process, loop: SimLoop, faults: Faults) -> None:
        files = os.memfd_create("simulated-artifact"), os.memfd_create("simulated-stderr")
        self._files = list(files)
        super().__init__(_Subprocess(parent, loop, faults, *files), *files)  # type: ignore[arg-type]
        parent.at_end.append(self._close)

    @property
    def has_exited(self) -> bool:
        """See `CompileProcess`."""
        return self._process.returncode is not None

    def cpu_s(self) -> float:
        """See `CompileProcess`: one that does not end was starved, if its priority allows that."""
        return 0.0

    async def kill(self) -> int:
        """See `CompileProcess`."""
        self._files.clear()
        return await super().kill()

    def _close(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)
        self._files.clear()


class _Subprocess:
    """What `CompileProcess` uses of `asyncio.subprocess.Process`."""

    def __init__(self, parent: Process, loop: SimLoop, faults: Faults, artifact_fd: int, stderr_fd: int) -> None:
        self._world, self._loop, self._faults = parent.world, loop, faults
        self._artifact_fd, self._stderr_fd = artifact_fd, stderr_fd
        self.stdout = asyncio.StreamReader(loop=loop)
        self.stdin = self
        self.pid = 0
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._vocabulary: Vocabulary | None = None
        self._backend_name = ""

    # -- stdin -------------------------------------------------------------------------------------------------------

    def write(self, frame: bytes) -> None:
        """Take one frame, which `CompileProcess.exchange` writes at once."""
        if self.returncode is not None:
            raise BrokenPipeError
        head, body = compile_worker.unpack(frame[_LENGTH_BYTES:])
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(body, head["size"], tuple(head["stop_ids"]))
            self._backend_name = head["backend"]
            self._answer(compile_worker.pack({"ready": 1, "modules": False}))
            return
        match self._faults.compilation():
            case CompileFault.HANG:
                pass
            case CompileFault.CRASH:
                self._loop.call_later(self._world.between(*_COMPILE_S), self._exit, -int(signal.SIGSEGV))
            case CompileFault.KILLED:
                self._loop.call_later(self._world.between(*_COMPILE_S), self._exit, -int(signal.SIGKILL))
            case CompileFault.MEMORY:
                os.pwrite(self._stderr_fd, b"memory allocation of 4096 bytes failed\n", 0)
                self._loop.call_later(self._world.between(*_COMPILE_S), self._exit, -int(signal.SIGABRT))
            case None:
                answer, artifact = _compiled(self._backend_name, self._vocabulary, frame[_LENGTH_BYTES:])
                os.pwrite(self._artifact_fd, artifact, 0)
                self._answer(answer)

    def _answer(self, frame: bytes) -> None:
        def arrive() -> None:
            if self.returncode is None:
                self.stdout.feed_data(frame)

        self._loop.call_later(self._world.between(*_COMPILE_S), arrive)

    async def drain(self) -> None:
        """Return: the pipe takes everything."""

    # -- the process -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process."""
        self._exit(-int(signal.SIGKILL))

    def _exit(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self.stdout.feed_eof()
            self._ended.set()

    async def wait(self) -> int:
        """Wait for the end."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class _NoThreads(Executor):
    """An executor that the simulation's loops never call."""


_NO_THREADS = _NoThreads()


@cache
def _vocabulary(tokenizer_json: bytes, size: int, stop_ids: tuple[int, ...]) -> Vocabulary:
    return Vocabulary.load(tokenizer_json, size, stop_ids)


_backends: dict[tuple[str, str], Backend] = {}
_answers: dict[tuple[str, bytes], tuple[bytes, bytes]] = {}


def _backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Return the real backend. It is immutable, so that all runs of a process share it."""
    key = name, vocabulary.digest
    if key not in _backends:
        _backends[key] = load_backend(name, vocabulary)
    return _backends[key]


def _compiled(name: str, vocabulary: Vocabulary, frame: bytes) -> tuple[bytes, bytes]:
    """Return the worker's answer to a frame, and its artifact. Equal frames are compiled once in a process."""
    key = f"{name} {vocabulary.digest}", frame
    if key not in _answers:
        head, body = compile_worker.unpack(frame)
        descriptor = os.memfd_create("simulated-compilation")
        try:
            toolchain = compile_worker.Toolchain(_backend(name, vocabulary), TokenTexts.of(vocabulary))
            answer = compile_worker.reply(toolchain, _limits(descriptor), head, body)
            artifact = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        finally:
            os.close(descriptor)
        _answers[key] = answer, artifact
    return _answers[key]


def _limits(descriptor: int) -> compile_worker.Limits:
    limits = CompileLimits()
    return compile_worker.Limits(
        descriptor, limits.memory_mb, limits.max_depth, limits.max_chain, limits.max_artifact_bytes
    )
