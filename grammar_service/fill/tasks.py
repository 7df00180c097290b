"""Records on their way to answers: one by itself, with what stands of it so far, or several of one sequence.

Invariant: a row that is said to stand is written. Not here: who fills rows, and when they are published (worker); which
rows earlier answers have (standing_rows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grammar_service.backends.backend import ChainFiller
from grammar_service.fill.matchers import Answer
from grammar_service.fill.work_queues import Work
from shared_mem.grammar_end import Record
from shared_mem.layout import RowKind, Stage


class FillTask:
    """A record, its answer so far, and its place in the lane of its slot."""

    __slots__ = ("_ask", "answer", "lane", "lanes", "late", "record", "seq")

    def __init__(self, seq: int, record: Record, ask: Callable[[FillTask], None]) -> None:
        count = len(record.drafts) + 1
        self.seq, self.record, self.lane = seq, record, record.slot
        self.lanes: tuple[int, ...] = (record.slot,)
        self.answer = Answer([RowKind.DEFER] * count, [-1] * count)
        """Rows that stand. Written by the thread that fills; another one may read it: a kind is set last."""
        self.late = False
        """An answer was published, and not all of it. Guarded by the lanes' lock."""
        self._ask = ask

    def __call__(self) -> tuple[()]:
        """Have it answered."""
        self._ask(self)
        return ()

    def replaces(self, other: Any) -> bool:
        """Say whether `other` asks for the same rows, or what would have led to them, under an older sequence."""
        if not isinstance(other, FillTask) or (self.proposes and not other.proposes):
            return False
        return other._moves() == self._moves()

    @property
    def proposes(self) -> bool:
        """It asks for no row, but for what the grammar forces."""
        return self.record.stage == Stage.PROPOSE

    def _moves(self) -> tuple[int, int, tuple[int, ...]]:
        return self.record.slot_gen, self.record.commit_pos, self.record.committed

    def stands(self, row: int, kind: int, forced: int) -> None:
        """Note a row that is written."""
        self.answer.forced[row] = forced
        self.answer.kinds[row] = kind

    def __repr__(self) -> str:
        kinds = " ".join(RowKind(kind).name for kind in self.answer.kinds)
        return f"<Question {self.seq} of slot {self.lane}{' late' if self.late else ''}: {kinds}>"


class Change:
    """A bind or a release: work that nobody waits for."""

    __slots__ = ("_change", "lanes")

    def __init__(self, lane: int, change: Callable[[], None]) -> None:
        self.lanes: tuple[int, ...] = (lane,)
        self._change = change

    def __call__(self) -> tuple[()]:
        """Make the change."""
        self._change()
        return ()

    def replaces(self, other: Any) -> bool:
        """Everything before it is done."""
        return False


class Batch:
    """Records of one sequence, of different slots. Holds the lanes of all of them at once."""

    __slots__ = ("_answer", "abandoned", "lanes", "late", "owed", "records", "seq", "settled")

    def __init__(self, seq: int, records: list[Record], answer: Callable[[Batch], list[FillTask]]) -> None:
        self.seq, self.records = seq, records
        self.lanes: tuple[int, ...] = tuple(record.slot for record in records)
        self.late = self.abandoned = self.settled = self.owed = False
        """Answers were published without rows; its lanes were taken from it; a part of it is being published; it is to
        be told late behind that. All guarded by the lanes' lock."""
        self._answer = answer

    def __call__(self) -> Sequence[Work]:
        """Have it answered; what is left is to be answered one by one."""
        return self._answer(self)

    def replaces(self, other: Any) -> bool:
        """It waits behind nothing."""
        return False

    def __repr__(self) -> str:
        return f"<Batch {self.seq} of {len(self.records)} slots{' late' if self.late else ''}>"


def goes_together(filler: ChainFiller | None, record: Record) -> bool:
    """Say whether a backend answers such a record together with others."""
    if filler is None or record.stage == Stage.PROPOSE:
        return False
    return filler.follows_drafts or not record.drafts or record.need_rows == 1 << len(record.drafts)
