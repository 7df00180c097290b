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
from gpu_engine.core import crash_attribution as suspects
from gpu_engine.core.running import Running, Seat, Seating
from gpu_engine.core.scheduler import Guide, Scheduler
from gpu_engine.ops.stats import EngineStats
from gpu_engine.step.sync import Sync

log = logging.getLogger(__name__)

_REFUSALS = 4
"""Answers in a row that only defer, and are whole: the matcher lost the thread and is bound again."""


class Ending(Protocol):
    """Ends a sequence."""

    def __call__(self, seat: Seat, *, error: LockstepError) -> None:
        """Free everything it holds and tell its client."""


class Guides:
    """The guided slots of one engine."""

    stall_s: float = 10.0
    """A slot without any row for so long ends with UNAVAILABLE, however often it was opened again."""

    def __init__(
        self,
        port: GrammarPort | None,
        scheduler: Scheduler[Running],
        seating: Seating,
        sync: Sync,
        stats: EngineStats,
        flies: Callable[[Seat], bool],
        end: Ending,
    ) -> None:
        """Args: `flies` says whether a step of the seat is launched and not collected."""
        self._port, self._scheduler, self._seating, self._sync = port, scheduler, seating, sync
        self._stats, self._flies, self._end = stats, flies, end
        self._up = True
        self._silent = False
        self._owed: list[Seat] = []
        self._stood: list[Seat] = []
        self._found: Seat | None = None
        self.progress = 0
        """Counts up when a grammar process is of use: it gives a sequence rows, or its end tells whose fault it is."""

    # -- one slot ----------------------------------------------------------------------------------------------------

    def open(self, seat: Seat) -> None:
        """Ask for a matcher that stands behind the tokens emitted so far; without a sidecar, or its turn, it waits."""
        now = self._up and not suspects.must_wait(seat, self._scheduler.seated)
        seat.guide = Guide.OPENING if now else Guide.LOST
        seat.parked, seat.payload.refusals, seat.payload.deferred_s = False, 0, 0.0
        self._sync.forget(seat.slot)
        if now and self._port is not None:
            suspects.opened(seat)
            self._seating.bind(seat, drafts=suspects.drafts(seat))
            seat.payload.bound = (seat.slot, seat.slot_gen)
            self._port.open(seat.slot, seat.slot_gen, seat.payload.request, tuple(seat.payload.answer))

    def close(self, seat: Seat) -> None:
        """Have the seat's matcher dropped, if one was asked for."""
        if seat.payload.bound is not None and self._port is not None:
            self._port.close(*seat.payload.bound)
        seat.payload.bound = None

    def defer(self, seat: Seat, seq: int, *, moved: bool) -> None:
        """A slot without its rows leaves the batch until they are there, so that it holds up nobody."""
        notes = seat.payload
        notes.request.telemetry.deferred_rows += 1
        self._stats.deferred_rows += 1
        if moved:
            self._gained(seat)
        if seat.guide not in (Guide.OPEN, Guide.SILENT):
            return  # the step asked a matcher that is gone: no row of it will come
        notes.deferred_s = time.monotonic() if moved else notes.deferred_s or time.monotonic()
        notes.deferred_seq, notes.moved = seq, moved
        seat.parked = not moved
        if self._flies(seat):
            return  # the step in flight tells
        came = self._late(seat)
        notes.refusals += came == 0 and not moved
        if notes.refusals >= _REFUSALS:
            self._open_again(seat)

    def _open_again(self, seat: Seat) -> None:
        """The matcher lost the thread: have it made anew, at the committed tokens. The slot has waited all along."""
        since_s = seat.payload.deferred_s
        self.open(seat)
        seat.payload.deferred_s = since_s

    def served(self, seat: Seat) -> None:
        """All rows that the seat's step needed were there."""
        self._gained(seat)
        seat.payload.refusals, seat.payload.deferred_s, seat.parked = 0, 0.0, False

    def _gained(self, seat: Seat) -> None:
        suspects.gained(seat)
        self.progress += 1

    def look(self) -> None:
        """Let slots whose late rows have come back into the batch, and open the next suspect; end who waits in vain."""
        seated = self._scheduler.seated
        waiting = [seat for seat in seated if seat.guide is Guide.LOST] if self._up else []
        for seat in sorted(waiting, key=suspects.turn):
            if not suspects.must_wait(seat, seated):
                self.open(seat)
        for seat in seated:
            since_s = seat.payload.deferred_s
            if seat.guide is Guide.OPEN and since_s and time.monotonic() > since_s + self.stall_s:
                self._end(seat, error=GrammarUnavailable(f"the grammar process gave no rows for {self.stall_s:g} s"))
            elif seat.parked and not self._flies(seat) and self._late(seat) is None and self._is_unread(seat):
                # Its tokens went with the record: repeated steps would find a gap until the matcher is made anew.
                self._open_again(seat)

    def _is_unread(self, seat: Seat) -> bool:
        """What a parked slot waits for will never come; a silent process may be asked again when it is heard."""
        return not self._silent and self._sync.unread(seat.payload.deferred_seq, seat.slot, seat.slot_gen)

    def _late(self, seat: Seat) -> int | None:
        """Look for the rows that a slot waits for; it is parked until all of them are there, or will never be."""
        notes = seat.payload
        came = self._sync.late(notes.deferred_seq, seat.slot, seat.slot_gen, moved=notes.moved)
        seat.parked = came is None
        return came

    @property
    def any_parked(self) -> bool:
        """Some slot waits for rows that came too late."""
        return any(seat.parked for seat in self._scheduler.seated)

    # -- news of the grammar process ---------------------------------------------------------------------------------

    def opened(
        self, slot: int, slot_gen: int, compile_ms: float, cache_hit: bool, backend: int, warnings: tuple[str, ...]
    ) -> None:
        """The slot's matcher stands; news of an owner that is gone is ignored."""
        seat = self._scheduler.seat(slot, slot_gen)
        if seat is None or seat.guide is not Guide.OPENING:
            return
        seat.guide = Guide.SILENT if self._silent else Guide.OPEN
        telemetry = seat.payload.request.telemetry
        telemetry.compile_ms, telemetry.compile_cache_hit = compile_ms, cache_hit
        telemetry.backend, telemetry.warnings = backend, warnings

    def silent(self) -> None:
        """It shows no life: slots that decode leave the batch. Their matchers may be as good as ever."""
        self._silent = True
        for seat in self._scheduler.seated:
            if seat.guide is Guide.OPEN:
                seat.guide = Guide.SILENT

    def heard(self) -> None:
        """It lives: they go on where they stand, and nothing is opened again."""
        self._silent = False
        for seat in self._scheduler.seated:
            if seat.guide is Guide.SILENT:
                seat.guide = Guide.OPEN
                seat.payload.deferred_s = seat.payload.deferred_s and time.monotonic()

    def lost(self, binding: Collection[tuple[int, int]] = ()) -> None:
        """It is gone: guided slots leave the batch and keep their pages. `binding`: whose matchers it was making.

        No step may be in flight: what it still waited for counts.
        """
        self._up = self._silent = False
        guided = [seat for seat in self._scheduler.seated if seat.guided]
        self._owed = [seat for seat in guided if self._served(seat) or (seat.slot, seat.slot_gen) in binding]
        self._stood = [seat for seat in guided if seat.guide in (Guide.OPEN, Guide.SILENT)]
        self._found = suspects.died(self._owed, self._stood)
        for seat in guided:
            seat.guide, seat.parked = Guide.LOST, False

    def pardoned(self) -> None:
        """Somebody outside ended it: none of the guided sequences is to blame."""
        suspects.pardon(self._owed, self._stood)
        self._owed, self._stood, self._found = [], [], None

    @staticmethod
    def _served(seat: Seat) -> bool:
        """Its matcher was asked for rows that never came. A grammar at fault always is; of others few, by chance."""
        return seat.guide in (Guide.OPEN, Guide.SILENT) and seat.payload.deferred_s > 0

    def _end_found(self, seat: Seat) -> None:
        problem = f"the grammar process died {seat.payload.strikes} times over this request, without a token in between"
        log.error("%s; the request ends", problem, extra={"request_id": seat.payload.request.request_id})
        self._end(seat, error=InternalError(f"{problem}; its grammar, or the library behind it, seems to be the cause"))

    def restored(self) -> None:
        """Open every guided slot again, at its committed tokens; suspects one by one."""
        self._up, self._silent = True, False
        found, self._found, self._owed, self._stood = self._found, None, [], []
        if found is not None and found.slot >= 0 and found in self._scheduler.seated:
            self.progress += 1
            self._end_found(found)
        for seat in sorted(self._scheduler.seated, key=suspects.turn):
            if seat.guided:
                self.open(seat)

    def __repr__(self) -> str:
        state = "silent" if self._silent else "up" if self._up else "lost"
        return f"<Guides {state} slots={sum(seat.guided for seat in self._scheduler.seated)}>"
