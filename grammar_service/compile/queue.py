"""The queue of compilations: those of accepted sequences first, then the others, each in the order of arrival.

Invariant: a worker is free only while no compilation waits. A released worker goes straight to the next waiter, and a
cancelled waiter keeps nothing. A compilation that is not for an accepted sequence waits for at most `wait_s`. Not
thread-safe: one event loop owns a queue.

Not responsible for: the length limit of the queue (see pool.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A compilation in the queue."""

    name: str
    assigned: asyncio.Future[None]
    """Done when a worker is assigned; fails with TimeoutError when the wait was too long."""


class CompileQueue:
    """Assigns `workers` workers to compilations, which wait for at most `wait_s` seconds."""

    def __init__(self, workers: int, wait_s: float) -> None:
        self._free = workers
        self._wait_s = wait_s
        self._accepted: deque[_Waiter] = deque()
        self._others: deque[_Waiter] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of waiting compilations that are not for an accepted sequence."""
        return len(self._others)

    async def acquire(self, name: str = "", *, accepted: bool = False) -> None:
        """Wait for a worker; the caller must `release` it. `name` is the argument of `promote`.

        Raises TimeoutError after `wait_s`, unless the compilation is accepted or was promoted.
        """
        if self._free:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        waiter = _Waiter(name, loop.create_future())
        (self._accepted if accepted else self._others).append(waiter)
        timer = loop.call_later(self._wait_s, self._expire, waiter)
        try:
            await waiter.assigned
        except asyncio.CancelledError:
            if waiter.assigned.cancelled():
                (self._accepted if waiter in self._accepted else self._others).remove(waiter)
            elif waiter.assigned.exception() is None:
                self.release()  # the worker was assigned in the moment of the cancellation
            raise
        finally:
            timer.cancel()

    def promote(self, name: str) -> None:
        """Move the compilations of this name behind the last one of an accepted sequence."""
        for waiter in [waiter for waiter in self._others if waiter.name == name]:
            self._others.remove(waiter)
            self._accepted.append(waiter)

    def _expire(self, waiter: _Waiter) -> None:
        # A promoted waiter has left `_others`, and so has one with a worker.
        if waiter in self._others and not waiter.assigned.done():
            self._others.remove(waiter)
            waiter.assigned.set_exception(TimeoutError())

    def release(self) -> None:
        """Assign the caller's worker to the next waiter, or leave it free."""
        for waiting in (self._accepted, self._others):
            for waiter in waiting:
                if not waiter.assigned.done():
                    waiting.remove(waiter)
                    waiter.assigned.set_result(None)
                    return
        self._free += 1

    def __repr__(self) -> str:
        return f"<CompileQueue free={self._free} accepted={len(self._accepted)} others={len(self._others)}>"
