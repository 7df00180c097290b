"""One compile worker as the sidecar sees it: a process, its pipes, the memory file of its results, its last words.

Invariant: an exchange ends with a reply or with EOFError, and after EOFError the process is of no use any more. What a
worker leaves behind (two memory files) is closed with it. Not here: which worker gets what, and for how long
(`compile_pool.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grammar_service.compile.worker import pack, unpack
from grammar_service.errors import GrammarServiceError, InternalError, LimitExceeded

_LINGER_S = 1.0
"""A worker whose pipe is closed gets this long to be gone."""

_LENGTH = struct.Struct("<I")
_LARGE_BYTES = 1 << 20
"""An artifact above this is read off the event loop."""

_WORDS_BYTES = 4096
_OUT_OF_MEMORY = ("memory allocation of", "bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory")
"""How Rust, C++ and Python say it on their way out."""


class CompileProcess:
    """Made by `start`. The caller ends it with `kill` or `end`, once."""

    def __init__(self, process: asyncio.subprocess.Process, artifact_fd: int, stderr_fd: int) -> None:
        self._process = process
        self._artifact_fd = artifact_fd
        self._words_fd = stderr_fd
        self.loads_torch = False

    @staticmethod
    async def start(command: Sequence[str]) -> CompileProcess:
        """Start a worker; it waits for its first frame."""
        artifact_fd = os.memfd_create("lockstep-artifact", 0)
        stderr_fd = os.memfd_create("lockstep-last-words")
        try:
            # Appended to, so that what was read can be cut off.
            appending = os.open(f"/proc/self/fd/{stderr_fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=appending,
                    pass_fds=(artifact_fd,),
                    env=_environment(),
                )
            finally:
                os.close(appending)
        except BaseException:
            os.close(artifact_fd)
            os.close(stderr_fd)
            raise
        return CompileProcess(process, artifact_fd, stderr_fd)

    @property
    def artifact_fd(self) -> int:
        """The memory file's descriptor, the same number on both sides."""
        return self._artifact_fd

    async def exchange(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        """Send one frame, return the reply's head. Raises EOFError when the process is gone."""
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
            # uvloop's word for a pipe that was closed at the process's end.
            if self.gone:
                raise EOFError from error
            raise

    @property
    def gone(self) -> bool:
        """It has ended, or its pipe is closed. Asks the kernel: the event loop hears of an end a moment later."""
        writer = self._process.stdin
        if self._process.returncode is not None or writer is None or writer.is_closing():
            return True
        try:
            # Leaves it to the event loop to be reaped.
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True  # it is reaped, and the event loop is about to hear

    async def take_artifact(self, size: int) -> bytes:
        """Return the `size` bytes of the last result, and give their memory back."""
        if size > _LARGE_BYTES:
            data = await asyncio.to_thread(os.pread, self._artifact_fd, size, 0)
        else:
            data = os.pread(self._artifact_fd, size, 0)
        os.ftruncate(self._artifact_fd, 0)
        return data

    def stderr_tail(self) -> str:
        """Return the end of what it wrote to stderr since the last call."""
        size = os.fstat(self._words_fd).st_size
        words = os.pread(self._words_fd, _WORDS_BYTES, max(0, size - _WORDS_BYTES))
        os.ftruncate(self._words_fd, 0)
        return words.decode(errors="replace").strip()

    async def end(self) -> int:
        """Reap a process that has closed its pipe and return the exit code; kill it when it lingers.

        Waiting first matters: a kill looks whether the process is dead, and thereby takes its exit code from the loop.
        """
        try:
            async with asyncio.timeout(_LINGER_S):
                return await self._process.wait()
        except TimeoutError:
            return await self._end_now()

    async def kill(self) -> int:
        """Kill and reap; close what it leaves; return the exit code."""
        try:
            return await self._end_now()
        finally:
            for descriptor in (self._artifact_fd, self._words_fd):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            self._artifact_fd = self._words_fd = -1

    async def _end_now(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()

    def __repr__(self) -> str:
        return f"<CompileProcess {self._process.pid} exit={self._process.returncode}>"


def exit_error(backend: str, code: int, words: str, memory_mb: int) -> GrammarServiceError:
    """Return the error of the request on which a worker died.

    A process that ran out of memory cannot say so in a reply: its allocator aborts, or the kernel kills it.
    """
    if code == -signal.SIGKILL:
        return LimitExceeded(
            f"compile_memory_mb: the compilation was killed by the system, which was short of memory; it may use "
            f"{memory_mb} MiB"
        )
    if any(sign in words for sign in _OUT_OF_MEMORY):
        return LimitExceeded(f"compile_memory_mb: the compilation needs more than its {memory_mb} MiB of memory")
    return InternalError(f"the compile worker of {backend} crashed on the grammar (exit {code})")


def _environment() -> dict[str, str]:
    """Return ours, in which a child finds this package wherever it was started."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
