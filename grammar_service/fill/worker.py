"""Answers the step plane: wait for a record, move matchers, fill rows, publish. What is plain goes in batches
(batch.py), the rest slot by slot (answers.py).

One thread does all of that as long as it is quick. When a piece of work takes longer than `row_deadline_ms` (a batch
has more, by its slots), another one takes over: it publishes what stands of every answer that is not whole, DEFER for
the rest, and goes on with the other slots; the rows that come later are added to the answer that is out, and serve the
record that asks for them again. That the pieces before it were many makes no answer late, within `_PATIENCE`.

Invariant: one thread at a time touches a bound matcher and the rows of its slot. Binds and releases pass through a
queue that is emptied between seeing a sequence and reading its records; so whoever posts after a Bind was acknowledged
meets that matcher. The sign of life comes from the thread that leads: when every thread hangs, it stops.

Not here: who leads (lanes), the walk itself (matchers), sockets and compiling (server, compiler).
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Sequence

from grammar_service.fill.answers import Answers
from grammar_service.fill.batch import LEAST, Batches
from grammar_service.fill.channel import Channel
from grammar_service.fill.counters import Counters
from grammar_service.fill.mask_row_cache import MaskRowCache
from grammar_service.fill.matchers import Slot, SlotTable
from grammar_service.fill.tasks import Batch, Change, FillTask
from grammar_service.fill.work_queues import Work, WorkQueues
from grammar_service.grammar.mask_rows import Classifier
from grammar_service.metrics import WorkerCounts
from service_runtime.cores import usable_cores
from shared_mem.errors import RingOverrun
from shared_mem.grammar_end import Record
from shared_mem.layout import RowKind
from shared_mem.native import DEFAULT_SPIN_NS

logger = logging.getLogger(__name__)

HANG_S = 15.0
"""A row that takes longer hangs: the engine has ended its request, and its thread and slot are lost to others."""
WAIT_S = 0.01
"""One wait at most; both ends of it are signs of life."""
GIVE_UP_S = 0.1
"""A batch that is overdue for so long is left to its thread; its slots get new matchers and are answered one by one."""

_PATIENCE, _MOST_PATIENCE = 8, 16
"""So many records of a sequence may take one deadline more, in a batch or one after the other; two drafts count as one
record. Never more than so many deadlines."""


class Worker:
    """Answers one engine, from `start` to `stop`.

    Args:
        channel: the grammar process's end of the mapped segment.
        threads: so many may hang in slow rows before the last one, which leads, does too; and those of the libraries.
        spin_s: how long a wait spins before it sleeps, while a matcher is bound.
        row_deadline_ms: an answer that is not whole so long after it was begun is published as it is.
    """

    hang_s: float = HANG_S
    least_batch: int = LEAST
    """Fewer records of a sequence are answered one by one."""

    def __init__(
        self, channel: Channel, *, threads: int = 1, spin_s: float = 50e-6, row_deadline_ms: float = 2.0
    ) -> None:
        layout = channel.layout
        self._channel = channel
        self._num_slots = layout.num_slots
        self._table = SlotTable(Classifier(layout.vocab_size))
        self._spin_ns = int(spin_s * 1e9)
        self._deadline_ns = int(row_deadline_ms * 1e6)
        self._lanes = WorkQueues(threads + 1, self)
        self._patience_ns = self._most_patience_ns = 0
        """`time.monotonic_ns()` until which pieces of work have their time to themselves, and may at most have it."""
        self._inbox: collections.deque[Change] = collections.deque()
        self._last = channel.start_seq
        self._standing = [MaskRowCache() for _ in range(self._num_slots)]
        """Of each slot. Touched by whoever has the slot's lane."""
        self._books = Counters(self._num_slots)
        parts = channel, self._table, self._standing, self._books
        self._answers = Answers(*parts, self._lanes)
        limits = min(threads, usable_cores()), self._deadline_ns * _MOST_PATIENCE // 4
        self._batches = Batches(*parts, self._lanes.lock, self._answers.answer, *limits)

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
            self._standing[slot] = MaskRowCache()

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
        return {**self._table.stats(), **self._books.stats(), "leader_handoffs": self._lanes.leader_handoffs}

    def rows_by_kind(self) -> dict[str, int]:
        """Return how many rows were answered with each kind."""
        return self._books.rows_by_kind()

    def counts(self) -> WorkerCounts:
        """Return counters since the start, for metrics. Any thread."""
        table = self._table.stats()
        books = self._books
        fill_counts, fill_sum_ns = books.fill_times.totals()
        return WorkerCounts(
            records=sum(fill_counts),
            overruns=books.overruns,
            filled_rows=books.filled_rows,
            refilled_rows=books.refilled_rows,
            gaps=table["gaps"],
            rebuilds=table["rebuilds"],
            matchers=table["matchers"],
            rows_by_kind=books.rows_by_kind(),
            fill_counts=fill_counts,
            fill_sum_ns=fill_sum_ns,
        )

    # -- what the lanes call: `work_queues.WorkDelegate` --------

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
        self._lanes.give_up(GIVE_UP_S)
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

    def begins(self, work: Work) -> None:
        """Count the time anew."""
        ahead_ns = 0
        if isinstance(work, Batch):
            self._patience_ns = min(self._patience_ns + 2 * self._batches.known_ns(work), self._most_patience_ns)
            ahead_ns = max(0, self._patience_ns - time.monotonic_ns())
        if self.keeps_waiting():
            self._channel.take_over(ahead_ns)

    def keeps_waiting(self) -> bool:
        """Say whether what was not begun has time left."""
        return time.monotonic_ns() < self._patience_ns

    def parted(self, work: Work, lanes: Sequence[int]) -> Sequence[Work]:
        """Take lanes that are busy out of a batch."""
        return self._batches.parted(work, lanes) if isinstance(work, Batch) else (work,)

    def abandon(self, work: Work) -> Sequence[Work]:
        """Leave a batch that hangs to its thread."""
        return self._batches.abandon(work) if isinstance(work, Batch) else ()

    def late(self, work: Work) -> None:
        """Publish what stands of an answer. Under the lanes' lock."""
        if isinstance(work, Batch):
            self._batches.tell_late(work)
        elif isinstance(work, FillTask) and not work.late:
            work.late = True
            self._books.late_answers += 1
            # The kinds first: what a kind stands for was written before it.
            kinds, (_, forced) = list(work.answer.kinds), work.answer
            self._channel.publish(work.seq, work.lane, work.record.slot_gen, kinds, forced, late=True)

    # -- one sequence -------------------------------------------------------------------------------------------------

    def _read(self, seq: int) -> None:
        try:
            records = self._channel.records(seq)
        except RingOverrun:
            # The engine has gone on without this step; the gap shows in the next record of each slot.
            self._books.overruns += 1
            return
        if self._channel.permissive:
            for record in records:
                kinds = [int(RowKind.ALL)] * (len(record.drafts) + 1)
                self._channel.publish(seq, record.slot, record.slot_gen, kinds, [-1] * len(kinds))
            return
        shares = sum(1 + len(record.drafts) // 2 for record in records)
        patience = min(_MOST_PATIENCE, 1 + shares // _PATIENCE)
        now_ns = time.monotonic_ns()
        self._patience_ns = now_ns + self._deadline_ns * patience
        self._most_patience_ns = now_ns + self._deadline_ns * _MOST_PATIENCE
        batches, rest = self._batches.split(seq, records, self.least_batch)
        for batch in batches:
            self._lanes.put(batch)
        for record in sorted(rest, key=self._cost) if len(rest) > 1 else rest:
            self._lanes.put(FillTask(seq, record, self._answers.answer))

    def _cost(self, record: Record) -> int:
        slot = self._table.slots.get(record.slot)
        return slot.cost_ns if slot else 0

    def __repr__(self) -> str:
        state = "alive" if self.alive else "not running"
        return f"<Worker {state} matchers={len(self._table.slots)} records={self._books.records}>"
