"""Servers that start fast: each is forked from a process that has imported the engine, and then runs the command line.

Their ranks and grammar processes are started as by any server. Invariant: nothing of a server is left when `ended` has
returned. Not responsible for: what is asked, and who is killed (see test_killed_ranks.py).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import psutil


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the sockets in it; pytest's own is too long for the name of one."""
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        yield Path(folder)


_FORKS = multiprocessing.get_context("forkserver")
_PRELOAD = [
    "gpu_engine.cli.commands",
    "gpu_engine.server",
    "gpu_engine.core.engine",
    "gpu_engine.model.loader",
    "transformers.models.llama.modeling_llama",
]
START_S = 120.0
_POLLS = threading.Lock()
"""Held where an exit code may be read: one thread's `Process.start` polls the children of all threads, and of two
threads that read one exit code at a time, `multiprocessing` gives 255 to the later."""


def _serve(arguments: list[str], log: str, directory: str) -> None:
    """Run a server in this process, which was forked for it."""
    with Path(log).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    tempfile.tempdir = os.environ["TMPDIR"] = directory
    sys.argv = ["lockstep", *arguments]
    sys.setswitchinterval(0.0005)
    from gpu_engine.cli import commands

    sys.exit(commands.main())


@dataclass(eq=False)
class ForkedServer:
    """A server that is ready."""

    address: str
    process: multiprocessing.process.BaseProcess
    log: Path
    directory: Path
    """Its directory of temporary files."""

    @classmethod
    def start(cls, folder: Path, *arguments: str) -> ForkedServer:
        """Start a server at `folder`/s; earlier ones there have ended."""
        _FORKS.set_forkserver_preload(_PRELOAD)
        (folder / "tmp").mkdir(exist_ok=True)
        (folder / "log").unlink(missing_ok=True)
        address = f"unix:{folder}/s"
        command = ["serve", "--listen", address, *arguments]
        process = _FORKS.Process(target=_serve, args=(command, str(folder / "log"), str(folder / "tmp")))
        with _POLLS:
            process.start()
        server = cls(address, process, folder / "log", folder / "tmp")
        deadline_s = time.monotonic() + START_S
        while "ready: " not in server.text():
            assert not wait([process.sentinel], 0), server.text()
            assert time.monotonic() < deadline_s, server.text()
            time.sleep(0.02)
        return server

    def text(self) -> str:
        """Return what it has written."""
        return self.log.read_text() if self.log.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Return its process and those that it has started."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def rank(self) -> psutil.Process:
        """Return the process of rank 1."""
        (found,) = [each for each in self.processes()[1:] if "gpu_engine.model.parallel.worker" in each.cmdline()]
        return found

    def ended(self, processes: list[psutil.Process], within_s: float) -> int | None:
        """Wait until all these processes are gone; return the server's exit code. Fails after `within_s`."""
        wait([self.process.sentinel], within_s)
        _, alive = psutil.wait_procs(processes[1:], timeout=within_s)
        assert not alive, alive
        with _POLLS:
            code = self.process.exitcode
        assert code is not None, self.text()
        return code
