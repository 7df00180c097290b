"""Threads, locks, queues of threads and the monotonic clock, as the two processes use them: from the operating system.

A part that waits or measures time takes a `Threads`, so that a program may run it under a clock and a scheduler of its
own. Invariant: `OS_THREADS` adds nothing to what Python offers: each of its methods is a function of `threading`,
`queue` or `time`. Not responsible for: tasks of an event loop, whose loop has a clock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol


class Lock(Protocol):
    """`threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; False: it is held, and the call does not block."""

    def release(self) -> None:
        """Give the lock back."""

    def locked(self) -> bool:
        """Return whether a thread holds the lock."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Condition(Protocol):
    """`threading.Condition`. Its lock is held around every call."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification; False after `timeout` seconds."""

    def notify(self, n: int = 1) -> None:
        """Wake at most `n` waiting threads."""

    def notify_all(self) -> None:
        """Wake every waiting thread."""


class Event(Protocol):
    """`threading.Event`."""

    def set(self) -> None:
        """Wake every waiting thread, now and later."""

    def is_set(self) -> bool:
        """Return whether `set` was called."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`; False after `timeout` seconds."""


class Thread(Protocol):
    """`threading.Thread`."""

    @property
    def ident(self) -> int | None:
        """None before the start."""

    def start(self) -> None:
        """Start the thread. Once."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, or for `timeout` seconds."""

    def is_alive(self) -> bool:
        """Return whether the thread runs."""


class Queue(Protocol):
    """`queue.SimpleQueue`."""

    def put(self, item: Any) -> None:
        """Append an item. Never blocks."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the first item. Raises queue.Empty when there is none within `timeout` seconds."""

    def get_nowait(self) -> Any:
        """Take the first item. Raises queue.Empty when there is none."""


class Threads(Protocol):
    """Where a part gets its threads, and how it waits."""

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """Return a daemon thread that is not started."""

    def current(self) -> Thread:
        """Return the calling thread."""

    def lock(self) -> Lock:
        """Return a lock."""

    def condition(self, lock: Lock) -> Condition:
        """Return a condition over a lock of `lock`."""

    def event(self) -> Event:
        """Return an event."""

    def queue(self) -> Queue:
        """Return a queue without a bound."""

    def sleep(self, seconds: float) -> None:
        """Let the calling thread sleep."""

    def monotonic(self) -> float:
        """Return the time in seconds, of a clock that never goes back."""

    def monotonic_ns(self) -> int:
        """Return the same in nanoseconds."""

    def perf_counter_ns(self) -> int:
        """Return the time of the most precise clock, in nanoseconds."""

    def thread_time_ns(self) -> int:
        """Return the time that the calling thread has run, in nanoseconds."""


class _OSThreads:
    """The threads of the operating system."""

    current = staticmethod(threading.current_thread)
    lock = staticmethod(threading.Lock)
    condition = staticmethod(threading.Condition)
    event = staticmethod(threading.Event)
    queue: Callable[[], Queue] = staticmethod(queue.SimpleQueue)
    sleep = staticmethod(time.sleep)
    monotonic = staticmethod(time.monotonic)
    monotonic_ns = staticmethod(time.monotonic_ns)
    perf_counter_ns = staticmethod(time.perf_counter_ns)
    thread_time_ns = staticmethod(time.thread_time_ns)

    @staticmethod
    def thread(target: Callable[[], object], name: str) -> Thread:
        """See `Threads`."""
        return threading.Thread(target=target, name=name, daemon=True)


OS_THREADS: Threads = _OSThreads()  # type: ignore[assignment]  # a condition takes only the locks of `lock`
