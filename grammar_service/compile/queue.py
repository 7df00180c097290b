"""The queue of compilations: accepted sequences first, then the others, each group fair between tenants.

Within a group the next worker goes to the tenant with the smallest counter: the time for which workers have compiled
for it while anything waited, divided by its weight. The time of a running compilation counts while it runs. A tenant
that begins to wait is lifted to the smallest counter of the waiting tenants, so it saves nothing up, and all counters
are forgotten when nothing waits: then no tenant went short. A tenant's own compilations keep the order of arrival. All
compilations of a server without tenants count as one tenant's.

Once all places of the queue are taken, they also belong to the tenants by weight. A compilation that finds no place
takes the place of the newest one of the tenant with the most waiting compilations over its weight, if its own tenant
then has fewer over its weight; otherwise it is refused itself. Compilations of accepted sequences need no place.

Invariant: a worker is free only while no compilation waits. A released worker goes straight to the next waiter, and a
cancelled waiter keeps nothing. A compilation that is not for an accepted sequence waits for at most `wait_s`. While one
group waits, no waiting tenant's counter exceeds the smallest one by more than one compilation on every worker,
over its weight. While a tenant's waiting compilations are no more than its share of the places, by the weights of the
tenants that wait, none of them is refused or loses its place. Not thread-safe: one event loop owns a queue.

Not responsible for: how many compilations one tenant may have at once (see
gpu_engine/sidecar/compile_admission.py).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's part of the workers while several tenants wait."""

    tenant: str = ""
    """"": all that belong to no tenant."""
    weight: float = 1.0


NO_TENANT = Share()


class QueueFullError(Exception):
    """The compilation has no place in the queue, or lost it to one of another tenant."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A compilation in the queue."""

    name: str
    share: Share
    assigned: asyncio.Future[None]
    """Done when a worker is assigned; fails with TimeoutError when the wait was too long, and with QueueFullError when
    another tenant's compilation took the place."""


@dataclass(slots=True)
class _Usage:
    """The workers of one tenant."""

    weight: float
    running: int = 0
    counter: float = 0.0
    """In seconds of one worker, divided by the weight."""


class CompileQueue:
    """Assigns workers to compilations.

    Args:
        workers: number of workers.
        wait_s: how long a compilation may wait, unless it is for an accepted sequence.
        clock: monotonic, in seconds; None: the clock of the event loop.
        max_waiting: how many compilations may wait, not counting those for accepted sequences.
    """

    def __init__(
        self,
        workers: int,
        wait_s: float,
        clock: Callable[[], float] | None = None,
        *,
        max_waiting: float = math.inf,
    ) -> None:
        self._free = workers
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._accepted: deque[_Waiter] = deque()
        self._others: deque[_Waiter] = deque()
        self._usages: dict[str, _Usage] = {}
        """Counters of tenants with a worker, and of tenants that had one while anything waits."""
        self._counted_s = 0.0
        """The counters include the running compilations up to this time."""

    @property
    def num_waiting(self) -> int:
        """Number of waiting compilations that are not for an accepted sequence."""
        return len(self._others)

    def try_acquire(self, share: Share) -> bool:
        """Take a worker if one is free; the caller must `release` it for the same share."""
        self._count()
        if not self._free:
            return False
        self._free -= 1
        self._usage(share).running += 1
        return True

    async def acquire(self, name: str = "", *, accepted: bool = False, share: Share = NO_TENANT) -> None:
        """Wait for a worker; the caller must `release` it for the same share. `name` is the argument of `promote`.

        Unless the compilation is accepted or was promoted, raises TimeoutError after `wait_s`, and QueueFullError when
        there is no place, or no longer one.
        """
        if self.try_acquire(share):
            return
        displaced = None if accepted else self._displaced(share)
        self._lift(share)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(name, share, loop.create_future())
        (self._accepted if accepted else self._others).append(waiter)
        if displaced is not None:
            self._remove(displaced)
            displaced.assigned.set_exception(QueueFullError())
        timer = loop.call_later(self._wait_s, self._expire, waiter)
        try:
            await waiter.assigned
        except asyncio.CancelledError:
            if waiter.assigned.cancelled():
                self._remove(waiter)
            elif waiter.assigned.exception() is None:
                self.release(share)  # the worker was assigned in the moment of the cancellation
            raise
        finally:
            timer.cancel()

    def promote(self, name: str) -> None:
        """Move the compilations of this name after the last one of an accepted sequence."""
        for waiter in [waiter for waiter in self._others if waiter.name == name]:
            self._others.remove(waiter)
            self._accepted.append(waiter)

    def _displaced(self, share: Share) -> _Waiter | None:
        """Return whose place a compilation of `share` takes; None: one is free. Raises QueueFullError."""
        waiting = [waiter for waiter in self._others if not waiter.assigned.done()]
        if len(waiting) < self._max_waiting:
            return None
        counts = Counter(waiter.share.tenant for waiter in waiting)
        newest = {waiter.share.tenant: waiter for waiter in waiting}  # of equal keys the last one stays
        last = max(newest.values(), key=lambda waiter: counts[waiter.share.tenant] / waiter.share.weight)
        if counts[last.share.tenant] / last.share.weight <= (counts[share.tenant] + 1) / share.weight:
            raise QueueFullError
        return last

    def _expire(self, waiter: _Waiter) -> None:
        # A promoted waiter has left `_others`, and so has one with a worker.
        if waiter in self._others and not waiter.assigned.done():
            self._remove(waiter)
            waiter.assigned.set_exception(TimeoutError())

    def release(self, share: Share = NO_TENANT) -> None:
        """Assign the caller's worker to the next waiter, or leave it free."""
        self._count()
        self._usage(share).running -= 1
        waiter = self._next(self._accepted) or self._next(self._others)
        if waiter is None:
            self._free += 1
            self._forget()
            return
        self._usage(waiter.share).running += 1
        self._remove(waiter)
        waiter.assigned.set_result(None)

    def _next(self, waiting: deque[_Waiter]) -> _Waiter | None:
        """Return the first compilation of the tenant with the smallest counter."""
        first: dict[str, _Waiter] = {}
        for waiter in waiting:
            if not waiter.assigned.done():
                first.setdefault(waiter.share.tenant, waiter)
        return min(first.values(), key=self._order, default=None)

    def _order(self, waiter: _Waiter) -> tuple[float, int]:
        # Of equal counters the tenant with fewer workers comes first, and then the first one of the queue.
        usage = self._usage(waiter.share)
        return usage.counter, usage.running

    def _usage(self, share: Share) -> _Usage:
        return self._usages.setdefault(share.tenant, _Usage(share.weight))

    def _lift(self, share: Share) -> None:
        """Raise the counter of a tenant that begins to wait to the smallest counter of the waiting tenants."""
        usage = self._usage(share)
        usage.weight = share.weight
        waiting = {waiter.share.tenant: waiter.share for group in (self._accepted, self._others) for waiter in group}
        if waiting and share.tenant not in waiting:
            usage.counter = max(usage.counter, min(self._usage(other).counter for other in waiting.values()))

    def _count(self) -> None:
        """Add the time of the running compilations since the last count, if anything waited."""
        now_s = self._clock()
        if self._accepted or self._others:
            for usage in self._usages.values():
                usage.counter += usage.running * (now_s - self._counted_s) / usage.weight
        self._counted_s = now_s

    def _remove(self, waiter: _Waiter) -> None:
        (self._accepted if waiter in self._accepted else self._others).remove(waiter)
        self._forget()

    def _forget(self) -> None:
        """Drop the counters if nothing waits."""
        if not self._accepted and not self._others:
            self._usages = {
                name: _Usage(usage.weight, usage.running) for name, usage in self._usages.items() if usage.running
            }

    def __repr__(self) -> str:
        return f"<CompileQueue free={self._free} accepted={len(self._accepted)} others={len(self._others)}>"
