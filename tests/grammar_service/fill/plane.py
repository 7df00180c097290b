"""Both ends of a segment: an engine's calls, and a worker of the grammar process with toy matchers.

Not responsible for: the toy matchers themselves (see toy.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from grammar_service.backends.backend import Rows
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.fill.worker import Worker
from service_runtime.threads import OS_THREADS, Threads
from shared_mem.channel import AwaitResult, EngineEnd
from shared_mem.layout import Stage
from shared_mem.segment import Segment
from tests.grammar_service.toy import ToyFiller, ToyMatcher, Watched, tokens_in

TEXTS = [(1, 2, 3, 4), (1, 2, 5), (1, 6, 7, 8), (2,)]
PATIENCE_S = 120.0
"""Bound on waits that only a failing test reaches."""


def fresh() -> ToyMatcher:
    return ToyMatcher(TEXTS)


def legal_after(said: Iterable[int]) -> set[int]:
    matcher = fresh()
    assert all(matcher.accept(token) for token in said)
    return matcher.legal()


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


class GatedMatcher(ToyMatcher):
    """Works on the row after `at` tokens, or on every row, once the gate is open; records every row that it fills."""

    def __init__(self, at: int | None = None, filler: ToyFiller | None = None) -> None:
        super().__init__(TEXTS)
        self.at, self.gate, self.begun = at, threading.Event(), threading.Event()
        self.filled: list[tuple[int, ...]] = []
        if filler:
            self.filler = filler

    def again(self) -> GatedMatcher:
        """Return a new matcher with the same gate, as a slot that is bound anew has it."""
        made = GatedMatcher(self.at, getattr(self, "filler", None))
        made.gate, made.begun = self.gate, self.begun
        return made

    def fill(self, rows: Rows, index: int) -> None:
        if self.at in (None, len(self.taken)):
            self.begun.set()
            assert self.gate.wait(10 * PATIENCE_S)
        self.filled.append(tuple(self.taken))
        super().fill(rows, index)


class Plane:
    """An engine's end and a worker after it. `late`: an answer may be late, by the deadline of the worker."""

    def __init__(
        self,
        segment: Segment,
        *,
        threads: int = 1,
        spin_s: float = 0.0,
        late: bool = False,
        system: Threads = OS_THREADS,
    ) -> None:
        self.engine = EngineEnd(segment)
        self._end = Watched(Segment.attach(os.dup(segment.fileno())))
        self._end.hurries = late
        self.worker = Worker(self._end, threads=threads, spin_s=spin_s, os=system)

    def may_be_late(self) -> None:
        """Find the leader overdue from here on."""
        self._end.hurries = True

    def bind(
        self, slot: int, matcher: Callable[[], ToyMatcher] = fresh, committed: Sequence[int] = (), *, gen: int = 1
    ) -> None:
        self.worker.bind(slot, SlotMatcher.bind(gen, matcher, committed))

    def post(
        self,
        slots: Sequence[int],
        at: int,
        committed: Sequence[int],
        drafts: Sequence[int] = (),
        *,
        gen: int = 1,
        need: int = 0xFFFFFFFF,
        stage: Stage = Stage.VERIFY,
    ) -> int:
        """Post the same record for each slot; return its sequence."""
        arrays = self.engine.batch_arrays(len(slots))
        arrays.slots[:], arrays.slot_gens[:], arrays.commit_pos[:] = slots, gen, at
        arrays.n_commit[:], arrays.n_draft[:], arrays.need_rows[:] = len(committed), len(drafts), need
        arrays.tokens[:, : len(committed) + len(drafts)] = [*committed, *drafts]
        return self.engine.post_batch(arrays, stage=stage)

    def propose(self, slots: Sequence[int], at: int, committed: Sequence[int], *, gen: int = 1) -> int:
        """Ask for as many jump-forward tokens as there are rows."""
        return self.post(slots, at, committed, gen=gen, need=7, stage=Stage.PROPOSE)

    def first(self, seq: int, slots: Sequence[int], *, gen: int = 1, timeout_s: float = PATIENCE_S) -> AwaitResult:
        """Return the first answer, parts of which may be late."""
        return self.engine.await_rows(seq, slots, [gen] * len(slots), timeout_s=timeout_s)

    def whole(self, seq: int, slots: Sequence[int], *, gen: int = 1) -> list[list[int]]:
        """Return the kinds of each slot once the answer is complete."""
        until(lambda: not self.first(seq, slots, gen=gen).num_late)
        kinds: list[list[int]] = self.first(seq, slots, gen=gen, timeout_s=0).kinds.tolist()
        return kinds

    def ask(
        self, slot: int, at: int, committed: Sequence[int], drafts: Sequence[int] = (), *, gen: int = 1
    ) -> list[int]:
        (kinds,) = self.whole(self.post([slot], at, committed, drafts, gen=gen), [slot], gen=gen)
        return kinds

    def row(self, seq: int, slot: int, row: int = 0) -> set[int]:
        """Return the tokens of a mask row."""
        return tokens_in(self.engine.mask_rows(seq)[slot, row, :3])
