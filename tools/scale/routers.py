"""Which engine gets a request: the policies of routers in front of engines.

Invariant: a policy sees only what a router sees: which engines answer its probes, and how many requests each holds.
Not responsible for: what happens when the chosen engine is gone (see fleet.py).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from tools.scale.traces import Arrival


class Target(Protocol):
    """An engine as a router sees it."""

    number: int

    @property
    def load(self) -> int:
        """Requests that it holds, running and waiting."""


class Router(Protocol):
    """A policy."""

    def choose(self, targets: Sequence[Target], arrival: Arrival) -> Target:
        """Return one of `targets`, which has at least one."""


class RoundRobin:
    """One engine after the other."""

    def __init__(self, rng: random.Random, slots: int) -> None:
        self._next = 0

    def choose(self, targets: Sequence[Target], arrival: Arrival) -> Target:
        """See `Router`."""
        self._next += 1
        return targets[(self._next - 1) % len(targets)]


class LeastLoaded:
    """The engine with the fewest requests; the first of equal ones, from a place that moves on."""

    def __init__(self, rng: random.Random, slots: int) -> None:
        self._next = 0

    def choose(self, targets: Sequence[Target], arrival: Arrival) -> Target:
        """See `Router`."""
        self._next += 1
        first = self._next % len(targets)
        return min([*targets[first:], *targets[:first]], key=lambda target: target.load)


class PowerOfTwo:
    """The emptier one of two engines drawn at random (Mitzenmacher 2001)."""

    def __init__(self, rng: random.Random, slots: int) -> None:
        self._rng = rng

    def choose(self, targets: Sequence[Target], arrival: Arrival) -> Target:
        """See `Router`."""
        if len(targets) == 1:
            return targets[0]
        return min(self._rng.sample(list(targets), 2), key=lambda target: target.load)


class PrefixAffinity:
    """The engine that a group's prompts hash to, by rendezvous hashing (Thaler and Ravishankar 1998), so that an engine
    that leaves moves only its own groups. A request without a group, and one whose engine holds more requests than the
    emptiest by more than half of its slots, goes to the emptiest."""

    def __init__(self, rng: random.Random, slots: int) -> None:
        self._others, self._slack = LeastLoaded(rng, slots), slots / 2

    def choose(self, targets: Sequence[Target], arrival: Arrival) -> Target:
        """See `Router`."""
        if arrival.group:
            weight = {t.number: zlib.crc32(f"{arrival.group} {t.number}".encode()) for t in targets}
            own = max(targets, key=lambda target: weight[target.number])
            if own.load - min(target.load for target in targets) <= self._slack:
                return own
        return self._others.choose(targets, arrival)


class Gateway:
    """This project's gateway (http_gateway/engines/fleet.py): the engine that has last prefilled the group's beginning,
    unless it holds more requests than the emptiest by more than half of its slots; then the emptiest."""

    def __init__(self, rng: random.Random, slots: int) -> None:
        self._slack = slots / 2
        self._last: dict[int, int] = {}
        """By group: the number of the engine that had its last request."""

    def choose(self, targets: Sequence[Target], arrival: Arrival) -> Target:
        """See `Router`."""
        least = min(targets, key=lambda target: target.load)
        cached = next((t for t in targets if arrival.group and t.number == self._last.get(arrival.group)), least)
        chosen = cached if cached.load <= least.load + self._slack else least
        self._last[arrival.group] = chosen.number
        return chosen


ROUTERS: dict[str, Callable[[random.Random, int], Router]] = {
    "gateway": Gateway,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "prefix-affinity": PrefixAffinity,
}
"""Name -> the policy, from a source of chance and the slots of an engine."""
