"""Single flight: any number of callers that want the same result share one task.

Invariant: a flight is in the table exactly while a caller can join it. Its task is cancelled when its last waiter has
left and the grace time is over; until then an equal caller may still join it. A finished flight leaves the table, so
that results and errors are never remembered here. Not thread-safe: one event loop owns a `SingleFlight`.

Not responsible for: caching results (see the callers).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Spawn(Protocol):
    """Starts a coroutine as a task. The owner of the tasks decides what else happens to them."""

    def __call__(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Return the running task."""


class Flight(Generic[Key, Result]):
    """One running task and the number of its waiters. Made by `SingleFlight.join`."""

    __slots__ = ("_cancellation", "key", "task", "waiters")

    def __init__(self, key: Key, task: asyncio.Task[Result]) -> None:
        self.key = key
        self.task = task
        self.waiters = 0
        self._cancellation: asyncio.TimerHandle | None = None
        """Set during the grace time, when the last waiter has left."""

    def __repr__(self) -> str:
        return f"<Flight {self.key!r} waiters={self.waiters} done={self.task.done()}>"


class SingleFlight(Generic[Key, Result]):
    """The running flights by key.

    Args:
        grace_s: seconds between the departure of the last waiter and the cancellation of the task. With 0 the task is
            cancelled at once.
        spawn: starts a flight's task; by default the task belongs to the event loop, and `close` ends it.
    """

    def __init__(self, grace_s: float = 0.0, spawn: Spawn | None = None) -> None:
        self._grace_s = grace_s
        self._spawn: Spawn = spawn or _spawn
        self._flights: dict[Key, Flight[Key, Result]] = {}
        self._tasks: set[asyncio.Task[Result]] = set()
        """Of all flights, also of abandoned ones until they have ended."""
        self.num_abandoned = 0
        """Flights that were cancelled because their last waiter left."""

    def get(self, key: Key) -> Flight[Key, Result] | None:
        """Return the flight that a caller with this key would join; None: there is none."""
        return self._flights.get(key)

    def join(self, key: Key, start: Callable[[], Coroutine[Any, Any, Result]]) -> tuple[Flight[Key, Result], bool]:
        """Become a waiter of the flight of `key`, which is started when there is none.

        Returns the flight, and whether an earlier caller had started it. Each call of `join` needs one call of `leave`
        (`wait` makes it).
        """
        flight = self._flights.get(key)
        joined = flight is not None
        if flight is None:
            flight = self._flights[key] = Flight(key, self._spawn(start(), f"flight {key!r}"))
            self._tasks.add(flight.task)
            flight.task.add_done_callback(partial(self._finished, flight))
        self.retain(flight)
        return flight, joined

    def retain(self, flight: Flight[Key, Result]) -> None:
        """Become a waiter of a flight that the caller already has. Needs one call of `leave`."""
        flight.waiters += 1
        if flight._cancellation is not None:
            flight._cancellation.cancel()
            flight._cancellation = None

    async def wait(self, flight: Flight[Key, Result]) -> Result:
        """Return the result of a flight that the caller has joined, and leave it. Raises the task's exception."""
        try:
            # Shielded: the cancellation of this waiter must not cancel the task that other waiters share.
            return await asyncio.shield(flight.task)
        finally:
            self.leave(flight)
            # An error's traceback holds this frame, and the flight's task holds the error: a cycle without this line.
            del flight

    async def run(self, key: Key, start: Callable[[], Coroutine[Any, Any, Result]]) -> tuple[Result, bool]:
        """Join, wait and leave. Returns the result, and whether an earlier caller had started the flight."""
        flight, joined = self.join(key, start)
        try:
            return await self.wait(flight), joined
        finally:
            del flight  # see `wait`

    def leave(self, flight: Flight[Key, Result]) -> None:
        """Stop being a waiter. The last one to leave a running flight starts the grace time."""
        flight.waiters -= 1
        if flight.waiters or flight.task.done():
            return
        if self._grace_s > 0:
            loop = asyncio.get_running_loop()
            flight._cancellation = loop.call_later(self._grace_s, self._abandon, flight)
        else:
            self._abandon(flight)

    async def close(self) -> None:
        """Cancel every running flight and wait for the end of its task, also of one that was abandoned."""
        for flight in self._flights.values():
            if flight._cancellation is not None:
                flight._cancellation.cancel()
            flight.task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abandon(self, flight: Flight[Key, Result]) -> None:
        # The flight leaves the table before the cancellation: a later caller must not join a task that is ending.
        self._remove(flight)
        self.num_abandoned += 1
        flight.task.cancel()

    def _finished(self, flight: Flight[Key, Result], task: asyncio.Task[Result]) -> None:
        self._remove(flight)
        self._tasks.discard(task)
        if not task.cancelled():
            # All waiters may have left. Reading the exception keeps asyncio from reporting it as never retrieved.
            task.exception()

    def _remove(self, flight: Flight[Key, Result]) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def __len__(self) -> int:
        return len(self._flights)

    def __repr__(self) -> str:
        return f"<SingleFlight running={len(self._flights)} abandoned={self.num_abandoned}>"


def _spawn(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work, name=name)
