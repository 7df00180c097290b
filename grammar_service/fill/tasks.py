"""Tasks of the work queues: a record by itself with its answer so far, several records of one sequence, a change,
a fork.

Invariant: a row whose kind is set in a `FillTask` is completely written to the mask memory.

Not responsible for: filling rows (see answers.py and batch.py), publishing late answers (see worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grammar_service.fill.matchers import Answer
from grammar_service.fill.work_queues import Task
from shared_mem.layout import RowKind, Stage
from shared_mem.records import Record, Records


class FillTask:
    """One record, its answer so far, and its place in the queue of its slot.

    Args:
        seq: sequence of the record.
        record: to be answered.
        fill: answers the task.
    """

    __slots__ = ("_fill", "answer", "late", "record", "seq", "slot", "slots")

    def __init__(self, seq: int, record: Record, fill: Callable[[FillTask], None]) -> None:
        count = len(record.drafts) + 1
        self.seq, self.record, self.slot = seq, record, record.slot
        self.slots: tuple[int, ...] = (record.slot,)
        self.answer = Answer([RowKind.DEFER] * count, [-1] * count)
        """Rows so far. The thread that fills writes it and sets a row's kind last, because other threads read it."""
        self.late = False
        """An incomplete answer was published. Guarded by the queues' lock."""
        self._fill = fill

    def __call__(self) -> tuple[()]:
        """Answer the record."""
        self._fill(self)
        return ()

    def replaces(self, other: Any) -> bool:
        """Return whether an older task of the slot need not be done before this one.

        True for a proposal, whose tokens this record commits again, and for a record that commits the same tokens.
        """
        if not isinstance(other, FillTask):
            return False
        if other.proposes:
            return True
        return not self.proposes and other._moves() == self._moves()

    @property
    def proposes(self) -> bool:
        """The record asks for jump-forward tokens and for no row."""
        return self.record.stage == Stage.PROPOSE

    def _moves(self) -> tuple[int, int, tuple[int, ...]]:
        return self.record.slot_gen, self.record.commit_pos, self.record.committed

    def set_row(self, row: int, kind: int, forced: int) -> None:
        """Set the answer of a row that is written."""
        self.answer.forced[row] = forced
        self.answer.kinds[row] = kind

    def __repr__(self) -> str:
        kinds = " ".join(RowKind(kind).name for kind in self.answer.kinds)
        return f"<FillTask {self.seq} of slot {self.slot}{' late' if self.late else ''}: {kinds}>"


class ChangeTask:
    """The bind or release of a slot's matcher. It has no answer."""

    __slots__ = ("_change", "slots")

    def __init__(self, slot: int, change: Callable[[], None]) -> None:
        self.slots: tuple[int, ...] = (slot,)
        self._change = change

    def __call__(self) -> tuple[()]:
        """Make the change."""
        self._change()
        return ()

    def replaces(self, other: Any) -> bool:
        """Return False: earlier records belong to the earlier matcher."""
        return False


class ForkTask:
    """A slot's matcher is copied for another slot. The task works on the first one; it has no answer.

    Args:
        source: its slot.
        copies: copies the matcher, and returns what installs the copy, as a task of the other slot.
    """

    __slots__ = ("_copies", "slots")

    def __init__(self, source: int, copies: Callable[[], Sequence[ChangeTask]]) -> None:
        self.slots: tuple[int, ...] = (source,)
        self._copies = copies

    def __call__(self) -> Sequence[Task]:
        """Copy the matcher; return the rest."""
        return self._copies()

    def replaces(self, other: Any) -> bool:
        """Return False: earlier records move the matcher that is copied."""
        return False


class BatchTask:
    """Records of one post and of different slots, which it holds all at once.

    Args:
        records: the records of the post.
        which: the numbers of the task's records.
        fill: answers the task.
    """

    __slots__ = (
        "_fill",
        "abandoned",
        "late",
        "late_after_publishing",
        "publishing",
        "records",
        "slots",
        "which",
    )

    def __init__(
        self,
        records: Records,
        which: list[int],
        fill: Callable[[BatchTask], Sequence[FillTask]],
    ) -> None:
        self.records, self.which = records, which
        self.slots: tuple[int, ...] = tuple([records.slots[i] for i in which])
        self.late = False
        """Answers without rows were published. This and the flags below are guarded by the queues' lock."""
        self.abandoned = False
        """The slots were taken away from the thread that works on the batch."""
        self.publishing = False
        """A part of the answers is being published."""
        self.late_after_publishing = False
        """The rest of the answers became late in the meantime."""
        self._fill = fill

    @property
    def seq(self) -> int:
        """Sequence of the records."""
        return self.records.seq

    def __call__(self) -> Sequence[Task]:
        """Answer the records; return a task for each record that the batch cannot answer."""
        return self._fill(self)

    def leave_out(self, slots: Sequence[int]) -> list[int]:
        """Take slots out of a batch that has not begun; return the numbers of their records."""
        taken = [i for i in self.which if self.records.slots[i] in slots]
        self.which = [i for i in self.which if i not in taken]
        self.slots = tuple([self.records.slots[i] for i in self.which])
        return taken

    def replaces(self, other: Any) -> bool:
        """Return False: a batch never waits in the queue of a slot."""
        return False

    def __repr__(self) -> str:
        return f"<BatchTask {self.seq} of {len(self.which)} slots{' late' if self.late else ''}>"
