"""Launching steps and collecting what they did: the seam between the loop and how a step is executed.

A step is launched for the sequences in their seats and collected later, up to `max_inflight_steps` launches behind; what is
collected was copied at the launch's own end, so later steps cannot change it. One invariant: a ticket speaks of (slot,
slot_gen); whoever has left that seat since is not meant. Not here: who is in a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from gpu_engine.core.outputs import LaneOutcome, outcomes
from gpu_engine.core.running import RunningSequence, SlotWriter
from gpu_engine.step.program import StepProgram


@dataclass(frozen=True, slots=True)
class Lane:
    """One sequence of a launched step, as it sat then."""

    sequence: RunningSequence
    slot: int
    slot_gen: int

    @property
    def holds(self) -> bool:
        """The sequence still has that seat."""
        return (self.sequence.slot, self.sequence.slot_gen) == (self.slot, self.slot_gen)


def lanes_of(sequences: tuple[RunningSequence, ...]) -> tuple[Lane, ...]:
    """Return the lanes of a step that is launched now."""
    return tuple(Lane(sequence, sequence.slot, sequence.slot_gen) for sequence in sequences)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step."""

    lanes: tuple[Lane, ...]
    num_rows: int
    launched_s: float
    """`time.perf_counter()`."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a step did."""

    outcomes: list[LaneOutcome]
    step_ms: float
    waited_ms: float
    seq: int
    """Sequence under which it asked for its rows; 0: it asked for none."""


class StepRunner(Protocol):
    """Executes steps in the order of their launches. Used by the engine thread alone."""

    @property
    def max_inflight_steps(self) -> int:
        """Steps that may be in flight when the next is launched: 0, each is collected before the next; 1, overlap."""

    def launch(self, sequences: tuple[RunningSequence, ...]) -> Ticket:
        """Start a step; returns without knowing a token."""

    def collect(self, ticket: Ticket) -> Collected:
        """Wait for the oldest launched step and return what it did."""


class SynchronousRunner:
    """Runs the program at the launch, on the calling thread. With depth 1 it tells a step late, as a graph does."""

    def __init__(self, program: StepProgram, slot_writer: SlotWriter, max_inflight_steps: int = 0) -> None:
        self._program, self._slot_writer, self._max_inflight_steps = program, slot_writer, max_inflight_steps
        self._done: dict[int, Collected] = {}

    @property
    def max_inflight_steps(self) -> int:
        """As given."""
        return self._max_inflight_steps

    def launch(self, sequences: tuple[RunningSequence, ...]) -> Ticket:
        """Run the step and keep a copy of its results."""
        begin = time.perf_counter()
        batch = self._slot_writer.batch(sequences)
        self._program.run(batch)
        sync = self._program.sync
        ticket = Ticket(lanes_of(sequences), batch.num_rows, begin)
        results = outcomes(
            self._slot_writer.lane,
            len(sequences),
            guided=[sequence.guided for sequence in sequences],
            logprobs=[sequence.payload.request.sampling.logprobs for sequence in sequences],
        )
        times = ((time.perf_counter() - begin) * 1e3, sync.waited_ns / 1e6)
        self._done[id(ticket)] = Collected(results, *times, sync.seq)
        return ticket

    def collect(self, ticket: Ticket) -> Collected:
        """Return the copy."""
        return self._done.pop(id(ticket))
