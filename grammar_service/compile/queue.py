"""Who compiles next: those whose sequence was accepted already, then the others, each in the order in which they came.

Invariant: a place is free only while nobody waits; one that is given back goes straight to the next in line, and a
waiter that is cancelled leaves nothing taken. Owned by one event loop. Not here: how many may wait (`compile_pool`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """In one of the lines."""

    name: str
    turn: asyncio.Future[None]
    """Done when it is theirs."""


class CompileQueue:
    """`places` of them may be taken at once."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._accepted: deque[_Place] = deque()
        self._others: deque[_Place] = deque()

    @property
    def waiting(self) -> int:
        """How many wait that were not accepted before."""
        return len(self._others)

    async def take(self, name: str = "", *, accepted: bool = False) -> None:
        """Wait for a place. Whoever has taken one gives it back. `name`: for `promote`."""
        if self._free:
            self._free -= 1
            return
        place = _Place(name, asyncio.get_running_loop().create_future())
        (self._accepted if accepted else self._others).append(place)
        try:
            await place.turn
        except asyncio.CancelledError:
            if place.turn.cancelled():
                (self._accepted if place in self._accepted else self._others).remove(place)
            else:
                self.give_back()  # it was ours in the moment of the cancellation
            raise

    def promote(self, name: str) -> None:
        """Whoever waits under `name` is accepted now."""
        for place in [place for place in self._others if place.name == name]:
            self._others.remove(place)
            self._accepted.append(place)

    def give_back(self) -> None:
        """Pass a place on."""
        for line in (self._accepted, self._others):
            for place in line:
                if not place.turn.done():
                    line.remove(place)
                    place.turn.set_result(None)
                    return
        self._free += 1

    def __repr__(self) -> str:
        return f"<CompileQueue free={self._free} accepted={len(self._accepted)} others={len(self._others)}>"
