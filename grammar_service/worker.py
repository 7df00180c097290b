"""The thread that answers the step plane: wait for a record, move matchers, fill rows, publish, slot by slot.

Invariant: this thread (with its fill threads) is the only one that touches a bound matcher. Binds and releases reach it
through a queue that it empties between seeing a sequence and reading its records; so whoever posts after a Bind was
acknowledged meets that matcher. Its sign of life comes from this thread alone: a hang shows within a wait.

Not here: the walk itself (matchers), sockets and compiling (server, compiler).
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from grammar_service.backends import Rows
from grammar_service.lanes import Lanes
from grammar_service.matchers import Answer, Classifier, Slot, SlotTable
from grammar_service.metrics import FillTimes, WorkerCounts
from shared_mem.errors import RingOverrun
from shared_mem.grammar_end import Record
from shared_mem.layout import Layout, RowKind

logger = logging.getLogger(__name__)

WAIT_S = 0.01
"""One wait at most; both ends of it are signs of life."""

_SAMPLES = 4096


class Channel(Protocol):
    """What the worker needs of `shared_mem.channel.GrammarEnd`."""

    layout: Layout
    start_seq: int

    def wait(self, last_seq: int, timeout_s: float, spin_ns: int) -> int:
        """Return the newest sequence; `last_seq` when nothing came in time."""
        ...

    def records(self, seq: int) -> Sequence[Record]:
        """Return the records of `seq`. Raises RingOverrun."""
        ...

    def mask_rows(self, seq: int) -> NDArray[np.int32]:
        """Return the rows to write, int32 [num_slots, R, row_stride / 4]."""
        ...

    def publish(
        self, seq: int, slot: int, slot_gen: int, kinds: Sequence[int], forced: Sequence[int], need: Sequence[int]
    ) -> bool:
        """Publish a slot's answer."""
        ...

    def heartbeat(self) -> None:
        """Show life."""
        ...

    @property
    def permissive(self) -> bool:
        """Answer ALL to everything."""
        ...


class _Question:
    """A record to be answered. It takes the place of a queued one that says the same: the engine asked again."""

    __slots__ = ("_answer", "_record", "_seq")

    def __init__(self, seq: int, record: Record, answer: Callable[[int, Record], None]) -> None:
        self._seq = seq
        self._record = record
        self._answer = answer

    def __call__(self) -> None:
        self._answer(self._seq, self._record)

    def replaces(self, other: Callable[[], None]) -> bool:
        """Say whether `other` asks for the same rows under an older sequence."""
        return isinstance(other, _Question) and other._moves() == self._moves()

    def _moves(self) -> tuple[int, int, tuple[int, ...]]:
        return self._record.slot_gen, self._record.commit_pos, self._record.committed


class Worker:
    """Answers one engine, from `start` to `stop`.

    Args:
        channel: the grammar process's end of the mapped segment.
        threads: 1 fills rows on the worker thread itself; more spread the slots of a step.
        spin_s: how long a wait spins before it sleeps.
    """

    def __init__(self, channel: Channel, *, threads: int = 1, spin_s: float = 50e-6) -> None:
        layout = channel.layout
        self._channel = channel
        self._num_rows = layout.num_rows
        self._num_slots = layout.num_slots
        self._table = SlotTable(Classifier(layout.vocab_size))
        self._rows = tuple(Rows(channel.mask_rows(i).reshape(layout.num_slots * layout.num_rows, -1)) for i in (0, 1))
        self._spin_ns = int(spin_s * 1e9)
        self._lanes = Lanes(threads) if threads > 1 else None
        self._inbox: collections.deque[tuple[int, Callable[[], None]]] = collections.deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-grammar-worker", daemon=True)
        self._counts = np.zeros((self._num_slots, len(RowKind)), dtype=np.int64)
        self._records = 0
        self._overruns = 0
        self._fill_ns: collections.deque[int] = collections.deque(maxlen=_SAMPLES)
        self._fill_times = FillTimes(self._num_slots)
        self.error: BaseException | None = None
        """Why the thread ended, when it ended by itself."""

    def start(self) -> None:
        """Start the thread. Once."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the thread and drop every matcher; False when it did not end in time (a library hangs)."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        ended = self._lanes is None or self._lanes.close(timeout_s)
        return ended and not self._thread.is_alive()

    def bind(self, slot: int, state: Slot) -> None:
        """Hand a matcher over; from the next record on it answers for its slot. Any thread."""
        self._inbox.append((slot, lambda: self._table.bind(slot, state)))

    def release(self, slot: int, gen: int) -> None:
        """Have the matcher of (slot, gen) dropped. Any thread."""
        self._inbox.append((slot, lambda: self._table.release(slot, gen)))

    def drop_all(self) -> None:
        """Have every matcher dropped: the vocabulary is another one now. Any thread."""
        for slot in range(self._num_slots):
            self._inbox.append((slot, lambda slot=slot: self._table.drop(slot)))  # type: ignore[misc]

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    def stats(self) -> dict[str, float]:
        """Return counters since the start, gauges, and fill times of the last records in microseconds."""
        samples = np.asarray(list(self._fill_ns) or [0]) / 1e3
        out: dict[str, float] = dict(self._table.stats())
        out.update(records=self._records, overruns=self._overruns)
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
            gaps=table["gaps"],
            rebuilds=table["rebuilds"],
            matchers=table["matchers"],
            rows_by_kind=self.rows_by_kind(),
            fill_counts=fill_counts,
            fill_sum_ns=fill_sum_ns,
        )

    def _run(self) -> None:
        try:
            last = self._channel.start_seq
            while not self._stopping.is_set():
                newest = self._channel.wait(last, WAIT_S, self._spin_ns)
                self._empty_inbox()
                for seq in range(last + 1, newest + 1):
                    self._step(seq)
                last = newest
        except BaseException as error:
            self.error = error
            logger.exception("the grammar worker ended")
            raise
        finally:
            self._table.slots.clear()

    def _step(self, seq: int) -> None:
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
            if self._lanes is None:
                self._answer(seq, record)
                self._channel.heartbeat()
            else:
                question = _Question(seq, record, self._answer)
                self._lanes.put(record.slot, question, question.replaces)

    def _cost(self, record: Record) -> int:
        slot = self._table.slots.get(record.slot)
        return slot.cost_ns if slot else 0

    def _answer(self, seq: int, record: Record) -> None:
        begun = time.perf_counter_ns()
        answer = self._fill(seq, record)
        self._channel.publish(seq, record.slot, record.slot_gen, *answer)
        took = time.perf_counter_ns() - begun
        slot = self._table.slots.get(record.slot)
        if slot is not None:
            slot.cost_ns = took
        self._fill_ns.append(took)
        self._fill_times.observe(record.slot, took)
        self._records += 1
        for kind in answer.kinds:
            self._counts[record.slot, kind] += 1

    def _fill(self, seq: int, record: Record) -> Answer:
        try:
            return self._table.answer(record, self._rows[seq & 1], record.slot * self._num_rows)
        except Exception:
            # A defect of ours must end one request, not the worker and every other request with it.
            slot = self._table.slots.get(record.slot)
            about = {"request_id": slot.request_id if slot else ""}
            logger.exception("slot %d: record %r", record.slot, record, extra=about)
            count = len(record.drafts) + 1
            return Answer([RowKind.ERROR] * count, [-1] * count, [-1] * count)

    def _empty_inbox(self) -> None:
        while self._inbox:
            slot, change = self._inbox.popleft()
            if self._lanes is None or self._lanes.idle(slot):
                change()
            else:
                self._lanes.put(slot, change)

    def __repr__(self) -> str:
        state = "alive" if self.alive else "not running"
        return f"<Worker {state} matchers={len(self._table.slots)} records={self._records}>"
