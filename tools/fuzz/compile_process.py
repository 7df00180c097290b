"""A compile worker within the fuzzer's process: the real worker's code answers the frames.

Invariant: a frame is answered before `drain` returns, so that a call takes no longer than its compilation.
Not responsible for: crashes (they end the fuzzer, as its finding) and time limits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from grammar_service.backends.registry import load_backend
from grammar_service.compile.process import CompileProcess
from grammar_service.compile.worker import Limits, Toolchain, pack, reply, unpack
from grammar_service.completion.texts import TokenTexts
from grammar_service.errors import to_wire
from grammar_service.grammar.vocabulary import Vocabulary

_LENGTH_BYTES = 4


async def start(command: Sequence[str]) -> CompileProcess:
    """Return a worker, as `CompileProcess.start` does."""
    files = os.memfd_create("fuzzed-artifact"), os.memfd_create("fuzzed-stderr")
    return _InProcess(_Worker(), *files)  # type: ignore[arg-type]  # it has what CompileProcess uses


class _InProcess(CompileProcess):
    @property
    def has_exited(self) -> bool:
        return self._process.returncode is not None


class _Worker:
    """What `CompileProcess` uses of `asyncio.subprocess.Process`."""

    def __init__(self) -> None:
        self.stdout, self.stdin, self.pid = asyncio.StreamReader(), self, 0
        self.returncode: int | None = None
        self._toolchain: Toolchain | None = None
        self._limits: Limits | None = None

    def write(self, frame: bytes) -> None:
        """Take one frame, and answer it."""
        head, body = unpack(frame[_LENGTH_BYTES:])
        if self._toolchain is None or self._limits is None:
            try:
                vocabulary = Vocabulary.load(body, head["size"], tuple(head["stop_ids"]))
                self._toolchain = Toolchain(load_backend(head["backend"], vocabulary), TokenTexts.of(vocabulary))
            except Exception as error:  # as the worker does
                name, message = to_wire(error)
                self.stdout.feed_data(pack({"error": name, "message": message}))
                return
            self._limits = Limits(**head["limits"])
            self.stdout.feed_data(pack({"ready": 1, "modules": False}))
        else:
            self.stdout.feed_data(reply(self._toolchain, self._limits, head, body))

    async def drain(self) -> None:
        """Return: the pipe takes everything."""

    def is_closing(self) -> bool:
        """Return whether the process has ended."""
        return self.returncode is not None

    def kill(self) -> None:
        """End the process."""
        self.returncode = -9
        self.stdout.feed_eof()

    async def wait(self) -> int:
        """Return the exit code."""
        return self.returncode or 0
