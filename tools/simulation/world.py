"""The world of one run: a virtual clock, actors, and a seeded scheduler that chooses which actor goes on.

An actor is a thread or an event loop. A thread is a greenlet: it runs until it waits or passes a point, and then the
scheduler chooses the next actor. An event loop runs one callback at a time. Time passes a little with every choice, and
leaps to the next deadline when no actor can go on.

Invariant: every choice comes from the seed, so that a seed gives the same trace in every run and process. One thread of
the operating system runs everything; nothing sleeps, and nothing reads a real clock to decide.

Not responsible for: what the actors are (see threads.py, event_loop.py), faults (see faults.py).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol

from greenlet import GreenletExit, getcurrent, greenlet

START_NS = 1_000_000_000_000
"""The virtual time at which every run begins; 0 would mean "never" in the segment's words."""
LONGEST_TICK_NS = 20_000
LONGEST_PAUSE_S = 0.06
TRACE_LINES = 400
"""The last lines of the trace that a failed run shows."""


class Process:
    """A simulated process: actors that end together, at any point, without a chance to clean up."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.frozen_until_ns = 0
        """A stopped process runs nothing until then."""
        self.at_end: list[Callable[[], None]] = []
        """What the kernel does at its end: it closes descriptors and hangs up sockets."""
        self.exit_code: int | None = None

    def end(self, code: int) -> None:
        """End the process at once: none of its actors goes on."""
        if not self.alive:
            return
        self.world.note(f"{self.name} ends {code}")
        self.alive, self.exit_code = False, code
        self.world.forget(self)
        for close in self.at_end:
            close()

    def __repr__(self) -> str:
        return f"<Process {self.name} {'alive' if self.alive else self.exit_code}>"


class Actor(Protocol):
    """What the scheduler chooses from."""

    name: str
    process: Process

    def is_ready(self, now_ns: int) -> bool:
        """Return whether the actor can go on now."""

    def due_ns(self) -> int | None:
        """Return when the clock lets it go on; None: never."""

    def step(self) -> None:
        """Go on until the next wait or point."""


class SimThread:
    """A thread of a process, over a greenlet. `service_runtime.threads.Thread` is its protocol."""

    _numbers = itertools.count(1)

    def __init__(self, process: Process, target: Callable[[], object], name: str) -> None:
        self.process, self.name, self._target = process, name, target
        self.ident: int | None = None
        self.error: BaseException | None = None
        self._greenlet: greenlet | None = None
        self._condition: Callable[[], object] | None = None
        self._due_ns: int | None = None
        self._waits = False

    def start(self) -> None:
        """Start the thread. Once."""
        world = self.process.world
        self.ident = next(self._numbers)
        self._greenlet = greenlet(self._run, parent=world.main)
        world.add(self)

    def _run(self) -> None:
        try:
            self._target()
        except GreenletExit:
            raise
        except BaseException as error:
            self.error = error
            self.process.world.complain(f"thread {self.name} ended with {error!r}")
        finally:
            self.process.world.remove(self)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, or for `timeout` seconds."""
        self.process.world.wait(lambda: not self.is_alive(), timeout)

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._greenlet is not None and not self._greenlet.dead

    def is_ready(self, now_ns: int) -> bool:
        """See `Actor`."""
        if not self._waits:
            return True
        if self._due_ns is not None and now_ns >= self._due_ns:
            return True
        return self._condition is not None and bool(self._condition())

    def due_ns(self) -> int | None:
        """See `Actor`."""
        return self._due_ns

    def step(self) -> None:
        """See `Actor`."""
        assert self._greenlet is not None
        self._waits, self._condition, self._due_ns = False, None, None
        self._greenlet.switch()

    def suspend(self, condition: Callable[[], object] | None, due_ns: int | None, *, waits: bool) -> None:
        """Let others go on; called on the thread itself."""
        self._waits, self._condition, self._due_ns = waits, condition, due_ns
        self.process.world.main.switch()

    def discard(self) -> None:
        """Unwind the thread of a run that is over."""
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def __repr__(self) -> str:
        return f"<SimThread {self.process.name}/{self.name}>"


class World:
    """One run. `main` is the greenlet of the scheduler, on which event loops run as well."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        self.main: greenlet = getcurrent()
        self.now_ns = START_NS
        self.current: SimThread | None = None
        self.steps = self.points = 0
        self.problems: list[str] = []
        self.lines: deque[str] = deque(maxlen=TRACE_LINES)
        self.at_point: Callable[[int, str], None] = lambda number, label: None
        """Called at each point, before the scheduler chooses: a fault may happen there."""
        self.stay = self.random.choice((0.0, 0.5, 0.9))
        """The chance that a thread goes on at a point. High: long stretches without another thread in between."""
        self.pauses = self.random.choice((0.0, 0.002, 0.01))
        """The chance of each choice that some actor is put aside for a while, as a system does with a thread."""
        self._aside: dict[Actor, int] = {}
        """Actor -> the time until which it goes on only if no other can."""
        self.over = False
        self._trace = hashlib.blake2b(digest_size=8)
        self._actors: list[Actor] = []
        self._threads: list[SimThread] = []

    # -- actors ------------------------------------------------------------------------------------------------------

    def add(self, actor: Actor) -> None:
        """Let the scheduler choose `actor` from now on."""
        if isinstance(actor, SimThread):
            self._threads.append(actor)
        if actor.process.alive:
            self._actors.append(actor)

    def remove(self, actor: Actor) -> None:
        """Choose `actor` no more."""
        if actor in self._actors:
            self._actors.remove(actor)

    def forget(self, process: Process) -> None:
        """Choose no actor of a process that has ended."""
        self._actors = [actor for actor in self._actors if actor.process is not process]

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], object], *, limit_s: float) -> bool:
        """Run the actors until a condition holds; False: it did not within `limit_s` of virtual time."""
        end_ns = self.now_ns + int(limit_s * 1e9)
        while not until():
            if self.now_ns >= end_ns or self.problems:
                return False
            self._choose(end_ns)
        return True

    def _choose(self, end_ns: int) -> None:
        now_ns = self.now_ns
        ready = [actor for actor in self._actors if actor.process.frozen_until_ns <= now_ns and actor.is_ready(now_ns)]
        if not ready:
            self.now_ns = min(end_ns, *(self._next_ns(actor) for actor in self._actors), end_ns)
            return
        if self.random.random() < self.pauses:
            self._aside[self.random.choice(ready)] = now_ns + int(self.random.random() ** 3 * LONGEST_PAUSE_S * 1e9)
        if self._aside:
            self._aside = {actor: until_ns for actor, until_ns in self._aside.items() if until_ns > now_ns}
            ready = [actor for actor in ready if actor not in self._aside] or ready
        actor = ready[int(self.random.random() * len(ready))] if len(ready) > 1 else ready[0]
        self.now_ns += int(self.random.random() * LONGEST_TICK_NS)
        self.steps += 1
        self.note(actor.name)
        self.current = actor if isinstance(actor, SimThread) else None
        actor.step()
        self.current = None

    def _next_ns(self, actor: Actor) -> int:
        """Return when a waiting actor may go on; a stopped one that is ready by itself goes on when it is continued."""
        thawed_ns = actor.process.frozen_until_ns
        if thawed_ns > self.now_ns and actor.is_ready(self.now_ns):
            return thawed_ns
        due_ns = actor.due_ns()
        return (1 << 62) if due_ns is None else max(due_ns, thawed_ns)

    # -- called on threads -------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object] | None, timeout_s: float | None) -> bool:
        """Let others go on until `condition()` holds or the time is over; return whether it holds.

        On the scheduler's own greenlet, where event loops run, nothing may wait.
        """
        if condition is not None and condition():
            return True
        thread = self._thread()
        due_ns = None if timeout_s is None else self.now_ns + max(int(timeout_s * 1e9), 0)
        thread.suspend(condition, due_ns, waits=True)
        return condition is not None and bool(condition())

    def sleep(self, seconds: float) -> None:
        """Let time pass for the calling thread."""
        self.wait(None, seconds)

    def point(self, label: str) -> None:
        """Pass a point: a fault may happen here, and another actor may go on."""
        self.points += 1
        self.note(label)
        self.at_point(self.points, label)
        thread = self.current
        if thread is not None and (not thread.process.alive or self.random.random() >= self.stay):
            thread.suspend(None, None, waits=False)

    def _thread(self) -> SimThread:
        if self.over:
            raise GreenletExit
        assert self.current is not None, "an event loop may not wait"
        return self.current

    # -- the record --------------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now_ns - START_NS} {what}"
        self.lines.append(line)
        self._trace.update(line.encode())

    def complain(self, problem: str) -> None:
        """Note a broken promise; the run ends."""
        self.problems.append(problem)

    @property
    def trace(self) -> str:
        """A digest of every choice and point so far."""
        return self._trace.copy().hexdigest()

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < probability

    def between(self, low_s: float, high_s: float) -> float:
        """Return a number of seconds in the range."""
        return low_s + self.random.random() * (high_s - low_s)

    def close(self) -> None:
        """Unwind every thread that is left. No effect of theirs is seen any more."""
        self.over = True
        for thread in self._threads:
            thread.discard()
        self._threads.clear()
        self._actors.clear()

    def __repr__(self) -> str:
        return f"<World seed={self.seed} steps={self.steps} now={(self.now_ns - START_NS) / 1e9:.3f} s>"
