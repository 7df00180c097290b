"""Runs steps as graphs: the loop's `StepRunner` over `StepGraphs`.

One invariant: a launch waits for nothing that a step in flight does; `collect` waits for its own step. Not here: what
is captured (graph.py), what a step is (device_step.py).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from gpu_engine.collect import outcomes
from gpu_engine.device_seating import DeviceSeating
from gpu_engine.graph import Launched, StepGraphs
from gpu_engine.runner import Collected, Ticket, lanes_of
from gpu_engine.seating import Seat


class WaitClock(Protocol):
    """What a sync tells of its waits."""

    @property
    def waited_ns(self) -> int:
        """Time that the last step stood waiting, where the host can see it."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step, as its lanes were then."""

    launched: Launched
    guided: list[bool]
    logprobs: list[int | None]


class GraphRunner:
    """Launches and collects in one order. Used by the engine thread alone, with the stream current.

    Args:
        graphs: captured, or eager.
        seating: of the same slots.
        sync: of the same steps.
        num_rows: P of every step.
        depth: 1 to launch a step before the last one is read, else 0.
    """

    def __init__(self, graphs: StepGraphs, seating: DeviceSeating, sync: WaitClock, num_rows: int, depth: int) -> None:
        self._graphs, self._seating, self._sync, self._num_rows = graphs, seating, sync, num_rows
        self._depth = depth
        self._flying: deque[_Flight] = deque()
        self._device_waited_ns = 0
        self._collected_s = 0.0

    @property
    def depth(self) -> int:
        """As given."""
        return self._depth

    def launch(self, seats: tuple[Seat, ...]) -> Ticket:
        """Enqueue a step."""
        begin = time.perf_counter()
        lanes = self._seating.lanes(seats)
        logprobs = [seat.payload.request.sampling.logprobs for seat in seats]
        wanted = any(count is not None for count in logprobs)
        launched = self._graphs.launch(lanes, self._num_rows, logprobs=wanted)
        self._flying.append(_Flight(launched, [lane.guided for lane in lanes], logprobs))
        return Ticket(lanes_of(seats), self._num_rows, begin)

    def collect(self, ticket: Ticket) -> Collected:
        """Wait for the oldest launched step. Raises when the device failed."""
        flight = self._flying.popleft()
        assert flight.launched.num_lanes == len(ticket.lanes), "steps are collected in the order of their launches"
        outputs = self._graphs.read(flight.launched)
        now = time.perf_counter()
        # A step behind another begins when that one has ended.
        step_ms = (now - max(ticket.launched_s, self._collected_s)) * 1e3
        self._collected_s = now
        waited_ns = outputs.waited_ns - self._device_waited_ns
        self._device_waited_ns = outputs.waited_ns
        if any(flight.guided):
            waited_ns += self._sync.waited_ns
        results = outcomes(outputs, len(ticket.lanes), guided=flight.guided, logprobs=flight.logprobs)
        return Collected(results, step_ms, waited_ns / 1e6, outputs.seq)

    def __repr__(self) -> str:
        return f"<GraphRunner depth={self._depth} in flight={len(self._flying)} {self._graphs}>"
