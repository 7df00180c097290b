"""Answers the step plane: wait for a record, move matchers, fill rows, publish, slot by slot.

One thread does all of that as long as it is quick. `row_deadline_ms` after a sequence was seen, another one takes over:
it publishes what stands of every answer that is not whole, DEFER for the rest, and goes on with the other slots; the
rows that come later are added to the answer that is out, and serve the record that asks for them again.

Invariant: one thread at a time touches a bound matcher and the rows of its slot. Binds and releases pass through a
queue that is emptied between seeing a sequence and reading its records; so whoever posts after a Bind was acknowledged
meets that matcher. The sign of life comes from the thread that leads: when every thread hangs, it stops.

Not here: who leads (lanes), the walk itself (matchers), sockets and compiling (server, compiler).
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from grammar_service.backends import Rows
from grammar_service.channel import Channel
from grammar_service.lanes import Lanes, Work
from grammar_service.mask_rows import Classifier
from grammar_service.matchers import Answer, Slot, SlotTable
from grammar_service.metrics import FillTimes, WorkerCounts
from grammar_service.questions import Change, Question
from grammar_service.standing_rows import Standing, StandingRows
from shared_mem.errors import RingOverrun
from shared_mem.grammar_end import Record
from shared_mem.layout import RowKind
from shared_mem.native import DEFAULT_SPIN_NS

logger = logging.getLogger(__name__)

HANG_S = 15.0
"""A row that takes longer hangs: the engine has ended its request, and its thread and slot are lost to others."""
WAIT_S = 0.01
"""One wait at most; both ends of it are signs of life."""

_SAMPLES = 4096


class Worker:
    """Answers one engine, from `start` to `stop`.

    Args:
        channel: the grammar process's end of the mapped segment.
        threads: so many may hang in slow rows before the last one, which leads, does too.
        spin_s: how long a wait spins before it sleeps, while a matcher is bound.
        row_deadline_ms: an answer that is not whole so long after its sequence was seen is published as it is.
    """

    hang_s: float = HANG_S

    def __init__(
        self, channel: Channel, *, threads: int = 1, spin_s: float = 50e-6, row_deadline_ms: float = 2.0
    ) -> None:
        layout = channel.layout
        self._channel = channel
        self._num_rows = layout.num_rows
        self._num_slots = layout.num_slots
        self._table = SlotTable(Classifier(layout.vocab_size))
        self._rows = tuple(Rows(channel.mask_rows(i).reshape(layout.num_slots * layout.num_rows, -1)) for i in (0, 1))
        self._spin_ns = int(spin_s * 1e9)
        self._deadline_ns = int(row_deadline_ms * 1e6)
        self._lanes = Lanes(threads + 1, self)
        self._inbox: collections.deque[Change] = collections.deque()
        self._last = channel.start_seq
        self._standing = [StandingRows() for _ in range(self._num_slots)]
        """Of each slot. Touched by whoever has the slot's lane."""
        self._counts = np.zeros((self._num_slots, len(RowKind)), dtype=np.int64)
        self._records = 0
        self._overruns = 0
        self._late_answers = self._late_rows = self._reused_rows = self._filled_rows = self._refilled_rows = 0
        self._proposed_tokens = 0
        self._fill_ns: collections.deque[int] = collections.deque(maxlen=_SAMPLES)
        self._fill_times = FillTimes(self._num_slots)

    def start(self) -> None:
        """Start the threads. Once."""
        self._lanes.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the threads and drop every matcher; False when one did not end in time (a library hangs)."""
        ended = self._lanes.stop(timeout_s)
        if ended:
            self._table.slots.clear()
        return ended

    def bind(self, slot: int, state: Slot) -> None:
        """Hand a matcher over; from the next record on it answers for its slot. Any thread."""
        self._change(slot, lambda: self._table.bind(slot, state))

    def release(self, slot: int, gen: int) -> None:
        """Have the matcher of (slot, gen) dropped. Any thread."""
        self._change(slot, lambda: self._table.release(slot, gen))

    def drop_all(self) -> None:
        """Have every matcher dropped: the vocabulary is another one now. Any thread."""
        for slot in range(self._num_slots):
            self._change(slot, lambda slot=slot: self._table.drop(slot))  # type: ignore[misc]

    def _change(self, slot: int, change: Callable[[], None]) -> None:
        def apply() -> None:
            change()
            self._standing[slot] = StandingRows()

        self._inbox.append(Change(slot, apply))

    @property
    def error(self) -> BaseException | None:
        """Why the threads ended, when they ended by themselves."""
        return self._lanes.error

    @property
    def alive(self) -> bool:
        """It answers."""
        return self._lanes.alive and self.error is None

    def stats(self) -> dict[str, float]:
        """Return counters since the start, gauges, and fill times of the last records in microseconds."""
        samples = np.asarray(list(self._fill_ns) or [0]) / 1e3
        out: dict[str, float] = dict(self._table.stats())
        out.update(records=self._records, overruns=self._overruns, reliefs=self._lanes.reliefs)
        out.update(late_answers=self._late_answers, late_rows=self._late_rows)
        out.update(filled_rows=self._filled_rows, refilled_rows=self._refilled_rows, reused_rows=self._reused_rows)
        out.update(proposed_tokens=self._proposed_tokens)
        out.update(fill_p50_us=float(np.percentile(samples, 50)), fill_p99_us=float(np.percentile(samples, 99)))
        return out

    def rows_by_kind(self) -> dict[str, int]:
        """Return how many rows were answered with each kind."""
        totals = self._counts.sum(axis=0)
        return {kind.name: int(totals[kind]) for kind in RowKind}

    def counts(self) -> WorkerCounts:
        """Return counters since the start, for metrics. Any thread."""
        table = self._table.stats()
        fill_counts, fill_sum_ns = self._fill_times.totals()
        return WorkerCounts(
            records=sum(fill_counts),
            overruns=self._overruns,
            filled_rows=self._filled_rows,
            refilled_rows=self._refilled_rows,
            gaps=table["gaps"],
            rebuilds=table["rebuilds"],
            matchers=table["matchers"],
            rows_by_kind=self.rows_by_kind(),
            fill_counts=fill_counts,
            fill_sum_ns=fill_sum_ns,
        )

    # -- what the lanes call: `lanes.Crew` ---------------------------------------------------------------------------

    def wait(self) -> int:
        """Wait for a sequence; both ends of it are signs of life."""
        # Where nobody is guided nobody waits: the core is left to others, and a bind is seen at the end of a wait.
        spin_ns = self._spin_ns if self._table.slots else min(self._spin_ns, DEFAULT_SPIN_NS)
        return self._channel.wait(self._last, WAIT_S, spin_ns)

    def handle(self, news: int) -> None:
        """Put what came: changes first, then the records of every sequence up to `news`.

        Raises RuntimeError when a mask computation hangs: only the end of the process frees what it holds.
        """
        if (stuck_s := self._lanes.stuck_s()) > self.hang_s:
            raise RuntimeError(f"a mask computation runs for {stuck_s:.0f} s")
        while self._inbox:
            self._lanes.put(self._inbox.popleft())
        for seq in range(self._last + 1, news + 1):
            self._read(seq)
        self._last = news

    def overdue(self, timeout_s: float) -> bool:
        """Wait for the leader to be over the deadline."""
        return self._channel.overdue(self._deadline_ns, timeout_s)

    def relieved(self) -> None:
        """Another thread leads."""
        self._channel.take_over()

    def late(self, work: Work) -> None:
        """Publish what stands of an answer. Under the lanes' lock."""
        if isinstance(work, Question) and not work.late:
            work.late = True
            self._late_answers += 1
            # The kinds first: what a kind stands for was written before it.
            kinds, (_, forced, need) = list(work.answer.kinds), work.answer
            self._channel.publish(work.seq, work.lane, work.record.slot_gen, kinds, forced, need, late=True)

    # -- one sequence -------------------------------------------------------------------------------------------------

    def _read(self, seq: int) -> None:
        try:
            records = self._channel.records(seq)
        except RingOverrun:
            # The engine has gone on without this step; the gap shows in the next record of each slot.
            self._overruns += 1
            return
        if self._channel.permissive:
            for record in records:
                kinds = [int(RowKind.ALL)] * (len(record.drafts) + 1)
                self._channel.publish(seq, record.slot, record.slot_gen, kinds, [-1] * len(kinds), [-1] * len(kinds))
            return
        for record in sorted(records, key=self._cost) if len(records) > 1 else records:
            self._lanes.put(Question(seq, record, self._answer))

    def _cost(self, record: Record) -> int:
        slot = self._table.slots.get(record.slot)
        return slot.cost_ns if slot else 0

    def _answer(self, question: Question) -> None:
        if question.proposes:
            return self._propose(question)
        begun = time.perf_counter_ns()
        record, slot = question.record, self._table.slots.get(question.lane)
        reused = self._reuse(question)
        wanted = 0 if self._lanes.superseded(question.lane) else record.need_rows & ~reused
        answer = self._fill(question, record._replace(need_rows=wanted))
        for row, kind in enumerate(answer.kinds):
            if kind != RowKind.DEFER or not reused >> row & 1:
                question.stands(row, kind, answer.forced[row], answer.need[row])
        with self._lanes.lock:
            self._finish(question)
        took = time.perf_counter_ns() - begun
        if slot is not None:
            slot.cost_ns = took
        self._fill_ns.append(took)
        self._fill_times.observe(record.slot, took)
        for kind in question.answer.kinds:
            self._counts[record.slot, kind] += 1
        self._channel.heartbeat()

    def _propose(self, question: Question) -> None:
        """Answer what is forced. Rows of the answer before stay where they are, and may be used again."""
        if not self._lanes.superseded(question.lane):
            question.answer = self._fill(question, question.record)
            self._proposed_tokens += question.answer.kinds.count(RowKind.FORCED)
        with self._lanes.lock:
            self._finish(question)
        self._channel.heartbeat()

    def _finish(self, question: Question) -> None:
        seq, slot, answer = question.seq, question.lane, question.answer
        if question.late:
            self._channel.add_rows(seq, slot, *answer, late=False)
        else:
            self._channel.publish(seq, slot, question.record.slot_gen, *answer)
        self._records += 1

    def _reuse(self, question: Question) -> int:
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
                question.stands(here, found.kind, found.forced, found.need)
                standing.put(path, replace(found, half=half, row=here))
                bits |= 1 << here
                self._reused_rows += 1
        return bits

    def _fill(self, question: Question, record: Record) -> Answer:
        standing, half = self._standing[question.lane], question.seq & 1
        standing.clear(half, 0 if question.proposes else record.need_rows)

        def told(row: int, kind: RowKind, forced: int, need: int) -> bool:
            question.stands(row, kind, forced, need)
            standing.put(record.drafts[:row], Standing(half, row, kind, forced, need))
            self._filled_rows += 1
            self._refilled_rows += standing.fill(record.drafts[:row])
            if question.late:
                self._late_rows += 1
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
            return Answer([RowKind.ERROR] * count, [-1] * count, [-1] * count)

    def __repr__(self) -> str:
        state = "alive" if self.alive else "not running"
        return f"<Worker {state} matchers={len(self._table.slots)} records={self._records}>"
