"""Threads, locks and queues of a simulated process: `service_runtime.threads.Threads` over the world's scheduler.

Invariant: a thread that waits for a lock, an event or a queue lets others go on, and taking a lock is a point. Not
responsible for: the choice of the next thread (see world.py).
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tools.simulation.world import Process, SimThread


class SimLock:
    """A lock."""

    def __init__(self, process: Process) -> None:
        self._world, self._held = process.world, False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock`."""
        patience_s = None if timeout < 0 else timeout
        if self._held and not (blocking and self._world.wait(lambda: not self._held, patience_s)):
            return False
        self._held = True
        return True

    def release(self) -> None:
        """See `threading.Lock`."""
        assert self._held, "a lock that is not held is released"
        self._held = False

    def locked(self) -> bool:
        """See `threading.Lock`."""
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SimCondition:
    """A condition over a SimLock."""

    def __init__(self, process: Process, lock: Any) -> None:
        self._world, self._lock = process.world, lock
        self._waiting: list[list[bool]] = []

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Condition`."""
        woken = [False]
        self._waiting.append(woken)
        self._lock.release()
        try:
            self._world.wait(lambda: woken[0], timeout)
        finally:
            self._lock.acquire()
            if woken in self._waiting:
                self._waiting.remove(woken)
        return woken[0]

    def notify(self, n: int = 1) -> None:
        """See `threading.Condition`."""
        for woken in self._waiting[:n]:
            woken[0] = True
        del self._waiting[:n]

    def notify_all(self) -> None:
        """See `threading.Condition`."""
        self.notify(len(self._waiting))


class SimEvent:
    """An event."""

    def __init__(self, process: Process) -> None:
        self._world, self._set = process.world, False

    def set(self) -> None:
        """See `threading.Event`."""
        self._set = True

    def is_set(self) -> bool:
        """See `threading.Event`."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Event`."""
        return self._world.wait(lambda: self._set, timeout)


class SimQueue:
    """A queue."""

    def __init__(self, process: Process) -> None:
        self._world = process.world
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """See `queue.SimpleQueue`."""
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """See `queue.SimpleQueue`."""
        if not self._items and (not block or not self._world.wait(lambda: self._items, timeout)):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """See `queue.SimpleQueue`."""
        return self.get(block=False)


class SimThreads:
    """The threads of one process."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world

    def thread(self, target: Callable[[], object], name: str) -> SimThread:
        """See `Threads`."""
        return SimThread(self._process, target, f"{self._process.name}/{name}")

    def current(self) -> SimThread:
        """See `Threads`."""
        assert self._world.current is not None, "an event loop is no thread of the simulation"
        return self._world.current

    def lock(self) -> SimLock:
        """See `Threads`."""
        return SimLock(self._process)

    def condition(self, lock: Any) -> SimCondition:
        """See `Threads`."""
        return SimCondition(self._process, lock)

    def event(self) -> SimEvent:
        """See `Threads`."""
        return SimEvent(self._process)

    def queue(self) -> SimQueue:
        """See `Threads`."""
        return SimQueue(self._process)

    def sleep(self, seconds: float) -> None:
        """See `Threads`."""
        self._world.sleep(seconds)

    def monotonic(self) -> float:
        """See `Threads`."""
        return self._world.now_ns / 1e9

    def monotonic_ns(self) -> int:
        """See `Threads`."""
        return self._world.now_ns

    perf_counter_ns = thread_time_ns = monotonic_ns
