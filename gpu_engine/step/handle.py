"""A launched step: its slots, the place of its results, and its outcomes.

Invariant: a handle names (slot, slot_gen) pairs of the launch. `holds` says whether a
sequence still has its slot; readers skip the others. Not responsible for: launching (see direct.py and
device/graphs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from gpu_engine.api.request import Request
from gpu_engine.step.outcomes import LaneOutcome
from kernels.logprobs import Edit


class SlotHolder(Protocol):
    """The part of a sequence that a step uses."""

    @property
    def slot(self) -> int:
        """-1 without a slot."""

    @property
    def slot_gen(self) -> int:
        """Counts the owners of the slot."""


Holder = TypeVar("Holder", bound=SlotHolder)


@dataclass(frozen=True, slots=True)
class BeamLanes:
    """The lanes of a step that are beams."""

    lanes: tuple[int, ...]
    edits: tuple[tuple[Edit, ...], ...]
    """For each of `lanes`: what bans, biases and penalties make of its log-probabilities."""


@dataclass(slots=True, eq=False)
class StepHandle(Generic[Holder]):
    """One step, from its launch to its results. Lane b belongs to `sequences[b]`."""

    sequences: tuple[Holder, ...]
    guided: tuple[bool, ...]
    """The lane waits for mask rows."""
    logprobs: tuple[int | None, ...] = ()
    """Log-probabilities that each lane wants; empty: none wants any."""
    exact: tuple[bool, ...] = ()
    """The lane returns masses with its tokens; empty: none does."""
    draft_limits: tuple[int, ...] = ()
    """The most drafts that the step verifies, for each lane; empty: as many as the lanes have."""
    propose_rows: int = 0
    """1: nothing is proposed for the next step. Else 1 + the most drafts of a lane that a drafting network computes;
    0: as many as it may. A captured step has its own number; more than 1 asks for one that proposes."""
    chunks: tuple[tuple[int, int, int], ...] = ()
    """(slot, start, end) of prompts that share the forward."""
    late_lanes: tuple[int, ...] = ()
    """Lanes that are posted after the forward, because their matchers were being opened at the launch."""
    processed: tuple[Request | None, ...] = ()
    """The requests of the lanes with logits processors; empty: no lane has any."""
    adapted: bool = False
    """Some lane has a LoRA adapter."""
    beams: BeamLanes | None = None
    """Lanes that give candidates in place of tokens, and do not advance."""
    slots: tuple[int, ...] = field(init=False)
    slot_gens: tuple[int, ...] = field(init=False)

    num_lanes: int = 0
    """B of the step, padding included. Writer of this and the next seven: the launch."""
    num_rows: int = 0
    """P of the step."""
    forward_rows: int = 0
    """Rows of the batch in the forward, its padding included; those of prompts, and padding after them, are not."""
    propose_ms: float = 0.0
    """Time of proposing at the end of a step that ran at once."""
    entry: int = -1
    """Where the output ring has its results."""
    launched_s: float = 0.0
    """`time.perf_counter()` at the launch."""
    ended_s: float = 0.0
    """The same at the end of a step that ran at once; 0: the step ends when its results are read."""
    failures: dict[tuple[int, int], str] | None = None
    """By lane and row, what logits processors did wrong that the host called; None: it called none."""

    outcomes: list[LaneOutcome] = field(default_factory=list)
    """One a lane. Writer of this and the rest: the runner, when it collects the step."""
    step_ms: float = 0.0
    waited_ms: float = 0.0
    """Time that the step waited for mask rows."""
    seq: int = 0
    """Sequence number of the step's verify post; 0: it requested no row."""

    def __post_init__(self) -> None:
        self.slots = tuple(sequence.slot for sequence in self.sequences)
        self.slot_gens = tuple(sequence.slot_gen for sequence in self.sequences)

    def holds(self, b: int) -> bool:
        """Return whether the sequence of lane b still has the slot that it had at the launch."""
        sequence = self.sequences[b]
        return sequence.slot == self.slots[b] and sequence.slot_gen == self.slot_gens[b]

    @property
    def prompt_tokens(self) -> int:
        """Rows of the forward that prompts have."""
        return sum(end - start for _, start, end in self.chunks)

    @property
    def any_guided(self) -> bool:
        """Some lane waits for mask rows."""
        return any(self.guided)

    @property
    def wants_logprobs(self) -> bool:
        """Some lane wants log-probabilities, or is a beam, whose candidates have their place."""
        return self.beams is not None or any(count is not None for count in self.logprobs)

    @property
    def wants_masses(self) -> bool:
        """Some lane returns masses."""
        return any(self.exact)
