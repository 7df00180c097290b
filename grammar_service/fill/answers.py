"""Answers one record at a time: what stands already is reused, the rest is filled row by row.

Invariant: the caller has the lane of the record's slot; so matchers, standing rows and mask rows of a slot are touched
by one thread. A row is told as soon as it stands, and published with its answer, or added to one that is out. Not here:
when an answer is late (worker.py), records of many slots at once (batch.py), the walk itself (matchers.py).
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from grammar_service.backends.backend import Rows
from grammar_service.fill.channel import Channel
from grammar_service.fill.counters import Counters
from grammar_service.fill.mask_row_cache import MaskRowCache, Standing
from grammar_service.fill.matchers import Answer, SlotTable
from grammar_service.fill.tasks import FillTask
from grammar_service.fill.work_queues import WorkQueues
from shared_mem.grammar_end import Record
from shared_mem.layout import RowKind

logger = logging.getLogger(__name__)


class Answers:
    """What a worker does for one question. Any thread that has the question's lane.

    Args:
        channel: rows and answers go there.
        table, standing, books: of the worker.
        lanes: whose lock guards what is published of a question.
    """

    def __init__(
        self, channel: Channel, table: SlotTable, standing: list[MaskRowCache], books: Counters, lanes: WorkQueues
    ) -> None:
        layout = channel.layout
        self._channel, self._table, self._standing, self._books, self._lanes = channel, table, standing, books, lanes
        self._num_rows = layout.num_rows
        self._rows = tuple(Rows(channel.mask_rows(i).reshape(layout.num_slots * layout.num_rows, -1)) for i in (0, 1))

    def answer(self, question: FillTask) -> None:
        """Answer it, and keep the books."""
        if question.proposes:
            return self._propose(question)
        begun = time.perf_counter_ns()
        record, slot = question.record, self._table.slots.get(question.lane)
        reused = self._reuse(question)
        wanted = 0 if self._lanes.superseded(question.lane) else record.need_rows & ~reused
        answer = self._fill(question, record._replace(need_rows=wanted))
        for row, kind in enumerate(answer.kinds):
            if kind != RowKind.DEFER or not reused >> row & 1:
                question.stands(row, kind, answer.forced[row])
        with self._lanes.lock:
            self._finish(question)
        took = time.perf_counter_ns() - begun
        if slot is not None:
            slot.cost_ns = took
        self._books.took(record.slot, took)
        for kind in question.answer.kinds:
            self._books.tallies[record.slot, kind] += 1
        self._channel.heartbeat()

    def _propose(self, question: FillTask) -> None:
        """Answer what is forced. Rows of the answer before stay where they are, and may be used again."""
        if not self._lanes.superseded(question.lane):
            question.answer = self._fill(question, question.record)
            self._books.proposed_tokens += question.answer.kinds.count(RowKind.FORCED)
        with self._lanes.lock:
            self._finish(question)
        self._channel.heartbeat()

    def _finish(self, question: FillTask) -> None:
        seq, slot, answer = question.seq, question.lane, question.answer
        if question.late:
            self._channel.add_rows(seq, slot, *answer, late=False)
        else:
            self._channel.publish(seq, slot, question.record.slot_gen, *answer)
        self._books.records += 1

    def _reuse(self, question: FillTask) -> int:
        """Bring the rows that earlier answers have to where this one's belong; return their bits."""
        record, standing, half = question.record, self._standing[question.lane], question.seq & 1
        standing.follow(record)
        bits, first, target = 0, question.lane * self._num_rows, self._rows[half].words
        # Upwards: a row moves down or stays, onto rows that were moved before it.
        for here in range(len(record.drafts) + 1):
            path = record.drafts[:here]
            found = standing.find(path) if record.need_rows >> here & 1 else None
            if found is not None:
                target[first + here] = self._rows[found.half].words[first + found.row]
                question.stands(here, found.kind, found.forced)
                standing.put(path, replace(found, half=half, row=here))
                bits |= 1 << here
                self._books.reused_rows += 1
        return bits

    def _fill(self, question: FillTask, record: Record) -> Answer:
        standing, half = self._standing[question.lane], question.seq & 1
        standing.clear(half, 0 if question.proposes else record.need_rows)

        def told(row: int, kind: RowKind, forced: int) -> bool:
            question.stands(row, kind, forced)
            standing.put(record.drafts[:row], Standing(half, row, kind, forced))
            self._books.filled_rows += 1
            self._books.refilled_rows += standing.fill(record.drafts[:row])
            if question.late:
                self._books.late_rows += 1
                with self._lanes.lock:
                    self._channel.add_rows(question.seq, question.lane, *question.answer, late=True)
            # Behind a newer record these rows are not waited for any more; those that are wanted again are kept.
            return not self._lanes.superseded(question.lane)

        try:
            return self._table.answer(record, self._rows[question.seq & 1], record.slot * self._num_rows, told)
        except Exception:
            # A defect of ours must end one request, not the worker and every other request with it.
            slot = self._table.slots.get(record.slot)
            about = {"request_id": slot.request_id if slot else ""}
            logger.exception("slot %d: record %r", record.slot, record, extra=about)
            count = len(record.drafts) + 1
            return Answer([RowKind.ERROR] * count, [-1] * count)

    def __repr__(self) -> str:
        return f"<Answers of {len(self._standing)} slots>"
