"""Records of many slots answered together: each matcher moves, one native call writes the rows, another publishes them.

    split:   fast records in batches, slow records in batches of their own, the rest one by one
    answer:  bring each matcher to the record's first needed row; a record that is not *simple* is left out
             one call of the library fills the rows of all chains, on its own threads and without the GIL
             one native call copies the rows into place and publishes the answers
             the records that were left out, or that the native calls could not finish, become `FillTask`s

A record is simple when its matcher is good and at or behind the record's position, the answer's end is far, and all
rows behind the first needed one are needed.

Invariant: a row that is published here equals the row that `RecordAnswerer` would have published.

Not responsible for: single records (see answers.py), which thread holds the slots (see work_queues.py).
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

from grammar_service.backends.backend import Chain, ChainFiller, Filled, MatcherFailed
from grammar_service.fill.channel import Channel
from grammar_service.fill.counters import Counters
from grammar_service.fill.matchers import Health, MatcherTable, SlotMatcher
from grammar_service.fill.tasks import BatchTask, ChangeTask, FillTask, is_batchable
from grammar_service.fill.work_queues import Task
from shared_mem.chains import SLOW, ChainArrays
from shared_mem.grammar_end import Record
from shared_mem.layout import RowKind

logger = logging.getLogger(__name__)

MIN_RECORDS = 4
"""Fewer records are answered one by one: the calls for a batch cost as much as so many records save."""
MAX_SLOTS, MAX_ROWS = 32, 256
"""Of one batch. Its answers are out while the next batch is filled, and its rows fit a second-level cache."""
SLOW_NS = 500_000
"""A slot whose last record took longer is slow: it is batched with other slow slots, behind the fast ones."""
MAX_SLOW_NS = 4_000_000
"""A slot whose last record took longer is never batched."""
SURPRISE_NS, TIMING_INTERVAL = 2_000_000, 64
"""A batch that takes four times as long as its slots took before, and SURPRISE_NS more, has a slow slot: each slot is
then timed by itself once, but not again within TIMING_INTERVAL records."""


class _SimpleRecord(NamedTuple):
    """A record whose matcher is at the first needed row."""

    record: Record
    slot: SlotMatcher
    first: int


class BatchAnswerer:
    """Makes and answers `BatchTask`s. Any number of threads, each with its own batch.

    Args:
        channel: receives rows and answers.
        table: the worker's matchers; a thread touches those of slots that it holds.
        counters: of the worker.
        lock: of the work queues.
        answer_alone: answers one `FillTask`.
        threads: for the libraries' own thread pools.
        max_batch_ns: a batch is expected to take no longer.
    """

    def __init__(
        self,
        channel: Channel,
        table: MatcherTable,
        counters: Counters,
        lock: Lock,
        answer_alone: Callable[[FillTask], None],
        threads: int,
        max_batch_ns: int,
    ) -> None:
        self._channel, self._table, self._counters = channel, table, counters
        self._lock, self._answer_alone, self._threads = lock, answer_alone, threads
        self._max_slots = min(MAX_SLOTS, channel.layout.num_slots)
        self._free: list[ChainArrays] = []
        self._max_batch_ns = max_batch_ns

    def split(
        self, seq: int, records: Sequence[Record], min_records: int = MIN_RECORDS
    ) -> tuple[list[BatchTask], list[Record]]:
        """Return batches of at least `min_records` fast or slow records, and the records that are not in a batch."""
        fast: list[Record] = []
        slow: list[Record] = []
        for record in records:
            slot = self._table.slots.get(record.slot)
            if slot is None or not slot.last_fill_ns or not is_batchable(slot.filler, record):
                continue
            if slot.last_fill_ns <= SLOW_NS:
                fast.append(record)
            elif slot.last_fill_ns <= MAX_SLOW_NS:
                slow.append(record)
        batches = []
        for group, slowest_ns in ((fast, SLOW_NS), (slow, MAX_SLOW_NS)):
            if len(group) >= min_records:
                size = self._batch_size(group, slowest_ns)
                batches += [BatchTask(seq, group[at : at + size], self.answer) for at in range(0, len(group), size)]
        taken = {slot for batch in batches for slot in batch.slots}
        return batches, [record for record in records if record.slot not in taken]

    def _batch_size(self, group: list[Record], slowest_ns: int) -> int:
        rows = 1 + max(len(record.drafts) for record in group)
        in_time = self._max_batch_ns * self._threads // slowest_ns
        return min(MAX_SLOTS, max(MIN_RECORDS, min(MAX_ROWS // rows, in_time)))

    def single(self, batch: BatchTask, record: Record) -> FillTask:
        """Return the task of one record of a batch."""
        task = FillTask(batch.seq, record, self._answer_alone)
        task.late = batch.late
        return task

    def part(self, batch: BatchTask, slots: Sequence[int]) -> list[FillTask]:
        """Take slots out of a batch that has not begun."""
        taken = [self.single(batch, record) for record in batch.records if record.slot in slots]
        batch.records = [record for record in batch.records if record.slot not in slots]
        batch.slots = tuple(record.slot for record in batch.records)
        return taken

    def publish_late(self, batch: BatchTask) -> None:
        """Publish answers without rows, once, unless complete answers are being published. Under the queues' lock."""
        batch.late_after_publishing = batch.publishing
        if batch.late or batch.publishing:
            return
        batch.late = True
        for record in batch.records:
            none = [-1] * (len(record.drafts) + 1)
            answer = record.slot, record.slot_gen, [int(RowKind.DEFER)] * len(none), none
            self._counters.late_answers += self._channel.publish(batch.seq, *answer, late=True)

    def abandon(self, batch: BatchTask) -> list[Task]:
        """Take the slots of a batch that hangs away from its thread. Under the queues' lock.

        Returns tasks that rebuild the matchers and answer the records one by one; () if the batch is about to end.
        """
        if batch.publishing:
            return []
        batch.abandoned = True
        tasks: list[Task] = []
        for record in batch.records:
            tasks.append(ChangeTask(record.slot, lambda slot=record.slot: self._renew(slot)))  # type: ignore[misc]
            tasks.append(self.single(batch, record))
        return tasks

    def _renew(self, number: int) -> None:
        # The abandoned thread has the old objects and may still move them, so the slot gets copies.
        if (old := self._table.slots.get(number)) is not None:
            tokens, budget = list(old.tokens), old.budget.copy() if old.budget else None
            num_committed = min(old.num_committed, len(tokens))
            slot = SlotMatcher(old.slot_gen, old.new_matcher, old.matcher, tokens, num_committed, budget, old.health)
            slot.problem, slot.request_id, slot.filler = old.problem, old.request_id, old.filler
            self._table.slots[number] = slot
            self._table.rebuild(slot)

    def expected_ns(self, batch: BatchTask) -> int:
        """Return the sum of the last fill times of the batch's slots."""
        slots = self._table.slots
        return sum(slots[number].last_fill_ns for number in batch.slots if number in slots)

    def answer(self, batch: BatchTask) -> list[FillTask]:
        """Answer the simple records of a batch; return tasks for the others."""
        groups: dict[ChainFiller, list[_SimpleRecord]] = collections.defaultdict(list)
        rest = []
        begun = time.perf_counter_ns()
        with self._lock:
            # This thread uses these objects alone, even after another thread has abandoned the batch and replaced them.
            held = [self._table.slots.get(number) for number in batch.slots]
        for record, slot in zip(batch.records, held, strict=True):
            first = self._move(slot, record) if slot is not None else -1
            if first >= 0 and slot is not None and slot.filler is not None:
                groups[slot.filler].append(_SimpleRecord(record, slot, first))
            else:
                rest.append(record)
        for filler, simple in groups.items():
            rest += self._fill(batch, filler, simple, begun)
            begun = time.perf_counter_ns()
        with self._lock:
            batch.publishing = True
            return [] if batch.abandoned else [self.single(batch, record) for record in rest]

    def _move(self, slot: SlotMatcher, record: Record) -> int:
        """Bring the matcher to the first needed row and return the row's number; -1: the record is not simple.

        The tokens that the matcher has moved over by then are those that `RecordAnswerer` would move over, too. Raises
        nothing.
        """
        try:
            return self._move_to_first_row(slot, record)
        except MatcherFailed:
            pass
        except Exception:
            # A defect of ours or of a library ends one request at most, when the record is answered by itself.
            logger.exception("slot %d: record %r", record.slot, record, extra={"request_id": slot.request_id})
        # The matcher's position is not known.
        self._table.rebuild(slot)
        return -1

    def _move_to_first_row(self, slot: SlotMatcher, record: Record) -> int:
        drafts, committed, start = record.drafts, record.committed, record.commit_pos
        filler, count, tokens = slot.filler, len(record.drafts), slot.tokens
        needed = record.need_rows & ((2 << count) - 1)
        first = (needed & -needed).bit_length() - 1
        is_good = slot.slot_gen == record.slot_gen and slot.health is Health.GOOD and start <= slot.num_committed
        if filler is None or not is_good or slot.matcher.terminated:
            return -1
        # Exactly the rows from `first` to the last one.
        if not needed or needed + (1 << first) != 2 << count:
            return -1
        end = start + len(committed)
        common = start
        while common < end and common < len(tokens) and tokens[common] == committed[common - start]:
            common += 1
        if slot.budget is not None and not slot.budget.is_far(common, end + count):
            return -1
        new = [*committed[common - start :], *drafts[:first]]
        if not filler.all_plain(new) or not filler.all_plain(drafts[first:]):
            return -1
        slot.rollback(common)
        slot.num_committed = common
        accepted = filler.accept(slot.matcher, new) if new else 0
        tokens += new[:accepted]
        slot.num_committed = min(end, common + accepted)
        return first if accepted == len(new) else -1

    def _fill(self, batch: BatchTask, filler: ChainFiller, simple: list[_SimpleRecord], begun: int) -> list[Record]:
        """Fill the rows of one backend's records and publish them; return the records that are still to be answered."""
        count = len(simple)
        arrays = self._take_arrays(simple)
        filled = self._fill_chains(batch, filler, simple, arrays)
        arrays.accepting[:count] = filled.accepting
        arrays.states[:count] = [SLOW if accepted < 0 else 0 for accepted in filled.num_accepted]
        with self._lock:
            if batch.abandoned:
                return []
            late, batch.publishing = batch.late, True
        self._channel.publish_chains(batch.seq, arrays, count, filler.special, publishes=not late)
        took = time.perf_counter_ns() - begun
        self._note_times(simple, took)
        rest = self._finish(batch, simple, filled, arrays, late=late)
        self._counters.took_together(arrays.slots[:count][arrays.states[:count] != SLOW], took // count)
        self._free.append(arrays)
        self._channel.heartbeat()
        with self._lock:
            batch.publishing = False
            if batch.late_after_publishing:
                self.publish_late(batch)
        return rest

    def _take_arrays(self, simple: list[_SimpleRecord]) -> ChainArrays:
        """Return arrays with the records' slots, drafts and first rows."""
        count, rows = len(simple), self._channel.layout.num_rows
        try:
            arrays = self._free.pop()
        except IndexError:
            arrays = self._channel.chains(self._max_slots, self._counters.tallies)
        arrays.slots[:count] = [one.record.slot for one in simple]
        arrays.slot_gens[:count] = [one.record.slot_gen for one in simple]
        arrays.n_draft[:count] = [len(one.record.drafts) for one in simple]
        arrays.first[:count] = [one.first for one in simple]
        drafts = [list(one.record.drafts[one.first :]) for one in simple]
        if any(drafts):
            arrays.drafts[:count] = [tokens + [0] * (rows - len(tokens)) for tokens in drafts]
        arrays.mark(count)
        return arrays

    def _fill_chains(
        self, batch: BatchTask, filler: ChainFiller, simple: list[_SimpleRecord], arrays: ChainArrays
    ) -> Filled:
        rows = self._channel.layout.num_rows
        chains = [
            Chain(one.slot.matcher, i * rows, list(one.record.drafts[one.first :])) for i, one in enumerate(simple)
        ]
        try:
            return filler.fill(chains, arrays.rows, self._threads)
        except Exception:
            # A defect of ours must not end the worker. Answered one by one, the records end one request at most.
            logger.exception("%r", batch)
            return Filled([-1] * len(simple), [False] * len(simple))

    def _note_times(self, simple: list[_SimpleRecord], took: int) -> None:
        """Give each slot its share of the batch's time, or have each timed by itself if the batch took far too long."""
        surprised = took > 4 * sum(one.slot.last_fill_ns for one in simple) + SURPRISE_NS
        for one in simple:
            alone = surprised and not one.slot.records_until_timing
            one.slot.records_until_timing = TIMING_INTERVAL if alone else max(0, one.slot.records_until_timing - 1)
            one.slot.last_fill_ns = 0 if alone else took // len(simple)

    def _finish(
        self, batch: BatchTask, simple: list[_SimpleRecord], filled: Filled, arrays: ChainArrays, *, late: bool
    ) -> list[Record]:
        """Move the matchers' tokens, count the rows, and add rows to answers that were published without them."""
        count, rest = len(simple), []
        states = arrays.states[:count].tolist()
        answers = (array[:count].tolist() for array in (arrays.kinds, arrays.forced))
        for one, accepted, state, *answer in zip(simple, filled.num_accepted, states, *answers, strict=True):
            record, slot, first = one
            if accepted < 0:
                self._table.rebuild(slot)
            elif accepted:
                slot.tokens += record.drafts[first : first + accepted]
            if state == SLOW:
                rest.append(record)
            elif late:
                self._channel.add_rows(batch.seq, record.slot, *answer, late=False)
        done = arrays.states[:count] != SLOW
        num_records, num_rows = int(done.sum()), int((arrays.kinds[:count][done] != RowKind.DEFER).sum())
        counters = self._counters
        counters.records += num_records
        counters.batched_records += num_records
        counters.filled_rows += num_rows
        counters.late_rows += num_rows * late
        return rest

    def __repr__(self) -> str:
        return f"<BatchAnswerer of at most {self._max_slots} slots, {self._threads} threads>"
