"""What a server holds at a moment: memory, descriptors and threads of each of its processes, slots, pages and matchers.

Invariant: a sample is of processes that ran when it was taken; one that ends meanwhile is left out.
Not responsible for: which change is too much (see soak.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

from protos.engine.v1 import engine_pb2 as pb

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the server."""

    role: str
    """"engine", "grammar", "gateway" or "other"; workers that compile are "other", since they come and go."""
    pid: int
    memory_mib: float
    """Its own resident pages, and the shared ones that it has touched."""
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment.

    `stats` is what the engine says of itself; `seconds` is the time since the soak began.
    """

    seconds: float
    processes: tuple[Process, ...]
    stats: pb.GetStatsResponse

    def of(self, role: str) -> Process | None:
        """Return the process of this role, or None while there is none."""
        return next((process for process in self.processes if process.role == role), None)


def processes(pid: int) -> Iterator[Process]:
    """Yield the engine with this process id and every process that it has started."""
    with suppress(psutil.NoSuchProcess):
        engine = psutil.Process(pid)
        for process in (engine, *engine.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                with process.oneshot():
                    memory = process.memory_info().rss / MIB
                    found = Process(_role(process, pid), process.pid, memory, process.num_fds(), process.num_threads())
                yield found


def _role(process: psutil.Process, engine: int) -> str:
    if process.pid == engine:
        return "engine"
    command = process.cmdline()
    if process.ppid() == engine and "grammar_service" in command:
        return "grammar"
    return "gateway" if any(part in ("http_gateway", "gateway") for part in command) else "other"
