"""How long a stream waits between two responses, so that responses leave the CPU to the model.

Each response costs time of the event loop. On a machine with few cores that time is taken from the decode step, so with
many streams the tokens of several steps are merged into one response. The pause is as long as needed for the responses
of all streams together to take MAX_SHARE of one core, at the cost per response that is measured:

    pause = measured cost of a response * streams / MAX_SHARE, at most `max_pause_s`

Invariant: a single stream has no pause, and no pause is longer than `max_pause_s`.

Not responsible for: the end of an answer, which interrupts a pause (see `Inbox.pause`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_SHARE = 0.05
"""Share of one core that the responses of all streams may take together."""
INITIAL_COST_S = 2e-4
"""Assumed until the first measurement."""
RESPONSES_PER_MEASUREMENT = 32
WEIGHT = 0.25
"""The weight of a new measurement in the moving average."""


class StreamPacer:
    """One per server. Used only on the event loop."""

    def __init__(self, max_pause_s: float, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """Args: `cpu_clock` returns the CPU seconds of the event loop's thread; `max_pause_s` 0.0: never pause."""
        self._max_pause_s, self._cpu_clock = max_pause_s, cpu_clock
        self._cost_s = INITIAL_COST_S
        self._responses = 0
        self._measured_from_s = cpu_clock()

    def response_sent(self) -> None:
        """Count a response; every RESPONSES_PER_MEASUREMENT of them give a new measurement of the cost."""
        self._responses += 1
        if self._responses < RESPONSES_PER_MEASUREMENT:
            return
        now_s = self._cpu_clock()
        cost_s = (now_s - self._measured_from_s) / self._responses
        self._cost_s += WEIGHT * (cost_s - self._cost_s)
        self._responses, self._measured_from_s = 0, now_s

    def pause_s(self, streams: int) -> float:
        """Return how long a stream pauses after a response while `streams` streams run, itself included."""
        if streams < 2:
            return 0.0
        return min(self._cost_s * streams / MAX_SHARE, self._max_pause_s)

    def __repr__(self) -> str:
        return f"<StreamPacer cost={self._cost_s * 1e6:.0f}us max={self._max_pause_s * 1e3:g}ms>"
