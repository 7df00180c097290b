"""Who compiles next: those whose sequence was accepted already, then the others, each in the order in which they came.

Invariant: a place is free only while nobody waits; one that is given back goes straight to the next in line, and a
waiter that is cancelled leaves nothing taken. Owned by one event loop. Not here: how many may wait (`compile_pool`).
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """`places` of them may be taken at once."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._accepted: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait that were not accepted before."""
        return len(self._others)

    async def take(self, *, accepted: bool = False) -> None:
        """Wait for a place. Whoever has taken one gives it back."""
        if self._free:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._accepted if accepted else self._others
        line.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                line.remove(place)
            else:
                self.give_back()  # it was ours in the moment of the cancellation
            raise

    def give_back(self) -> None:
        """Pass a place on."""
        for line in (self._accepted, self._others):
            for place in line:
                if not place.done():
                    line.remove(place)
                    place.set_result(None)
                    return
        self._free += 1

    def __repr__(self) -> str:
        return f"<Turns free={self._free} accepted={len(self._accepted)} others={len(self._others)}>"
