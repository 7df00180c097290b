"""One compile worker seen from the grammar process: a process, its pipes, the memory file of its results, its stderr.

Invariant: an exchange ends with a reply or with EOFError; after EOFError the process is unusable. The two memory files
of a worker are closed with it.

Not responsible for: which worker compiles which grammar, and for how long (see pool.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from grammar_service.compile.worker import pack, unpack, weigh_session
from grammar_service.errors import GrammarServiceError, InternalError, LimitExceeded

COMMAND = (sys.executable, "-m", "grammar_service.compile.worker")
START_TIMEOUT_S = 120.0
"""Bound on the start of a process: importing torch on a busy machine takes seconds."""
_LINGER_S = 1.0
"""A worker that has closed its pipe gets this long to exit."""

_LENGTH = struct.Struct("<I")
_PROCESS_CLOCK = 2
"""The clock of a process's CPU time, in the lower bits of its id: clock_getcpuclockid(3)."""
_LARGE_BYTES = 1 << 20
"""An artifact above this is read off the event loop."""

_STDERR_TAIL_BYTES = 4096
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Libraries of numpy and torch start no threads, which a fork would not copy."""
_OUT_OF_MEMORY = ("memory allocation of", "bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory")
"""Messages of Rust, C++ and Python for an allocation that failed."""


class Running(Protocol):
    """What a worker needs of its process; `asyncio.subprocess.Process` has it."""

    pid: int
    stdin: asyncio.StreamWriter | None
    stdout: asyncio.StreamReader | None

    @property
    def returncode(self) -> int | None:
        """The exit code, None while it runs."""

    def kill(self) -> None:
        """Send SIGKILL."""

    async def wait(self) -> int:
        """Wait for its end, and return the exit code."""


class MemoryFiles:
    """The memory files of a worker that is starting. What is not kept is closed at the end of the block."""

    def __init__(self) -> None:
        self.artifact_fd = self.stderr_fd = self.appending_fd = -1

    def __enter__(self) -> MemoryFiles:
        try:
            self.artifact_fd = os.memfd_create("lockstep-artifact", 0)
            self.stderr_fd = os.memfd_create("lockstep-worker-stderr")
            # Opened for appending, so that truncating the file after a read does not leave a hole.
            self.appending_fd = os.open(f"/proc/self/fd/{self.stderr_fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except BaseException:  # it may have been the last descriptor
            self.__exit__()
            raise
        return self

    def keep(self) -> tuple[int, int]:
        """Return the files of the artifact and of stderr, which the caller closes from now on."""
        kept = self.artifact_fd, self.stderr_fd
        self.artifact_fd = self.stderr_fd = -1
        return kept

    def __exit__(self, *_: object) -> None:
        for descriptor in (self.artifact_fd, self.stderr_fd, self.appending_fd):
            if descriptor >= 0:
                os.close(descriptor)


class CompileProcess:
    """A compile worker process, made by `start`. The caller must end it exactly once, with `kill` or `end`."""

    has_vocabulary = False
    """The first frame needs no body."""

    def __init__(self, process: Running, artifact_fd: int, stderr_fd: int) -> None:
        self._process = process
        self._artifact_fd = artifact_fd
        self._stderr_fd = stderr_fd
        self.loads_torch = False
        self.ordinary_s = 0.0
        """CPU time of an ordinary schema; 0.0: not measured."""

    @property
    def is_lost(self) -> bool:
        """Whether the process that this one depends on has ended."""
        return False

    @staticmethod
    async def start(command: Sequence[str], *inherited: int) -> CompileProcess:
        """Start a worker, which waits for its first frame. It also has the descriptors `inherited`."""
        with MemoryFiles() as files:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=files.appending_fd,
                pass_fds=(files.artifact_fd, *inherited),
                env=_environment(),
            )
            return CompileProcess(process, *files.keep())

    @property
    def artifact_fd(self) -> int:
        """Descriptor of the memory file, the same number in both processes."""
        return self._artifact_fd

    async def exchange(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        """Send one frame and return the head of the reply. Raises EOFError when the process has exited."""
        reader, writer = self._process.stdout, self._process.stdin
        if reader is None or writer is None:
            raise EOFError
        try:
            writer.write(pack(head, body))
            await writer.drain()
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            return unpack(await reader.readexactly(length))[0]
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EOFError from error
        except RuntimeError as error:
            # uvloop raises RuntimeError for a pipe that was closed when the process exited.
            if self.has_exited:
                raise EOFError from error
            raise

    @property
    def has_exited(self) -> bool:
        """Whether the process has exited or its pipe is closed. Asks the kernel: the event loop learns it later."""
        writer = self._process.stdin
        if self._process.returncode is not None or writer is None or writer.is_closing():
            return True
        try:
            # WNOWAIT leaves the process to be reaped by the event loop.
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True  # the process is reaped, and the event loop is about to learn of it

    def cpu_s(self) -> float:
        """Return the CPU time that the process has had, in seconds; 0.0 when it has ended."""
        try:
            return time.clock_gettime((~self._process.pid << 3) | _PROCESS_CLOCK)
        except OSError:
            return 0.0

    def weigh(self, niceness: int) -> bool:
        """Set the niceness of the session that the process leads; False: not now. See `weigh_session`."""
        return weigh_session(self._process.pid, niceness)

    async def take_artifact(self, size: int) -> bytes:
        """Return the `size` bytes of the last result and free their memory."""
        if size > _LARGE_BYTES:
            data = await asyncio.to_thread(os.pread, self._artifact_fd, size, 0)
        else:
            data = os.pread(self._artifact_fd, size, 0)
        os.ftruncate(self._artifact_fd, 0)
        return data

    def stderr_tail(self) -> str:
        """Return the last output on stderr since the previous call, at most 4 KiB."""
        size = os.fstat(self._stderr_fd).st_size
        tail = os.pread(self._stderr_fd, _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES))
        os.ftruncate(self._stderr_fd, 0)
        return tail.decode(errors="replace").strip()

    async def end(self) -> int:
        """Reap a process that has closed its pipe and return the exit code; kill it when it does not exit in time.

        Waits before it kills: a kill checks whether the process has exited, and thereby takes the exit code away from
        the event loop.
        """
        try:
            async with asyncio.timeout(_LINGER_S):
                return await self._process.wait()
        except TimeoutError:
            return await self._end_now()

    async def kill(self) -> int:
        """Kill and reap the process, close its memory files, and return the exit code.

        A cancelled call ends after the process: only then the event loop has closed its pipes.
        """
        ending = asyncio.create_task(self._end_now(), name="end-compile-worker")
        try:
            await asyncio.wait({ending})
        except asyncio.CancelledError:
            await asyncio.wait({ending})
            raise
        finally:
            for descriptor in (self._artifact_fd, self._stderr_fd):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            self._artifact_fd = self._stderr_fd = -1
        return ending.result()

    async def _end_now(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()

    def __repr__(self) -> str:
        return f"<CompileProcess {self._process.pid} exit={self._process.returncode}>"


def exit_error(backend: str, code: int, output: str, memory_mb: int) -> GrammarServiceError:
    """Return the error of the request during which a worker exited with `code` and this output on stderr.

    A process that runs out of memory sends no reply: its allocator aborts, or the kernel kills the process.
    """
    if code == -signal.SIGKILL:
        return LimitExceeded(
            f"compile_memory_mb: the compilation was killed by the system, which was short of memory; it may use "
            f"{memory_mb} MiB"
        )
    if any(sign in output for sign in _OUT_OF_MEMORY):
        return LimitExceeded(f"compile_memory_mb: the compilation needs more than its {memory_mb} MiB of memory")
    return InternalError(f"the compile worker of {backend} crashed on the grammar (exit {code})")


def _environment() -> dict[str, str]:
    """Return the environment of a child: this process's, and a PYTHONPATH on which the child finds this package."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **_ONE_THREAD}
