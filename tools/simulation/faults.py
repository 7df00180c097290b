"""The faults of one run, drawn from the seed: what happens, when, and which errors of a request it justifies.

A fault is armed for the n-th time that its place is passed, or for a moment. Invariant: a request may end with an error
only if a fault of the run justifies that kind of error; a killed, stopped or reset grammar process justifies none.

Not responsible for: the places (see plane.py, grammar_process.py, matchers.py), clients that leave (see workload.py).
"""

from __future__ import annotations

import enum
import errno
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

from tools.simulation.world import Process, World


class Fault(enum.Enum):
    """Kinds of faults."""

    KILL = "the grammar process is killed at a point"
    TEAR = "the grammar process is killed between two stores of an answer"
    STOP = "the grammar process is stopped for a while"
    RESET = "the sockets break, and both processes live on"
    JUMP = "the clock leaps: the machine slept"
    SLOW_FILL = "a mask row takes milliseconds"
    HUNG_FILL = "a mask row takes longer than anything waits"
    FAILED_FILL = "the library fails at a mask row"
    HUNG_COMPILE = "a compilation does not end"
    OUT_OF_MEMORY = "a compilation eats its memory"
    KILLED_COMPILE = "the system kills a compile worker"
    CRASHED_COMPILE = "a compile worker crashes"
    NO_PROCESS = "no process can be started (EAGAIN, ENOMEM)"
    NO_WORKER = "no compile worker can be started (EMFILE, ENOMEM)"
    NO_MAPPING = "the segment cannot be mapped (EMFILE, ENOMEM)"
    NO_SOCKET = "the engine gets no socket to the grammar process (EMFILE, ENOBUFS)"
    FULL_DISK = "the disk cache is full (ENOSPC)"
    DAMAGED_FILES = "files of the disk cache are cut short"
    EATEN_MEMORY = "the grammar process eats its memory"


class Victim(Protocol):
    """A grammar process, as a fault sees it."""

    process: Process

    def reset(self) -> None:
        """Break its connections."""


class CompileFault(enum.Enum):
    """What a compile worker does with a frame, in place of an answer."""

    HANG = enum.auto()
    MEMORY = enum.auto()
    KILLED = enum.auto()
    CRASH = enum.auto()


JUSTIFIES: dict[Fault, frozenset[str]] = {
    # The row may hang until the engine gives its sequence up; and its process ends, which is attributed.
    Fault.HUNG_FILL: frozenset({"GrammarUnavailable", "InternalError"}),
    Fault.FAILED_FILL: frozenset({"InternalError", "GRAMMAR_ERROR"}),
    Fault.HUNG_COMPILE: frozenset({"LimitExceeded"}),
    Fault.OUT_OF_MEMORY: frozenset({"LimitExceeded"}),
    Fault.KILLED_COMPILE: frozenset({"LimitExceeded"}),
    Fault.CRASHED_COMPILE: frozenset({"InternalError"}),
    Fault.NO_WORKER: frozenset({"LimitExceeded"}),
    # Time that passes while nothing runs counts toward every limit.
    Fault.JUMP: frozenset({"GrammarUnavailable", "LimitExceeded"}),
}
"""The errors that a fault justifies, by the names of their classes; a fault that is absent justifies none."""

_LOSES_MATCHERS = frozenset({Fault.SLOW_FILL, Fault.HUNG_FILL, Fault.FAILED_FILL, Fault.STOP, Fault.JUMP})
"""A batch that takes too long loses its matchers; a record is overwritten while its reader stands still."""
_COMPILES = {
    Fault.HUNG_COMPILE: CompileFault.HANG,
    Fault.OUT_OF_MEMORY: CompileFault.MEMORY,
    Fault.KILLED_COMPILE: CompileFault.KILLED,
    Fault.CRASHED_COMPILE: CompileFault.CRASH,
}
_CHANCES: dict[Fault, float] = {
    **{Fault.KILL: 0.5, Fault.TEAR: 0.25, Fault.STOP: 0.15, Fault.RESET: 0.15, Fault.JUMP: 0.15},
    **{Fault.SLOW_FILL: 0.3, Fault.HUNG_FILL: 0.04, Fault.FAILED_FILL: 0.04, Fault.HUNG_COMPILE: 0.04},
    **{Fault.OUT_OF_MEMORY: 0.04, Fault.KILLED_COMPILE: 0.04, Fault.CRASHED_COMPILE: 0.04},
    **{Fault.NO_PROCESS: 0.08, Fault.NO_WORKER: 0.06, Fault.NO_MAPPING: 0.08, Fault.FULL_DISK: 0.1},
    **{Fault.NO_SOCKET: 0.08, Fault.DAMAGED_FILES: 0.1},
    **{Fault.EATEN_MEMORY: 0.04},
}
_MOST_KILLS = 4
_LONG_JUMP_S = 2.0
"""As long as the shortest limit that ends a request."""
_FOR_GOOD_S = 600.0
"""A stop that outlasts every limit."""
_LAST_POINT = 500
_LAST_MOMENT_S = 0.6


@dataclass
class Faults:
    """The faults of one run. Each place asks, and counts how often it was passed."""

    world: World
    chosen: list[Fault] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    _kill_points: set[int] = field(default_factory=set)
    _tears: dict[int, float] = field(default_factory=dict)
    """Number of the call -> the share of its stores that are made."""
    _fills: dict[int, tuple[Fault, float]] = field(default_factory=dict)
    _compiles: dict[int, CompileFault] = field(default_factory=dict)
    _starts: dict[int, int] = field(default_factory=dict)
    _workers: dict[int, int] = field(default_factory=dict)
    _maps: dict[int, int] = field(default_factory=dict)
    _sockets: dict[int, int] = field(default_factory=dict)
    _full_disk_from: int = 1 << 30
    _counts: dict[str, int] = field(default_factory=dict)
    _eats_from_ns: int = 1 << 62
    _jump_s: float = 0.0
    _directory: Path = Path()
    _victim: Callable[[], Victim | None] = lambda: None
    may_lose_matchers: bool = False
    """A fault of this run may lose a matcher, or a record, while its process lives on."""
    on_slow: Callable[[float], None] = lambda seconds: None
    """Called with the time that a mask row takes."""
    _disarmed: bool = False
    _was_attached: Callable[[], bool] = lambda: False
    _stops_at_start: bool = False
    """A process was stopped for good before it was attached."""

    @staticmethod
    def drawn(world: World, chances: dict[Fault, float] = _CHANCES) -> Faults:
        """Draw the faults of a run."""
        faults, random = Faults(world), world.random
        faults.chosen = [fault for fault in Fault if random.random() < chances.get(fault, 0.0)]
        for fault in faults.chosen:
            faults._arm(fault, random)
        faults.may_lose_matchers = not _LOSES_MATCHERS.isdisjoint(faults.chosen)
        return faults

    def _arm(self, fault: Fault, random: Random) -> None:
        match fault:
            case Fault.KILL:
                self._kill_points = {random.randrange(1, _LAST_POINT) for _ in range(random.randint(1, _MOST_KILLS))}
            case Fault.TEAR:
                self._tears[1 + int(random.expovariate(1 / 12))] = random.random()
            case Fault.SLOW_FILL:
                for _ in range(random.randint(1, 6)):
                    self._fills[random.randint(1, 120)] = fault, random.choice((0.001, 0.003, 0.03, 0.3))
            case Fault.HUNG_FILL:
                self._fills[random.randint(1, 60)] = fault, 60.0
            case Fault.FAILED_FILL:
                self._fills[random.randint(1, 60)] = fault, 0.0
            case Fault.HUNG_COMPILE | Fault.OUT_OF_MEMORY | Fault.KILLED_COMPILE | Fault.CRASHED_COMPILE:
                self._compiles[random.randint(1, 4)] = _COMPILES[fault]
            case Fault.NO_PROCESS:
                self._starts = dict.fromkeys(
                    range(1, random.randint(2, 4)), random.choice((errno.EAGAIN, errno.ENOMEM))
                )
            case Fault.NO_WORKER:
                first, number = random.randint(1, 3), random.choice((errno.EMFILE, errno.ENOMEM))
                self._workers = dict.fromkeys(range(first, first + random.randint(1, 4)), number)
            case Fault.NO_MAPPING:
                self._maps = dict.fromkeys(range(1, random.randint(2, 4)), random.choice((errno.EMFILE, errno.ENOMEM)))
            case Fault.NO_SOCKET:
                first, number = random.randint(1, 2), random.choice((errno.EMFILE, errno.ENOBUFS))
                self._sockets = dict.fromkeys(range(first, first + random.randint(1, 4)), number)
            case Fault.FULL_DISK:
                self._full_disk_from = random.randint(1, 4)
            case Fault.JUMP:
                self._jump_s = random.choice((0.05, 0.2, 1.0, 2.0, 12.0))
            case Fault.STOP | Fault.RESET | Fault.EATEN_MEMORY | Fault.DAMAGED_FILES:
                pass  # at a moment: see `start`

    def start(
        self,
        directory: Path,
        victim: Callable[[], Victim | None],
        call_later: Callable[..., object],
        *,
        was_attached: Callable[[], bool],
    ) -> None:
        """Arm the faults that happen at a point or at a moment.

        Args:
            directory: of the disk cache.
            victim: returns the grammar process that serves now.
            call_later: of the engine's event loop.
            was_attached: returns whether that process was attached.
        """
        self._directory, self._victim, world = directory, victim, self.world
        self._was_attached = was_attached
        world.at_point = self._at_point
        moments: dict[Fault, Callable[[], None]] = {
            Fault.STOP: self._stop,
            Fault.RESET: self._reset,
            Fault.JUMP: self._jump,
            Fault.EATEN_MEMORY: self._eat,
            Fault.DAMAGED_FILES: self._damage,
        }
        for fault in self.chosen:
            if fault in moments:
                call_later(world.random.random() * _LAST_MOMENT_S, moments[fault])

    @property
    def justified(self) -> frozenset[str]:
        """The errors that the faults of this run justify."""
        faults = [fault for fault in self.chosen if fault is not Fault.JUMP or self._jump_s >= _LONG_JUMP_S]
        # The link kills a process that was never attached after 120 s, and a request waits 30 s for one.
        lasting = {"GrammarUnavailable"} if self._stops_at_start and not self._disarmed else set()
        return frozenset(lasting).union(*(JUSTIFIES.get(fault, frozenset()) for fault in faults))

    def hold_one_thread_each(self, threads: int) -> bool:
        """Return whether slow rows, each of which holds a thread, are all that the run has, and threads are left."""
        return not self._disarmed and set(self.chosen) == {Fault.SLOW_FILL} and len(self._fills) <= threads

    def disarm(self) -> None:
        """Let no further fault happen, and justify none."""
        self._disarmed = True
        self.chosen.clear()
        self.world.at_point = lambda number, label: None
        places = (self._starts, self._workers, self._maps, self._sockets)
        for armed in (self._tears, self._fills, self._compiles, *places):
            armed.clear()
        self._full_disk_from, self._eats_from_ns = 1 << 30, 1 << 62

    def _next(self, place: str) -> int:
        self._counts[place] = number = self._counts.get(place, 0) + 1
        return number

    def _happens(self, what: str) -> None:
        self.happened.append(what)
        self.world.note(f"fault: {what}")

    # -- at a point, at a moment --------------------------------------------------------------------------------------

    def _at_point(self, number: int, label: str) -> None:
        if number in self._kill_points and (child := self._victim()) is not None:
            self._happens(f"kill at {number} ({label})")
            child.process.end(-int(signal.SIGKILL))

    def _stop(self) -> None:
        if Fault.STOP in self.chosen and (child := self._victim()) is not None:
            seconds = self.world.random.choice((0.02, 0.09, 0.5, 3.0, 8.0, _FOR_GOOD_S))
            self._happens(f"stop for {seconds} s")
            self._stops_at_start |= seconds == _FOR_GOOD_S and not self._was_attached()
            child.process.frozen_until_ns = self.world.now_ns + int(seconds * 1e9)

    def _reset(self) -> None:
        if Fault.RESET in self.chosen and (child := self._victim()) is not None:
            self._happens("reset")
            child.reset()

    def _jump(self) -> None:
        if Fault.JUMP not in self.chosen:
            return
        self._happens(f"jump of {self._jump_s} s")
        self.world.now_ns += int(self._jump_s * 1e9)

    def _eat(self) -> None:
        if Fault.EATEN_MEMORY not in self.chosen:
            return
        self._happens("memory")
        self._eats_from_ns = self.world.now_ns

    def _damage(self) -> None:
        if Fault.DAMAGED_FILES not in self.chosen:
            return
        for path in sorted(self._directory.glob("*")):
            self._happens("a file is cut short")
            os.truncate(path, int(self.world.random.random() * path.stat().st_size))

    # -- at a place ---------------------------------------------------------------------------------------------------

    def cut(self, call: str, num_stores: int) -> int | None:
        """See `plane.Cut`."""
        share = self._tears.get(self._next("stores"))
        if share is None:
            return None
        self._happens(f"kill inside {call}")
        return int(share * (num_stores + 1))

    def fill(self) -> tuple[Fault, float] | None:
        """Return what happens to the next mask row, and for how many seconds."""
        fault = self._fills.get(self._next("fill"))
        if fault is not None:
            self._happens(f"{fault[0].name} {fault[1]} s")
            self.on_slow(fault[1])
        return fault

    def compilation(self) -> CompileFault | None:
        """Return what happens to the next compilation."""
        fault = self._compiles.get(self._next("compile"))
        if fault is not None:
            self._happens(f"compilation: {fault.name}")
        return fault

    def before_start(self) -> None:
        """Raise OSError when no process can be started."""
        self._raise("start", self._starts)

    def before_worker(self) -> None:
        """Raise OSError when no compile worker can be started."""
        self._raise("worker", self._workers)

    def before_map(self) -> None:
        """Raise OSError when the segment cannot be mapped."""
        self._raise("map", self._maps)

    def before_connect(self) -> None:
        """Raise OSError when the engine gets no socket."""
        self._raise("socket", self._sockets)

    def _raise(self, place: str, armed: dict[int, int]) -> None:
        number = armed.get(self._next(place), 0)
        if number:
            self._happens(f"{place}: {errno.errorcode[number]}")
            raise OSError(number, os.strerror(number))

    def open_file(self, **how: Any) -> Any:
        """Open a temporary file of the disk cache. Raises OSError when the disk is full."""
        if self._next("file") >= self._full_disk_from:
            self._happens("full disk")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return tempfile.NamedTemporaryFile(**how)

    def memory_mb(self, pid: int) -> int:
        """Return the memory of a grammar process: far too much, once, after the moment of that fault."""
        if self.world.now_ns >= self._eats_from_ns:
            self._eats_from_ns = 1 << 62
            return 1 << 20
        return 50

    def __repr__(self) -> str:
        return f"<Faults {[fault.name for fault in self.chosen]} happened={self.happened}>"
