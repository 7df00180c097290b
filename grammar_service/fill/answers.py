"""Answers one record at a time: the slot's matcher moves, rows are filled one by one, the answer is published.

Invariant: the calling thread holds the slot, so one thread at a time touches its matcher and mask rows. A row enters
the task's answer only after it is written. When the answer is late, each further row is added to the published answer.

Not responsible for: when an answer is late (see worker.py), records of many slots at once (see batch.py), the moves of
a matcher (see matchers.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from grammar_service.backends.backend import Rows
from grammar_service.fill.channel import Channel
from grammar_service.fill.counters import Counters
from grammar_service.fill.matchers import Answer, MatcherTable
from grammar_service.fill.tasks import FillTask
from grammar_service.fill.work_queues import WorkQueues
from shared_mem.layout import RowKind
from shared_mem.records import Record

logger = logging.getLogger(__name__)


class RecordAnswerer:
    """Answers `FillTask`s, on any number of threads. Each thread holds the slot of its task.

    Args:
        channel: receives mask rows and answers.
        table: the worker's matchers.
        counters: the worker's counters.
        queues: the work queues, whose lock guards the publication of a task's answer.
        now_ns: the clock that measures fills.
    """

    def __init__(
        self,
        channel: Channel,
        table: MatcherTable,
        counters: Counters,
        queues: WorkQueues,
        now_ns: Callable[[], int],
    ) -> None:
        layout = channel.layout
        self._channel, self._table, self._counters, self._queues = channel, table, counters, queues
        self._num_rows, self._now_ns = layout.num_rows, now_ns
        self._rows = tuple(Rows(channel.mask_rows(i).reshape(layout.num_slots * layout.num_rows, -1)) for i in (0, 1))

    def answer(self, task: FillTask) -> None:
        """Answer a task and count it."""
        if task.proposes:
            self._propose(task)
            return
        begun = self._now_ns()
        record, slot = task.record, self._table.slots.get(task.slot)
        # A newer record has replaced this one: the matcher moves, but no row of it is needed any more.
        needed = 0 if self._queues.superseded(task.slot) else record.need_rows
        answer = self._fill(task, record._replace(need_rows=needed))
        for row, kind in enumerate(answer.kinds):
            task.set_row(row, kind, answer.forced[row])
        with self._queues.lock:
            self._publish(task)
        took = self._now_ns() - begun
        if slot is not None:
            slot.last_fill_ns = took
        self._counters.took(record.slot, took)
        for kind in task.answer.kinds:
            self._counters.tallies[record.slot, kind] += 1
        self._channel.heartbeat()

    def _propose(self, task: FillTask) -> None:
        """Answer with jump-forward tokens, or with nothing if the proposal is stale.

        A newer sequence shows that the engine has stopped waiting, because it posts and waits in program order. The
        proposal is then answered without work, so that the records after it come sooner; the next record of the slot
        commits the same tokens again.
        """
        if self._queues.superseded(task.slot) or self._channel.newest_seq() > task.seq:
            self._counters.dropped_proposals += 1
        else:
            task.answer = self._fill(task, task.record)
            self._counters.proposed_tokens += task.answer.kinds.count(RowKind.FORCED)
        with self._queues.lock:
            self._publish(task)
        self._channel.heartbeat()

    def _publish(self, task: FillTask) -> None:
        seq, slot, answer = task.seq, task.slot, task.answer
        if task.late:
            self._channel.add_rows(seq, slot, *answer, late=False)
        else:
            self._channel.publish(seq, slot, task.record.slot_gen, *answer)
        self._counters.records += 1

    def _fill(self, task: FillTask, record: Record) -> Answer:
        def on_row(row: int, kind: RowKind, forced: int) -> bool:
            task.set_row(row, kind, forced)
            self._counters.filled_rows += 1
            if task.late:
                self._counters.late_rows += 1
                with self._queues.lock:
                    self._channel.add_rows(task.seq, task.slot, *task.answer, late=True)
            # The engine does not wait for the remaining rows once it has posted a newer record of the slot.
            return not self._queues.superseded(task.slot)

        try:
            return self._table.answer(record, self._rows[task.seq & 1], record.slot * self._num_rows, on_row)
        except Exception:
            # A defect of ours ends one request; it must not end the worker, and with it every other request.
            slot = self._table.slots.get(record.slot)
            extra = {"request_id": slot.request_id if slot else ""}
            logger.exception("slot %d: record %r", record.slot, record, extra=extra)
            count = len(record.drafts) + 1
            return Answer([RowKind.ERROR] * count, [-1] * count)

    def __repr__(self) -> str:
        return f"<RecordAnswerer {self._counters!r}>"
