"""One lane per slot over a few threads: work of one slot in order, work of different slots side by side.

Invariant: at most one thread works in a lane, and no thread waits for another; a slow slot holds one thread and nothing
else. One thread puts.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable

Work = Callable[[], None]


class Lanes:
    """`threads` daemon threads; work must not raise."""

    def __init__(self, threads: int) -> None:
        self._ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._waiting: dict[int, collections.deque[Work]] = {}
        """Lanes with work, begun or not. Guarded by the lock; a lane is in `_ready` or with a thread exactly once."""
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"lockstep-fill-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, lane: int, work: Work, replaces: Callable[[Work], bool] | None = None) -> None:
        """Have `work` done after what is in the lane, or instead of the last in it, if `replaces` says so of that."""
        with self._lock:
            waiting = self._waiting.get(lane)
            if waiting is not None:
                if waiting and replaces is not None and replaces(waiting[-1]):
                    waiting.pop()
                waiting.append(work)
                return
            self._waiting[lane] = collections.deque((work,))
        self._ready.put(lane)

    def idle(self, lane: int) -> bool:
        """Return whether nothing of the lane is waiting or being done."""
        with self._lock:
            return lane not in self._waiting

    def close(self, timeout_s: float) -> bool:
        """End each thread after what it is doing. False when one did not end in time."""
        for _ in self._threads:
            self._ready.put(None)
        give_up = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (lane := self._ready.get()) is not None:
            with self._lock:
                work = self._waiting[lane].popleft()
            work()
            with self._lock:
                more = bool(self._waiting[lane])
                if not more:
                    del self._waiting[lane]
            if more:
                self._ready.put(lane)

    def __repr__(self) -> str:
        return f"<Lanes threads={len(self._threads)} busy={len(self._waiting)}>"
