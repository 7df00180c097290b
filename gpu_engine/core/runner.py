"""Launching steps and collecting their outcomes: the seam between the loop and the execution of a step.

The runner measures each step, and asks the draft budget how many drafts of each sequence the next one verifies.

A step is launched for running sequences and collected after up to `max_inflight_steps` later launches. Its results are
copied when it ends, so later steps cannot change them. Invariant: a launch never waits
for a step in flight; `collect` waits for its own step. Not responsible for: the choice of a step's sequences
(see scheduler.py), the content of a step (see step/program.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from gpu_engine.api.errors import InternalError, ProcessorFailed
from gpu_engine.core.draft_budget import DraftBudget, Plan, Proposal, Shape
from gpu_engine.core.running import RunningSequence, SlotWriter
from gpu_engine.core.scheduler import Chunk, GrammarState
from gpu_engine.step.direct import StepLauncher
from gpu_engine.step.handle import BeamLanes, StepHandle
from gpu_engine.step.outcomes import LaneOutcome, beam_outcomes, outcomes
from gpu_engine.step.processing.host import NOT_FINITE
from gpu_engine.step.sync import Sync
from kernels.row_kinds import FAILED
from shared_mem.errors import InvalidField

log = logging.getLogger(__name__)

LaunchedStep = StepHandle[RunningSequence]


class StepRunner(Protocol):
    """Executes steps in the order of their launches. Used only by the engine thread."""

    budget: DraftBudget
    """Chooses the drafts of each step."""

    @property
    def max_inflight_steps(self) -> int:
        """Steps that may be in flight when the next is launched: 0, each is collected before the next; 1, overlap."""

    def launch(
        self,
        sequences: tuple[RunningSequence, ...],
        chunks: tuple[Chunk[RunningSequence], ...] = (),
        beams: BeamLanes | None = None,
    ) -> LaunchedStep:
        """Start a step; returns without knowing a token. `chunks` of prompts share its forward, if the runner
        mixes them. `beams` says which of `sequences` are beams."""

    def collect(self, handle: LaunchedStep) -> None:
        """Wait for the oldest launched step and fill the handle with its outcomes."""


class LauncherRunner:
    """The `StepRunner` over a launcher, which runs steps at once or replays graphs.

    Args:
        launcher: runs the steps; captured already, if it captures.
        slot_writer: writes the slots of these steps.
        sync: the sync of these steps.
        budget: chooses the drafts of these steps.
        max_inflight_steps: 1 to launch a step before the last one is read, else 0.
    """

    def __init__(
        self,
        launcher: StepLauncher,
        slot_writer: SlotWriter,
        sync: Sync,
        budget: DraftBudget,
        max_inflight_steps: int = 0,
    ) -> None:
        self.launcher, self.budget = launcher, budget
        self._slot_writer, self._sync, self._max_inflight_steps = slot_writer, sync, max_inflight_steps
        self._in_flight: deque[tuple[LaunchedStep, Plan]] = deque()
        self._waited_ns = 0
        """The time that all collected steps waited, as `Sync.report` counts it."""
        self._collected_s = 0.0

    @property
    def max_inflight_steps(self) -> int:
        """The number that was given."""
        return self._max_inflight_steps

    def launch(
        self,
        sequences: tuple[RunningSequence, ...],
        chunks: tuple[Chunk[RunningSequence], ...] = (),
        beams: BeamLanes | None = None,
    ) -> LaunchedStep:
        """Start a step."""
        begun_s = time.perf_counter()
        for sequence in (*sequences, *(chunk.sequence for chunk in chunks)):
            if sequence.pages_written < len(sequence.pages):
                self._slot_writer.write_pages(sequence)
        guided = tuple(sequence.guided for sequence in sequences)
        logprobs = tuple(sequence.request.outputs.num_logprobs for sequence in sequences)
        exact = tuple(sequence.exact is not None for sequence in sequences)
        handle = StepHandle(sequences, guided, logprobs, exact if any(exact) else ())
        if processed := self._slot_writer.processed:
            lanes = tuple(processed.get(slot) for slot in handle.slots)
            handle.processed = lanes if any(lanes) else ()
        if adapted := self._slot_writer.adapted:
            handle.adapted = not adapted.isdisjoint(handle.slots)
        handle.chunks = tuple((chunk.sequence.slot, chunk.start, chunk.end) for chunk in chunks)
        handle.launched_s, handle.beams = begun_s, beams
        handle.late_lanes = tuple(b for b, s in enumerate(sequences) if s.grammar_state is GrammarState.OPENING)
        plan = self._plan(handle)
        self.launcher.launch(handle)
        self._in_flight.append((handle, plan))
        return handle

    def _plan(self, handle: LaunchedStep) -> Plan:
        """Choose the drafts of the step."""
        guided, launcher = handle.any_guided, self.launcher
        if launcher.max_drafts == 0:
            handle.draft_limits, handle.propose_rows = (0,) * len(handle.slots), 1
            return Plan((), handle.draft_limits, guided, proposes=False)
        drafts: Sequence[tuple[int, ...] | None] = launcher.drafts(handle.slots) or [None] * len(handle.slots)
        proposals = [
            Proposal(each.drafts, each.num_jump_forward if tokens else 0, tokens, launcher.max_drafts)
            for each, tokens in zip(handle.sequences, drafts, strict=True)
        ]
        shapes = launcher.shapes(len(handle.slots), guided=guided)
        plan = self.budget.choose(proposals, None if shapes is None else [Shape(*s) for s in shapes], guided=guided)
        handle.draft_limits = plan.limits
        handle.propose_rows = self.budget.rows_to_propose(plan, launcher.max_drafts + 1)
        return plan

    def collect(self, handle: LaunchedStep) -> None:
        """Wait for the oldest launched step. Raises when the device failed."""
        oldest, plan = self._in_flight.popleft()
        assert oldest is handle, "steps are collected in the order of their launches"
        outputs = self.launcher.read(handle)
        ended_s = handle.ended_s or time.perf_counter()
        # On a device a step begins when the step before it has ended.
        begun_s = handle.launched_s if handle.ended_s else max(handle.launched_s, self._collected_s)
        handle.step_ms, self._collected_s = (ended_s - begun_s) * 1e3, ended_s
        waited_ns, self._waited_ns = outputs.waited_ns - self._waited_ns, outputs.waited_ns
        if handle.any_guided:
            waited_ns += self._sync.waited_ns
        handle.waited_ms, handle.seq = waited_ns / 1e6, outputs.seq
        results = outcomes(
            outputs, len(handle.slots), guided=handle.guided, logprobs=handle.logprobs, exact=handle.exact
        )
        if handle.beams is not None:
            results = beam_outcomes(results, outputs, handle.beams.lanes)
        self.budget.observe(
            plan,
            [(outcome.token_ids, outcome.num_accepted) for outcome in results],
            rows=handle.forward_rows,
            # What rows of prompts, or logits processors, take says nothing of a step without them.
            verify_ms=0.0 if handle.chunks or handle.processed else handle.step_ms - handle.propose_ms,
            propose_ms=handle.propose_ms,
            proposed_rows=handle.propose_rows if handle.ended_s else 0,
        )
        if handle.processed:
            results = [_failed(handle, b, out) if out.blocked >= FAILED else out for b, out in enumerate(results)]
        handle.outcomes = self._refused(handle, results) if handle.any_guided else results

    def _refused(self, handle: LaunchedStep, results: list[LaneOutcome]) -> list[LaneOutcome]:
        """Give an error to the lanes whose record a native post refused: they will never get an answer."""
        problem = ""
        try:
            self._sync.check(handle.num_lanes)
        except InvalidField as error:
            problem = str(error)
        # A refused post has sequence number 0, even if another step's post succeeded. (A sequence that ended in an
        # earlier step requests nothing either, but has lost its slot.)
        hit = [
            guided and handle.holds(b) and out.deferred and handle.seq == 0
            for b, (guided, out) in enumerate(zip(handle.guided, results, strict=True))
        ]
        if not problem and not any(hit):
            return results
        log.error("a step's post was refused: %s", problem or "by an earlier callback")
        failed = InternalError("the engine's step posted an invalid record; see the server's log")
        lost = hit if any(hit) else list(handle.guided)
        return [out._replace(error=failed) if gone else out for out, gone in zip(results, lost, strict=True)]

    def __repr__(self) -> str:
        return f"<LauncherRunner in flight={len(self._in_flight)} of {self._max_inflight_steps} {self.launcher}>"


def _failed(handle: LaunchedStep, b: int, outcome: LaneOutcome) -> LaneOutcome:
    """Give an error to a lane whose next row is one for which a logits processor failed."""
    request, row = handle.processed[b], len(outcome.token_ids)
    assert request is not None, "only such lanes are processed"
    what = (handle.failures or {}).get((b, row))
    if what is None:  # a captured processor; what else it may do wrong ends the start of the server
        name = next(
            use.loaded.name for use in request.logits_processors if use.loaded.number == outcome.blocked - FAILED
        )
        what = f"{name} {NOT_FINITE}"
        log.error("logits processor %s", what)
    return outcome._replace(error=ProcessorFailed(f"logits_processors: {what}; see the server's log"))
