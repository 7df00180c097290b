"""One task for any number of equal askers, given up when the last of them has left.

Invariant: a flight is in the table exactly while it can be joined; its task ends with its last waiter, after a grace in
which an equal asker may still join it. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

ABANDONED_S = 0.25
"""A compilation that nobody waits for gets this long to end: most do, and a killed worker costs a new one's start."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0
    given_up: asyncio.TimerHandle | None = field(default=None)


class Flights(Generic[T]):
    """Flights by key. `abandoned` counts those that were given up."""

    def __init__(self, grace_s: float = ABANDONED_S) -> None:
        self._grace_s = grace_s
        self._running: dict[str, _Flight[T]] = {}
        self.abandoned = 0

    async def join(self, key: str, make: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, bool]:
        """Wait for the flight of `key`, started with `make` when there is none; return its result and "joined".

        Raises what the flight raises.
        """
        flight = self._running.get(key)
        joined = flight is not None
        if flight is None:
            flight = self._running[key] = _Flight(asyncio.create_task(make(), name=f"flight-{key}"))
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiters += 1
        if flight.given_up:
            flight.given_up.cancel()
            flight.given_up = None
        try:
            # Shielded: others may wait for the same flight when this waiter is cancelled.
            return await asyncio.shield(flight.task), joined
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                loop = asyncio.get_running_loop()
                flight.given_up = loop.call_later(self._grace_s, self._give_up, key, flight)

    async def close(self) -> None:
        """End every flight."""
        flights = list(self._running.values())
        for flight in flights:
            if flight.given_up:
                flight.given_up.cancel()
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in flights), return_exceptions=True)

    def _give_up(self, key: str, flight: _Flight[T]) -> None:
        # Out of the table first: who asks now must not join a task that is being cancelled.
        if self._running.get(key) is flight:
            del self._running[key]
        self.abandoned += 1
        flight.task.cancel()

    def _landed(self, key: str, task: asyncio.Task[T]) -> None:
        flight = self._running.get(key)
        if flight is not None and flight.task is task:
            del self._running[key]
        if not task.cancelled():
            # Every waiter may have gone; asking for the exception says that it was seen.
            task.exception()

    def __len__(self) -> int:
        return len(self._running)

    def __repr__(self) -> str:
        return f"<Flights running={len(self._running)} abandoned={self.abandoned}>"
