"""Where each guided slot stands with the grammar process: opened, waiting for late rows, paused, opened again.

A slot that has no rows leaves the batch and keeps its pages; whatever it waits for, nobody else does. One invariant: a
slot decodes only while its matcher stands and nothing of its last answer is still to come. Only the engine thread calls
in here. Not here: who is in the batch (scheduler.py), connections and processes (grammar_link.py, sidecar.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol

from gpu_engine.api.errors import GrammarUnavailable, InternalError, LockstepError
from gpu_engine.api.ports import GrammarPort
from gpu_engine.api.stats import EngineStats
from gpu_engine.core import crash_attribution as suspects
from gpu_engine.core.running import RunningSequence, SequenceState, SlotWriter
from gpu_engine.core.scheduler import GrammarState, Scheduler
from gpu_engine.step.sync import Sync

log = logging.getLogger(__name__)

_REFUSALS = 4
"""Answers in a row that only defer, and are whole: the matcher lost the thread and is bound again."""


class Ending(Protocol):
    """Ends a sequence."""

    def __call__(self, sequence: RunningSequence, *, error: LockstepError) -> None:
        """Free everything it holds and tell its client."""


class GrammarSlots:
    """The guided slots of one engine."""

    stall_s: float = 10.0
    """A slot without any row for so long ends with UNAVAILABLE, however often it was opened again."""

    def __init__(
        self,
        port: GrammarPort | None,
        scheduler: Scheduler[SequenceState],
        slot_writer: SlotWriter,
        sync: Sync,
        stats: EngineStats,
        flies: Callable[[RunningSequence], bool],
        end: Ending,
    ) -> None:
        """Args: `flies` says whether a step of the seat is launched and not collected."""
        self._port, self._scheduler, self._slot_writer, self._sync = port, scheduler, slot_writer, sync
        self._stats, self._in_step, self._end = stats, flies, end
        self._up = True
        self._silent = False
        self._awaited: list[RunningSequence] = []
        self._bound: list[RunningSequence] = []
        self._found: RunningSequence | None = None
        self.progress = 0
        """Counts up when a grammar process is of use: it gives a sequence rows, or its end tells whose fault it is."""

    # -- one slot ----------------------------------------------------------------------------------------------------

    def open(self, sequence: RunningSequence) -> None:
        """Ask for a matcher that stands behind the tokens emitted so far; without a sidecar, or its turn, it waits."""
        now = self._up and not suspects.must_wait(sequence, self._scheduler.running)
        sequence.grammar_state = GrammarState.OPENING if now else GrammarState.LOST
        sequence.deferred, sequence.payload.refusals, sequence.payload.deferred_s = False, 0, 0.0
        self._sync.forget(sequence.slot)
        if now and self._port is not None:
            suspects.opened(sequence)
            self._slot_writer.bind(sequence, drafts=suspects.drafts(sequence))
            sequence.payload.bound = (sequence.slot, sequence.slot_gen)
            self._port.open(sequence.slot, sequence.slot_gen, sequence.payload.request, tuple(sequence.payload.answer))

    def close(self, sequence: RunningSequence) -> None:
        """Have the seat's matcher dropped, if one was asked for."""
        if sequence.payload.bound is not None and self._port is not None:
            self._port.close(*sequence.payload.bound)
        sequence.payload.bound = None

    def defer(self, sequence: RunningSequence, seq: int, *, moved: bool) -> None:
        """A slot without its rows leaves the batch until they are there, so that it holds up nobody."""
        notes = sequence.payload
        notes.request.telemetry.deferred_rows += 1
        self._stats.deferred_rows += 1
        if moved:
            self._gained(sequence)
        if sequence.grammar_state not in (GrammarState.OPEN, GrammarState.SILENT):
            return  # the step asked a matcher that is gone: no row of it will come
        notes.deferred_s = time.monotonic() if moved else notes.deferred_s or time.monotonic()
        notes.deferred_seq, notes.moved = seq, moved
        sequence.deferred = not moved
        if self._in_step(sequence):
            return  # the step in flight tells
        came = self._late(sequence)
        notes.refusals += came == 0 and not moved
        if notes.refusals >= _REFUSALS:
            self._open_again(sequence)

    def _open_again(self, sequence: RunningSequence) -> None:
        """The matcher lost the thread: have it made anew, at the committed tokens. The slot has waited all along."""
        since_s = sequence.payload.deferred_s
        self.open(sequence)
        sequence.payload.deferred_s = since_s

    def served(self, sequence: RunningSequence) -> None:
        """All rows that the seat's step needed were there."""
        self._gained(sequence)
        sequence.payload.refusals, sequence.payload.deferred_s, sequence.deferred = 0, 0.0, False

    def _gained(self, sequence: RunningSequence) -> None:
        suspects.gained(sequence)
        self.progress += 1

    def look(self) -> None:
        """Let slots whose late rows have come back into the batch, and open the next suspect; end who waits in vain."""
        running = self._scheduler.running
        waiting = [sequence for sequence in running if sequence.grammar_state is GrammarState.LOST] if self._up else []
        for sequence in sorted(waiting, key=suspects.turn):
            if not suspects.must_wait(sequence, running):
                self.open(sequence)
        for sequence in running:
            since_s = sequence.payload.deferred_s
            if sequence.grammar_state is GrammarState.OPEN and since_s and time.monotonic() > since_s + self.stall_s:
                self._end(
                    sequence, error=GrammarUnavailable(f"the grammar process gave no rows for {self.stall_s:g} s")
                )
            elif (
                sequence.deferred
                and not self._in_step(sequence)
                and self._late(sequence) is None
                and self._is_unread(sequence)
            ):
                # Its tokens went with the record: repeated steps would find a gap until the matcher is made anew.
                self._open_again(sequence)

    def _is_unread(self, sequence: RunningSequence) -> bool:
        """What a parked slot waits for will never come; a silent process may be asked again when it is heard."""
        return not self._silent and self._sync.unread(sequence.payload.deferred_seq, sequence.slot, sequence.slot_gen)

    def _late(self, sequence: RunningSequence) -> int | None:
        """Look for the rows that a slot waits for; it is parked until all of them are there, or will never be."""
        notes = sequence.payload
        came = self._sync.late(notes.deferred_seq, sequence.slot, sequence.slot_gen, moved=notes.moved)
        sequence.deferred = came is None
        return came

    @property
    def any_deferred(self) -> bool:
        """Some slot waits for rows that came too late."""
        return any(sequence.deferred for sequence in self._scheduler.running)

    # -- news of the grammar process ---------------------------------------------------------------------------------

    def opened(
        self, slot: int, slot_gen: int, compile_ms: float, cache_hit: bool, backend: int, warnings: tuple[str, ...]
    ) -> None:
        """The slot's matcher stands; news of an owner that is gone is ignored."""
        sequence = self._scheduler.sequence(slot, slot_gen)
        if sequence is None or sequence.grammar_state is not GrammarState.OPENING:
            return
        sequence.grammar_state = GrammarState.SILENT if self._silent else GrammarState.OPEN
        telemetry = sequence.payload.request.telemetry
        telemetry.compile_ms, telemetry.compile_cache_hit = compile_ms, cache_hit
        telemetry.backend, telemetry.warnings = backend, warnings

    def silent(self) -> None:
        """It shows no life: slots that decode leave the batch. Their matchers may be as good as ever."""
        self._silent = True
        for sequence in self._scheduler.running:
            if sequence.grammar_state is GrammarState.OPEN:
                sequence.grammar_state = GrammarState.SILENT

    def heard(self) -> None:
        """It lives: they go on where they stand, and nothing is opened again."""
        self._silent = False
        for sequence in self._scheduler.running:
            if sequence.grammar_state is GrammarState.SILENT:
                sequence.grammar_state = GrammarState.OPEN
                sequence.payload.deferred_s = sequence.payload.deferred_s and time.monotonic()

    def lost(self, binding: Collection[tuple[int, int]] = ()) -> None:
        """It is gone: guided slots leave the batch and keep their pages. `binding`: whose matchers it was making.

        No step may be in flight: what it still waited for counts.
        """
        self._up = self._silent = False
        guided = [sequence for sequence in self._scheduler.running if sequence.guided]
        self._awaited = [
            sequence for sequence in guided if self._served(sequence) or (sequence.slot, sequence.slot_gen) in binding
        ]
        self._bound = [
            sequence for sequence in guided if sequence.grammar_state in (GrammarState.OPEN, GrammarState.SILENT)
        ]
        self._found = suspects.died(self._awaited, self._bound)
        for sequence in guided:
            sequence.grammar_state, sequence.deferred = GrammarState.LOST, False

    def pardoned(self) -> None:
        """Somebody outside ended it: none of the guided sequences is to blame."""
        suspects.pardon(self._awaited, self._bound)
        self._awaited, self._bound, self._found = [], [], None

    @staticmethod
    def _served(sequence: RunningSequence) -> bool:
        """Its matcher was asked for rows that never came. A grammar at fault always is; of others few, by chance."""
        return sequence.grammar_state in (GrammarState.OPEN, GrammarState.SILENT) and sequence.payload.deferred_s > 0

    def _end_found(self, sequence: RunningSequence) -> None:
        problem = (
            f"the grammar process died {sequence.payload.strikes} times over this request, without a token in between"
        )
        log.error("%s; the request ends", problem, extra={"request_id": sequence.payload.request.request_id})
        self._end(
            sequence, error=InternalError(f"{problem}; its grammar, or the library behind it, seems to be the cause")
        )

    def restored(self) -> None:
        """Open every guided slot again, at its committed tokens; suspects one by one."""
        self._up, self._silent = True, False
        found, self._found, self._awaited, self._bound = self._found, None, [], []
        if found is not None and found.slot >= 0 and found in self._scheduler.running:
            self.progress += 1
            self._end_found(found)
        for sequence in sorted(self._scheduler.running, key=suspects.turn):
            if sequence.guided:
                self.open(sequence)

    def __repr__(self) -> str:
        state = "silent" if self._silent else "up" if self._up else "lost"
        return f"<Guides {state} slots={sum(sequence.guided for sequence in self._scheduler.running)}>"
