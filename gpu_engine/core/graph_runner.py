"""Runs steps as graphs: the loop's `StepRunner` over `StepGraphs`.

One invariant: a launch waits for nothing that a step in flight does; `collect` waits for its own step. Not here: what
is captured (graph.py), what a step is (device_step.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from gpu_engine.api.errors import InternalError
from gpu_engine.core.device_running import DeviceSlotWriter
from gpu_engine.core.outputs import LaneOutcome, outcomes
from gpu_engine.core.runner import Collected, Ticket, lanes_of
from gpu_engine.core.running import RunningSequence
from gpu_engine.step.device.graphs import Launched, StepGraphs
from shared_mem.errors import InvalidField

log = logging.getLogger(__name__)


class StepSync(Protocol):
    """What a sync tells of the steps over it."""

    @property
    def waited_ns(self) -> int:
        """Time that the last step stood waiting, where the host can see it."""

    def check(self, num_lanes: int) -> None:
        """Raise InvalidField when the last post of a batch of this padded size was refused. Does not wait."""


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
        depth: 1 to launch a step before the last one is read, else 0.
    """

    def __init__(
        self, graphs: StepGraphs, slot_writer: DeviceSlotWriter, sync: StepSync, max_inflight_steps: int
    ) -> None:
        self._graphs, self._slot_writer, self._sync, self._max_inflight_steps = (
            graphs,
            slot_writer,
            sync,
            max_inflight_steps,
        )
        self._flying: deque[_Flight] = deque()
        self._device_waited_ns = 0
        self._collected_s = 0.0

    @property
    def graphs(self) -> StepGraphs:
        """What it replays."""
        return self._graphs

    @property
    def max_inflight_steps(self) -> int:
        """As given."""
        return self._max_inflight_steps

    def launch(self, sequences: tuple[RunningSequence, ...]) -> Ticket:
        """Enqueue a step."""
        begin = time.perf_counter()
        lanes = self._slot_writer.lanes(sequences)
        logprobs = [sequence.payload.request.sampling.logprobs for sequence in sequences]
        wanted = any(count is not None for count in logprobs)
        launched = self._graphs.launch(lanes, logprobs=wanted)
        self._flying.append(_Flight(launched, [lane.guided for lane in lanes], logprobs))
        return Ticket(lanes_of(sequences), launched.key.num_rows, begin)

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
        if any(flight.guided):
            results = self._refused(flight, ticket, outputs.seq, results)
        return Collected(results, step_ms, waited_ns / 1e6, outputs.seq)

    def _refused(self, flight: _Flight, ticket: Ticket, seq: int, results: list[LaneOutcome]) -> list[LaneOutcome]:
        """Give an error to the lanes whose record a callback refused: no answer of theirs will ever come."""
        problem = ""
        try:
            self._sync.check(flight.launched.key.num_lanes)
        except InvalidField as error:
            problem = str(error)
        # A step whose post was refused has no sequence, which a neighbour cannot hide. (A sequence that ended a
        # step ago asked for nothing either, but holds its seat no more.)
        lanes = zip(flight.guided, ticket.lanes, results, strict=True)
        hit = [guided and lane.holds and out.deferred and seq == 0 for guided, lane, out in lanes]
        if not problem and not any(hit):
            return results
        log.error("a step's post was refused: %s", problem or "by an earlier callback")
        failed = InternalError("the engine's step told the grammar process what cannot be; see the server's log")
        lost = hit if any(hit) else flight.guided
        return [replace(out, error=failed) if gone else out for out, gone in zip(results, lost, strict=True)]

    def __repr__(self) -> str:
        return f"<GraphRunner depth={self._max_inflight_steps} in flight={len(self._flying)} {self._graphs}>"
