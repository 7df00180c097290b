"""State of every guided slot towards the grammar process: opening, open, deferred, paused, opened again.

A guided sequence without its mask rows leaves the decode batch but holds its slot and pages; no other sequence waits
for it. Invariant: a guided sequence decodes only while its matcher is open and no row of its last answer is still to
come, or in the step of its last chunk, which posts it after the forward. Only the engine thread calls this.

Not responsible for: the decode batch (see scheduler.py), the attribution of crashes (see
crash_attribution.py), connections and processes (see sidecar/).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from gpu_engine.api.errors import GrammarUnavailable, InternalError, LockstepError
from gpu_engine.api.ports import GrammarPort
from gpu_engine.api.stats import EngineStats
from gpu_engine.core import crash_attribution
from gpu_engine.core.running import RunningSequence, SlotWriter
from gpu_engine.core.scheduler import GrammarState, Scheduler
from gpu_engine.step.sync import Fork, Sync

log = logging.getLogger(__name__)

_MAX_EMPTY_ANSWERS = 4
"""After this many answers in a row that arrived in time and only defer, the matcher is rebuilt."""


class EndSequence(Protocol):
    """Ends a sequence."""

    def __call__(self, sequence: RunningSequence, *, error: LockstepError) -> None:
        """Release everything the sequence holds and send `error` to its client."""


class GrammarSlots:
    """The guided slots of one engine."""

    stall_s: float = 10.0
    """A sequence whose open matcher gives no row for this long ends with UNAVAILABLE."""

    def __init__(
        self,
        port: GrammarPort | None,
        scheduler: Scheduler[RunningSequence],
        slot_writer: SlotWriter,
        sync: Sync,
        stats: EngineStats,
        in_step: Callable[[RunningSequence], bool],
        end: EndSequence,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: `in_step` returns whether a step with the sequence is launched and not yet collected."""
        self._clock = clock
        self._port, self._scheduler, self._slot_writer, self._sync = port, scheduler, slot_writer, sync
        self._stats, self._in_step, self._end = stats, in_step, end
        self._attached = True
        self._silent = False
        self._forks: dict[int, Fork] = {}
        """By slot; see `post_forks`."""
        # Of the last end of a grammar process, until the next one is attached:
        self._waiting: list[RunningSequence] = []
        self._with_matcher: list[RunningSequence] = []
        self._blamed: list[RunningSequence] = []
        self._forgiven = False
        """The end that is reported next was caused from outside: the supervisor saw it before the link."""
        self.progress = 0
        """Counts up whenever a sequence gets rows, and when a crash is attributed to a sequence."""

    # -- one sequence ------------------------------------------------------------------------------------------------

    def open(self, sequence: RunningSequence) -> None:
        """Request a matcher at the committed tokens. Without a process, or in quarantine, the sequence waits for it."""
        now = self._attached and not crash_attribution.must_wait(sequence, self._scheduler.running)
        sequence.grammar_state = GrammarState.OPENING if now else GrammarState.LOST
        sequence.deferred, sequence.empty_answers, sequence.deferred_since_s = False, 0, 0.0
        self._forks.pop(sequence.slot, None)
        if not sequence.backtracking:
            self._sync.forget(sequence.slot)
        if not now or self._port is None:
            return
        crash_attribution.trial_started(sequence)
        sequence.bound = (sequence.slot, sequence.slot_gen)
        committed = tuple(sequence.answer)
        if sequence.backtracking:
            self._port.backtrack(
                sequence.slot,
                sequence.slot_gen,
                sequence.request,
                committed,
                first=sequence.num_sent,
                dead_texts=sequence.dead_texts,
            )
            return
        self._slot_writer.bind(sequence, drafts=crash_attribution.may_draft(sequence))
        self._port.open(sequence.slot, sequence.slot_gen, sequence.request, committed, dead_texts=sequence.dead_texts)

    def backtrack(self, sequence: RunningSequence) -> None:
        """Ask for a way back over the tokens that are held: no token is legal after them.

        The sequence stays out of the batch. A new grammar process is asked again.
        """
        sequence.backtracking = True
        self.open(sequence)

    def fork(self, pairs: Sequence[tuple[RunningSequence, RunningSequence]], num_committed: int) -> None:
        """Make the matcher of each target a copy of its source's, both (source, target) beams of one group.

        The copies have consumed `num_committed` tokens. A target whose source has no matcher at this moment gets its
        own from `open`, at all of its tokens, which its state already has.
        """
        for source, target in pairs:
            self._fork(source, target, num_committed)

    def begin_anew(self, sequence: RunningSequence) -> None:
        """Take the matcher back to the start of the answer, for the sequence as the new owner of its slot."""
        if self._fork(sequence, sequence, 0):
            self._slot_writer.bind(sequence, drafts=crash_attribution.may_draft(sequence))

    def _fork(self, source: RunningSequence, target: RunningSequence, num_committed: int) -> bool:
        """Have a matcher copied before the next step. False: the target opens its own."""
        before = target.bound
        if self._port is None or source.grammar_state not in (GrammarState.OPEN, GrammarState.SILENT):
            self.close(target)
            self.open(target)
            return False
        target.grammar_state = source.grammar_state
        target.deferred, target.empty_answers, target.deferred_since_s = False, 0, 0.0
        target.bound = (target.slot, target.slot_gen)
        self._port.forked(*target.bound, target.request, before)
        self._forks[target.slot] = Fork(target.slot, target.slot_gen, source.slot, num_committed)
        return True

    def post_forks(self) -> None:
        """Post the copies of matchers since the last step. They share a post, because the ring has room for few."""
        if self._forks:
            self._sync.fork(tuple(self._forks.values()))
            self._forks.clear()

    def close(self, sequence: RunningSequence) -> None:
        """Release the sequence's matcher, if one was requested."""
        if sequence.bound is not None and self._port is not None:
            self._port.close(*sequence.bound)
        sequence.bound = None

    def defer(self, sequence: RunningSequence, seq: int, *, advanced: bool) -> None:
        """Take a sequence whose rows were missing in a step out of the batch until they arrive.

        Args:
            seq: sequence number of the post that requested the rows.
            advanced: the step emitted tokens, with the rows that had arrived.
        """
        if sequence.early and sequence.grammar_state is GrammarState.OPENING:
            # The matcher was not there yet, and the answer is complete; or its first row is slow.
            sequence.deferred, sequence.deferred_seq, sequence.advanced = not advanced, seq, advanced
            if advanced:
                self._token_received(sequence)
            return
        sequence.telemetry.deferred_rows += 1
        self._stats.deferred_rows += 1
        if advanced:
            self._token_received(sequence)
        if sequence.grammar_state not in (GrammarState.OPEN, GrammarState.SILENT):
            return  # the step posted to a matcher that is gone: none of its rows will arrive
        sequence.deferred_since_s = self._clock() if advanced else sequence.deferred_since_s or self._clock()
        sequence.deferred_seq, sequence.advanced = seq, advanced
        sequence.deferred = not advanced
        if self._in_step(sequence):
            return  # the outcome of the step in flight decides
        num_rows = self._take_late_rows(sequence)
        sequence.empty_answers += num_rows == 0 and not advanced
        if sequence.empty_answers >= _MAX_EMPTY_ANSWERS:
            self._reopen(sequence)

    def _reopen(self, sequence: RunningSequence) -> None:
        """Have the matcher rebuilt at the committed tokens; the time since the first deferral goes on."""
        since_s = sequence.deferred_since_s
        self.open(sequence)
        sequence.deferred_since_s = since_s

    def rows_arrived(self, sequence: RunningSequence) -> None:
        """Note that the sequence's step had all the rows that it needed."""
        self._token_received(sequence)
        sequence.empty_answers, sequence.deferred_since_s, sequence.deferred = 0, 0.0, False

    def _token_received(self, sequence: RunningSequence) -> None:
        crash_attribution.token_received(sequence)
        self.progress += 1

    def poll(self) -> None:
        """Bring deferred sequences whose rows have arrived back, open the next trial, end sequences that stalled."""
        running = self._scheduler.running
        if self._attached:
            lost = [sequence for sequence in running if sequence.grammar_state is GrammarState.LOST]
            for sequence in sorted(lost, key=crash_attribution.trial_order):
                if not crash_attribution.must_wait(sequence, running):
                    self.open(sequence)
        for sequence in running:
            if self._is_stalled(sequence):
                error = GrammarUnavailable(f"the grammar process gave no rows for {self.stall_s:g} s")
                self._end(sequence, error=error)
            elif not sequence.deferred or self._in_step(sequence):
                continue
            elif self._take_late_rows(sequence) is None and self._is_unread(sequence):
                # The record was overwritten, and its tokens with it: the matcher would answer every repeated step
                # with a gap until it is rebuilt.
                self._reopen(sequence)

    def _is_stalled(self, sequence: RunningSequence) -> bool:
        since_s = sequence.deferred_since_s
        is_open = sequence.grammar_state is GrammarState.OPEN
        return is_open and since_s > 0 and self._clock() > since_s + self.stall_s

    def _is_unread(self, sequence: RunningSequence) -> bool:
        """Return whether the missing rows will never arrive, because the record was overwritten before it was read.

        False while the process is silent: it may still read the record.
        """
        return not self._silent and self._sync.unread(sequence.deferred_seq, sequence.slot, sequence.slot_gen)

    def _take_late_rows(self, sequence: RunningSequence) -> int | None:
        """Return how many missing rows arrived, or None while the answer is not complete: then it stays deferred."""
        num_rows = self._sync.late(sequence.deferred_seq, sequence.slot, sequence.slot_gen, advanced=sequence.advanced)
        sequence.deferred = num_rows is None
        return num_rows

    @property
    def any_deferred(self) -> bool:
        """A deferred sequence has to be polled."""
        return any(sequence.deferred for sequence in self._scheduler.running)

    # -- events of the grammar process -------------------------------------------------------------------------------

    def opened(
        self,
        slot: int,
        slot_gen: int,
        compile_ms: float,
        cache_hit: bool,
        backend: int,
        warnings: tuple[str, ...],
        *,
        verified: bool = False,
    ) -> None:
        """Let the sequence decode: its matcher is at its committed tokens. An event for an earlier owner is ignored."""
        sequence = self._scheduler.sequence(slot, slot_gen)
        if sequence is None or sequence.grammar_state is not GrammarState.OPENING:
            return
        sequence.grammar_state = GrammarState.SILENT if self._silent else GrammarState.OPEN
        if sequence.deferred:  # by the step that began before this message
            sequence.deferred_since_s = self._clock()
        telemetry = sequence.telemetry
        telemetry.compile_ms, telemetry.compile_cache_hit = compile_ms, cache_hit
        telemetry.backend, telemetry.warnings = backend, warnings
        sequence.verified = verified

    def process_silent(self) -> None:
        """Take sequences with an open matcher out of the batch: the process shows no life. Their matchers remain."""
        self._silent = True
        for sequence in self._scheduler.running:
            if sequence.grammar_state is GrammarState.OPEN:
                sequence.grammar_state = GrammarState.SILENT

    def process_alive(self) -> None:
        """Let the sequences go on with their matchers: the process shows life again."""
        self._silent = False
        for sequence in self._scheduler.running:
            if sequence.grammar_state is GrammarState.SILENT:
                sequence.grammar_state = GrammarState.OPEN
                sequence.deferred_since_s = sequence.deferred_since_s and self._clock()

    def process_lost(self, binding: Collection[tuple[int, int]] = ()) -> None:
        """Pause guided sequences: the process has ended, and their matchers with it. They hold their slots and pages.

        No step may be in flight: rows that it still waited for count. `binding`: the (slot, slot_gen) whose matchers
        the process was building.
        """
        self._attached = self._silent = False
        guided = [sequence for sequence in self._scheduler.running if sequence.guided]
        self._with_matcher = [
            sequence for sequence in guided if sequence.grammar_state in (GrammarState.OPEN, GrammarState.SILENT)
        ]
        awaiting_rows = [sequence for sequence in self._with_matcher if sequence.deferred_since_s > 0]
        self._waiting = [
            sequence
            for sequence in guided
            if sequence in awaiting_rows or (sequence.slot, sequence.slot_gen) in binding
        ]
        self._blamed = crash_attribution.process_ended(self._waiting, self._with_matcher)
        for sequence in guided:
            sequence.grammar_state, sequence.deferred = GrammarState.LOST, False
            sequence.early = False  # a crash is attributed by the rows that an open matcher owes
        if self._forgiven:
            self.forgive()

    def forgive(self) -> None:
        """Undo the counts of the last end, or of the next one if none is reported yet: it was caused from outside."""
        self._forgiven = self._attached
        crash_attribution.forgive(self._waiting, self._with_matcher)
        self._waiting, self._with_matcher, self._blamed = [], [], []

    def process_restored(self) -> None:
        """End the sequences that are blamed for the last end; open every other guided one at its committed tokens."""
        self._attached, self._silent = True, False
        blamed, self._blamed, self._waiting, self._with_matcher = self._blamed, [], [], []
        for sequence in blamed:
            if sequence.slot >= 0 and sequence in self._scheduler.running:
                self.progress += 1
                self._end_blamed(sequence)
        for sequence in sorted(self._scheduler.running, key=crash_attribution.trial_order):
            if sequence.guided:
                self.open(sequence)

    def _end_blamed(self, sequence: RunningSequence) -> None:
        count, request = sequence.crash_count, sequence.request
        problem = f"the grammar process died {count} times over this request, without a token in between"
        log.error("%s; the request ends", problem, extra={"request_id": request.request_id})
        cause = "its grammar, or the library that runs it, seems to be the cause"
        self._end(sequence, error=InternalError(f"{problem}; {cause}"))

    def __repr__(self) -> str:
        state = "silent" if self._silent else "attached" if self._attached else "lost"
        return f"<GrammarSlots {state} guided={sum(sequence.guided for sequence in self._scheduler.running)}>"
