"""Answers one engine's step plane: waits for records, moves matchers, fills rows, publishes answers.

One thread does all of this as long as it is quick. When a task takes longer than `row_deadline_ms` (a batch has more,
by its slots), another thread takes the lead: it publishes each incomplete answer with DEFER for the missing rows, and
continues with the other slots. The slow thread adds its rows to the published answer. Queueing after earlier tasks
does not count toward the deadline, within `_TASKS_PER_DEADLINE`.

Invariant: one thread at a time touches a bound matcher and the rows of its slot. Binds and releases pass through a
queue that the leader empties after it sees a sequence and before it reads the records; so a record that is posted after
the acknowledgement of a Bind meets the new matcher. Only the leader writes signs of life, so they stop when all
threads hang.

Not responsible for: which thread leads (see work_queues.py), the moves of a matcher (see matchers.py), sockets (see
server.py) and compilation (see compile/).
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from functools import partial

from grammar_service.fill.answers import RecordAnswerer
from grammar_service.fill.batch import MIN_RECORDS, BatchAnswerer
from grammar_service.fill.channel import Channel
from grammar_service.fill.counters import Counters, WorkerCounts
from grammar_service.fill.matchers import MatcherTable, SlotMatcher
from grammar_service.fill.tasks import BatchTask, ChangeTask, FillTask, ForkTask
from grammar_service.fill.work_queues import Task, WorkQueues
from grammar_service.grammar.mask_rows import Classifier
from service_runtime.cores import usable_cores
from service_runtime.threads import OS_THREADS, Threads
from shared_mem.errors import RingOverrun
from shared_mem.layout import RowKind, Stage
from shared_mem.native import DEFAULT_SPIN_NS
from shared_mem.records import Record

logger = logging.getLogger(__name__)

HANG_S = 15.0
"""A row that takes longer hangs: the engine has ended its request, and its thread and slot are lost."""
WAIT_S = 0.01
"""Bound of one wait for records. Both ends of a wait are signs of life."""
ABANDON_S = 0.1
"""A batch that is overdue for so long loses its slots: they get new matchers and are answered one by one."""

_TASKS_PER_DEADLINE, _MAX_DEADLINES = 8, 16
"""A sequence has one deadline, one more for each _TASKS_PER_DEADLINE records (two drafts count as one record), and at
most _MAX_DEADLINES."""


class Worker:
    """Answers one engine, from `start` to `stop`.

    Args:
        channel: the grammar process's end of the mapped segment.
        threads: slow rows that may hold a thread each before the last thread, which leads, is slow too; also the size
            of the libraries' thread pools.
        spin_s: time that a wait spins before it sleeps, while any matcher is bound.
        row_deadline_ms: an answer that is incomplete so long after its task began is published as it is.
        os: threads and clock.
    """

    hang_s: float = HANG_S
    abandon_s: float = ABANDON_S
    min_batch: int = MIN_RECORDS
    """Fewer records of a sequence are answered one by one."""

    def __init__(
        self,
        channel: Channel,
        *,
        threads: int = 1,
        spin_s: float = 50e-6,
        row_deadline_ms: float = 2.0,
        os: Threads = OS_THREADS,
    ) -> None:
        layout = channel.layout
        self._channel = channel
        self._num_slots = layout.num_slots
        self._now_ns = os.monotonic_ns
        self._table = MatcherTable(Classifier(layout.vocab_size), thread_time_ns=os.thread_time_ns)
        self._spin_ns = int(spin_s * 1e9)
        self._deadline_ns = int(row_deadline_ms * 1e6)
        self._queues = WorkQueues(threads + 1, self, os)
        num_cores = min(threads, usable_cores())
        self._max_helpers = num_cores - 1
        """Threads next to the leader that may take a batch of the same sequence."""
        self._on_time_until_ns = self._on_time_limit_ns = 0
        """`Threads.monotonic_ns()` until which tasks of the sequence are on time, and the most that it may become."""
        self._inbox: collections.deque[ChangeTask] = collections.deque()
        self._last = channel.start_seq
        """The last sequence that was read."""
        self._counters = Counters(self._num_slots)
        self._answerer = RecordAnswerer(channel, self._table, self._counters, self._queues, os.perf_counter_ns)
        self._batches = BatchAnswerer(
            channel,
            self._table,
            self._counters,
            self._queues.lock,
            self._answerer.answer,
            num_cores,
            self._deadline_ns * _MAX_DEADLINES // 4,
            os.perf_counter_ns,
        )

    def start(self) -> None:
        """Start the threads. Once."""
        self._queues.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the threads and drop every matcher. False: a thread did not end in time, because a library hangs."""
        ended = self._queues.stop(timeout_s)
        if ended:
            self._table.slots.clear()
        return ended

    def bind(self, slot: int, state: SlotMatcher) -> None:
        """Install a matcher, which answers its slot from the next record on. Any thread."""
        self._inbox.append(ChangeTask(slot, lambda: self._table.bind(slot, state)))

    def release(self, slot: int, slot_gen: int) -> None:
        """Drop the matcher of (slot, slot_gen). Any thread."""
        self._inbox.append(ChangeTask(slot, lambda: self._table.release(slot, slot_gen)))

    def drop_all(self) -> None:
        """Drop every matcher, because the vocabulary has changed. Any thread."""
        for slot in range(self._num_slots):
            self._inbox.append(ChangeTask(slot, lambda slot=slot: self._table.drop(slot)))  # type: ignore[misc]

    @property
    def error(self) -> BaseException | None:
        """Why the threads ended, if `stop` was not the reason."""
        return self._queues.error

    @property
    def alive(self) -> bool:
        """Whether the worker answers records."""
        return self._queues.alive and self.error is None

    def stats(self) -> dict[str, float]:
        """Return counters since the start, gauges, and percentiles of the last fill times in microseconds."""
        return {**self._table.stats(), **self._counters.stats(), "leader_handoffs": self._queues.leader_handoffs}

    def rows_by_kind(self) -> dict[str, int]:
        """Return the number of answered rows of each kind."""
        return self._counters.rows_by_kind()

    def counts(self) -> WorkerCounts:
        """Return a snapshot of the counters, for metrics. Any thread."""
        table = self._table.stats()
        counters = self._counters
        fill_counts, fill_sum_ns = counters.fill_times.totals()
        return WorkerCounts(
            records=sum(fill_counts),
            overruns=counters.overruns,
            filled_rows=counters.filled_rows,
            gaps=table["gaps"],
            rebuilds=table["rebuilds"],
            matchers=table["matchers"],
            rows_by_kind=counters.rows_by_kind(),
            fill_counts=fill_counts,
            fill_sum_ns=fill_sum_ns,
        )

    # -- what the queues call: `work_queues.WorkDelegate` -------------------------------------------------------------

    def wait(self) -> int:
        """Wait for a sequence and return the newest. Both ends of the wait are signs of life."""
        # Without a constrained request the wait sleeps early and leaves its core to other threads.
        spin_ns = self._spin_ns if self._table.slots else min(self._spin_ns, DEFAULT_SPIN_NS)
        return self._channel.wait(self._last, WAIT_S, spin_ns)

    def handle(self, newest: int) -> None:
        """Put the tasks that arrived: changes first, then the records of every sequence up to `newest`.

        Raises RuntimeError when a mask computation hangs: its memory and thread are freed by the end of the process
        alone.
        """
        if (stuck_s := self._queues.stuck_s()) > self.hang_s:
            raise RuntimeError(f"a mask computation runs for {stuck_s:.0f} s")
        self._queues.abandon_stuck(self.abandon_s)
        while self._inbox:
            self._queues.put(self._inbox.popleft())
        for seq in range(self._last + 1, newest + 1):
            self._read(seq)
        self._last = newest

    def overdue(self, timeout_s: float) -> bool:
        """Wait for the leader to exceed the deadline."""
        return self._channel.overdue(self._deadline_ns, timeout_s)

    def leader_changed(self) -> None:
        """Restart the deadline."""
        self._channel.take_over()

    def begins(self, task: Task) -> None:
        """Restart the deadline; a batch gets twice its expected time in addition."""
        ahead_ns = 0
        if isinstance(task, BatchTask):
            until_ns = self._on_time_until_ns + 2 * self._batches.expected_ns(task)
            self._on_time_until_ns = min(until_ns, self._on_time_limit_ns)
            ahead_ns = max(0, self._on_time_until_ns - self._now_ns())
        if self.has_time_left():
            self._channel.take_over(ahead_ns)

    def has_time_left(self) -> bool:
        """Return whether tasks of the sequence that have not begun are still on time."""
        return self._now_ns() < self._on_time_until_ns

    def part(self, task: Task, slots: Sequence[int]) -> Sequence[Task]:
        """Take slots with a task in hand out of a batch."""
        return self._batches.part(task, slots) if isinstance(task, BatchTask) else (task,)

    def abandon(self, task: Task) -> Sequence[Task]:
        """Leave a batch that hangs to its thread."""
        return self._batches.abandon(task) if isinstance(task, BatchTask) else ()

    def late(self, task: Task) -> None:
        """Publish an incomplete answer. Under the queues' lock."""
        if isinstance(task, BatchTask):
            self._batches.publish_late(task)
        elif isinstance(task, FillTask) and not task.late:
            task.late = True
            self._counters.late_answers += 1
            # The kinds are read first, because the thread that fills writes a row's kind last.
            kinds, forced = list(task.answer.kinds), task.answer.forced
            self._channel.publish(task.seq, task.slot, task.record.slot_gen, kinds, forced, late=True)

    # -- one sequence -------------------------------------------------------------------------------------------------

    def _read(self, seq: int) -> None:
        try:
            records = self._channel.read(seq)
        except RingOverrun:
            # The engine has overwritten this step; the next record of each slot shows the gap.
            self._counters.overruns += 1
            return
        if records.stage and records.stage[0] == Stage.FORK:
            for record in records:
                for source in record.committed[:1]:
                    self._queues.put(ForkTask(source, partial(self._fork, source, record)))
            return
        if self._channel.permissive:
            for record in records:
                kinds = [int(RowKind.ALL)] * (len(record.drafts) + 1)
                self._channel.publish(seq, record.slot, record.slot_gen, kinds, [-1] * len(kinds))
            return
        num_tasks = len(records) + sum(records.n_draft) // 2
        deadlines = min(_MAX_DEADLINES, 1 + num_tasks // _TASKS_PER_DEADLINE)
        now_ns = self._now_ns()
        self._on_time_until_ns = now_ns + self._deadline_ns * deadlines
        self._on_time_limit_ns = now_ns + self._deadline_ns * _MAX_DEADLINES
        batches, rest = self._batches.split(records, self.min_batch)
        for batch in batches:
            self._queues.put(batch)
        self._queues.call_helpers(min(len(batches) - 1, self._max_helpers))
        singles = [records[index] for index in rest]
        for record in sorted(singles, key=self._last_fill_ns) if len(singles) > 1 else singles:
            self._queues.put(FillTask(seq, record, self._answerer.answer))

    def _fork(self, source: int, record: Record) -> tuple[ChangeTask, ...]:
        """Copy the matcher of slot `source`; return the task that gives the copy to the record's slot.

        A matcher for the same slot is moved and not copied: no other record of the slot may come between.

        Where there is nothing to copy, the slot is left without a matcher of this owner: its next records are deferred
        until the engine binds one.
        """
        try:
            if source == record.slot:
                self._table.move_to(source, record.slot_gen, record.commit_pos)
                return ()
            state = self._table.copy_of(source, record.slot_gen, record.commit_pos)
        except Exception:
            # A defect of ours costs one beam a Bind; it must not end the worker.
            logger.exception("slot %d: fork %r", source, record)
            state = None
        if state is None:
            return ()
        return (ChangeTask(record.slot, partial(self._table.adopt, record.slot, state)),)

    def _last_fill_ns(self, record: Record) -> int:
        slot = self._table.slots.get(record.slot)
        return slot.last_fill_ns if slot else 0

    def __repr__(self) -> str:
        state = "alive" if self.alive else "not running"
        return f"<Worker {state} matchers={len(self._table.slots)} records={self._counters.records}>"
