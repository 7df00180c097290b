"""Decides whether and when a failed call is sent again; the caller passes the clock, and sleeps.

The invariant: a call is sent again only while nothing of its answer has arrived, and only for a status that says that
the server did no work: UNAVAILABLE, or RESOURCE_EXHAUSTED because a queue is full. With RESOURCE_EXHAUSTED for any
other limit (bytes, time, memory of a grammar) a call would fail again, so it is not repeated. The pauses double, with
jitter, and no attempt begins after the call's deadline.

Not responsible for: the calls, or the pauses themselves (see client.py and async_client.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from lockstep_client.errors import CallError, LimitExceeded, Unavailable

_QUEUES = ("max_queue_size", "compile_queue")
"""Settings of the server that a RESOURCE_EXHAUSTED names when a queue is full; one of them passes with time."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how fast a call is sent again.

    Attributes:
        attempts: how often a call is sent in all, at least 1.
        first_pause_s: the pause before the second attempt lasts between half of this and all of it; it doubles from
            attempt to attempt.
        longest_pause_s: an upper limit of one pause.

    """

    attempts: int = 4
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts: is {self.attempts}, must be at least 1")
        if not 0 < self.first_pause_s <= self.longest_pause_s:
            raise ValueError("first_pause_s: must be above 0 and at most longest_pause_s")


NO_RETRIES = Retries(attempts=1)


class Attempts:
    """The attempts of one call."""

    def __init__(
        self,
        retries: Retries,
        deadline_s: float | None,
        clock_s: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Args: see below.

        deadline_s: the time of `clock_s` at which the call ends; None: never.
        jitter: returns a number in [0, 1).
        """
        self._retries, self._deadline_s, self._clock_s, self._jitter = retries, deadline_s, clock_s, jitter
        self.made = 1
        """Attempts so far, the running one included."""

    @property
    def remaining_s(self) -> float | None:
        """Time until the deadline, at least 0; None without one."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._clock_s())

    def pause_after(self, error: CallError) -> float | None:
        """Return the pause before the next attempt, in seconds, and count it; None: raise the error.

        The caller asks only while nothing of the answer has arrived.
        """
        passes = isinstance(error, Unavailable) or (
            isinstance(error, LimitExceeded) and any(name in error.details for name in _QUEUES)
        )
        if not passes or self.made >= self._retries.attempts:
            return None
        longest_s: float = min(self._retries.first_pause_s * 2 ** (self.made - 1), self._retries.longest_pause_s)
        pause_s = longest_s * (1 + self._jitter()) / 2
        if self.remaining_s is not None and pause_s >= self.remaining_s:
            return None
        self.made += 1
        return pause_s
