"""Records of many slots answered together: each matcher moves, one native call writes the rows, another publishes them.

    split:   fast records in batches, slow records and proposals in separate batches, the rest and trees one by one
    answer:  move each matcher to its record's first needed row (chain_moves.py)
             one call of the library fills the rows of all chains, without the GIL
             one native call copies the rows into place and publishes the answers
    propose: move each matcher after the committed tokens, and ask it for jump-forward tokens
             one native call publishes the answers
    both:    the records that are not simple, or that the native calls could not finish, become `FillTask`s

Invariant: an answer that is published here equals the answer that `RecordAnswerer` would have published.

Not responsible for: single records (see answers.py), which thread holds the slots (see work_queues.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from grammar_service.backends.backend import ChainFiller, Filled
from grammar_service.fill.chain_moves import MovedChains, move_chains
from grammar_service.fill.channel import Channel
from grammar_service.fill.counters import Counters
from grammar_service.fill.matchers import MatcherTable, SlotMatcher
from grammar_service.fill.tasks import BatchTask, ChangeTask, FillTask
from grammar_service.fill.work_queues import Task
from service_runtime.threads import Lock
from shared_mem.chains import SLOW, ChainArrays
from shared_mem.layout import RowKind, Stage
from shared_mem.records import Records

logger = logging.getLogger(__name__)

MIN_RECORDS = 4
"""Fewer records are answered one by one: the calls for a batch cost as much as so many records save."""
MAX_SLOTS, MAX_ROWS = 64, 256
"""The most slots of a batch. Its answers are out while the next batch is filled, and its rows fit into an L2 cache."""
SLOW_NS = 500_000
"""A slot whose last record took longer is slow: it is batched with other slow slots, after the fast ones."""
MAX_SLOW_NS = 4_000_000
"""A slot whose last record took longer is never batched."""
SURPRISE_NS, TIMING_INTERVAL = 2_000_000, 64
"""A batch that takes four times as long as its slots took before, and SURPRISE_NS more, has a slow slot: each slot is
then timed by itself once, but not again within TIMING_INTERVAL posts."""
PROPOSALS_PER_LOOK = 8
"""Proposals between two looks whether the engine still waits for them."""


class BatchAnswerer:
    """Makes and answers `BatchTask`s. Any number of threads, each with its own batch.

    Args:
        channel: receives rows and answers.
        table: the worker's matchers; a thread touches only matchers of slots that it holds.
        counters: the worker's.
        lock: the work queues' lock.
        answer_alone: answers one `FillTask`.
        threads: for the libraries' own thread pools.
        max_batch_ns: a batch is expected to take no longer.
        now_ns: the clock that measures fills.
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
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._channel, self._table, self._counters = channel, table, counters
        self._lock, self._answer_alone, self._threads = lock, answer_alone, threads
        self._max_slots = min(MAX_SLOTS, channel.layout.num_slots)
        self._free: list[ChainArrays] = []
        self._max_batch_ns, self._now_ns = max_batch_ns, now_ns

    def split(self, records: Records, min_records: int = MIN_RECORDS) -> tuple[list[BatchTask], list[int]]:
        """Return batches of at least `min_records` records, and the numbers of the records that are not in a batch."""
        slots = self._table.slots
        fast: list[int] = []
        slow: list[int] = []
        proposals: list[int] = []
        for index, (number, first, stage) in enumerate(zip(records.slots, records.first, records.stage, strict=True)):
            slot = slots.get(number)
            if slot is None or first < 0 or slot.filler is None or stage == Stage.TREE:
                continue
            if stage == Stage.PROPOSE:
                proposals.append(index)
            elif 0 < slot.last_fill_ns <= SLOW_NS:
                fast.append(index)
            elif 0 < slot.last_fill_ns <= MAX_SLOW_NS:
                slow.append(index)
        batches = []
        for group, fill in ((proposals, self.propose), (fast, self.answer), (slow, self.answer)):
            if len(group) >= min_records:
                size = self._batch_size(records, group)
                batches += [BatchTask(records, group[at : at + size], fill) for at in range(0, len(group), size)]
        taken = {index for batch in batches for index in batch.which}
        return batches, [index for index in range(len(records)) if index not in taken]

    def _batch_size(self, records: Records, group: list[int]) -> int:
        slots = [self._table.slots[records.slots[index]] for index in group]
        rows = 1 + max([0 if records.stage[i] == Stage.PROPOSE else records.n_draft[i] for i in group])
        slowest_ns = max(1, *[slot.last_fill_ns for slot in slots])
        in_time = self._max_batch_ns * self._threads // slowest_ns
        filler = slots[0].filler
        alone = rows > 1 and filler is not None and not filler.threaded
        share = -(-len(group) // self._threads) if alone else MAX_SLOTS
        return min(MAX_SLOTS, max(MIN_RECORDS, min(MAX_ROWS // rows, in_time, share)))

    def single(self, batch: BatchTask, index: int) -> FillTask:
        """Return the task of one record of a batch."""
        task = FillTask(batch.seq, batch.records[index], self._answer_alone)
        task.late = batch.late
        return task

    def part(self, batch: BatchTask, slots: Sequence[int]) -> list[FillTask]:
        """Take slots out of a batch that has not begun."""
        return [self.single(batch, index) for index in batch.leave_out(slots)]

    def publish_late(self, batch: BatchTask) -> None:
        """Publish answers without rows, once, unless complete answers are being published. Under the queues' lock."""
        batch.late_after_publishing = batch.publishing
        if batch.late or batch.publishing:
            return
        batch.late = True
        for record in map(batch.records.__getitem__, batch.which):
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
        for index, number in zip(batch.which, batch.slots, strict=True):
            tasks.append(ChangeTask(number, lambda slot=number: self._renew(slot)))  # type: ignore[misc]
            tasks.append(self.single(batch, index))
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
        return sum([slots[number].last_fill_ns for number in batch.slots if number in slots])

    def answer(self, batch: BatchTask) -> list[FillTask]:
        """Answer the simple records of a batch; return tasks for the others."""
        begun = self._now_ns()
        groups, rest = self._move(batch)
        for filler, chains in groups:
            rest += self._fill(batch, filler, chains, begun)
            begun = self._now_ns()
        return self._singles(batch, rest)

    def _move(self, batch: BatchTask) -> tuple[list[tuple[ChainFiller, MovedChains]], list[int]]:
        with self._lock:
            # Only this thread uses these objects, even after another thread has abandoned the batch and replaced them.
            held = [self._table.slots.get(number) for number in batch.slots]
        return move_chains(self._table, batch.records, batch.which, held)

    def _singles(self, batch: BatchTask, rest: list[int]) -> list[FillTask]:
        with self._lock:
            batch.publishing = True
            return [] if batch.abandoned else [self.single(batch, index) for index in rest]

    def _take_arrays(self, batch: BatchTask, which: list[int]) -> ChainArrays:
        """Return arrays that have taken the records of these numbers."""
        try:
            arrays = self._free.pop()
        except IndexError:
            arrays = self._channel.chains(self._max_slots, self._counters.tallies)
        arrays.take(batch.records, which)
        return arrays

    def _begin_publishing(self, batch: BatchTask) -> bool:
        """Return False if the batch was abandoned: then nothing of it may be published or counted."""
        with self._lock:
            batch.publishing = not batch.abandoned
            return batch.publishing

    def _end_publishing(self, batch: BatchTask, arrays: ChainArrays, num_records: int) -> None:
        self._free.append(arrays)
        self._channel.heartbeat()
        with self._lock:
            self._counters.records += num_records
            self._counters.batched_records += num_records
            batch.publishing = False
            if batch.late_after_publishing:
                self.publish_late(batch)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _fill(self, batch: BatchTask, filler: ChainFiller, chains: MovedChains, begun: int) -> list[int]:
        """Fill the rows of one backend's records and publish them; return the records that are still to be answered."""
        count = len(chains.which)
        arrays = self._take_arrays(batch, chains.which)
        filled = self._fill_chains(batch, filler, chains, arrays)
        arrays.accepting[:count] = 0
        if filled.accepting:
            arrays.accepting[filled.accepting] = 1
        if filled.failed:
            arrays.states[filled.failed] = SLOW
        if not self._begin_publishing(batch):
            return []
        late = batch.late
        self._channel.publish_chains(batch.seq, arrays, filler.special, publishes=not late)
        took = self._now_ns() - begun
        self._note_times(batch.seq, chains.slots, took)
        rest = self._finish(batch, chains, filled, arrays, late=late)
        self._count_rows(arrays, took // count, late=late)
        self._end_publishing(batch, arrays, arrays.num_answered)
        return rest

    def _fill_chains(self, batch: BatchTask, filler: ChainFiller, chains: MovedChains, arrays: ChainArrays) -> Filled:
        records, drafts = batch.records, []
        for index in chains.which:
            behind = records.n_commit[index] + records.first[index]
            drafts.append(records.tokens[index][behind : records.n_commit[index] + records.n_draft[index]])
        matchers = [slot.matcher for slot in chains.slots]
        try:
            return filler.fill(matchers, drafts, arrays.rows, self._channel.layout.num_rows, self._threads)
        except Exception:
            # A defect of ours must not end the worker. Answered one by one, the records end one request at most.
            logger.exception("%r", batch)
            return Filled(list(range(len(matchers))), [])

    def _note_times(self, seq: int, slots: list[SlotMatcher], took: int) -> None:
        """Give each slot its share of the batch's time, or have each timed by itself if the batch took far too long."""
        surprised = took > 4 * sum([slot.last_fill_ns for slot in slots]) + SURPRISE_NS
        share = took // len(slots)
        for slot in slots:
            if surprised and seq >= slot.next_timing_seq:
                slot.last_fill_ns, slot.next_timing_seq = 0, seq + TIMING_INTERVAL
            else:
                slot.last_fill_ns = share

    def _finish(
        self, batch: BatchTask, chains: MovedChains, filled: Filled, arrays: ChainArrays, *, late: bool
    ) -> list[int]:
        """Rebuild the matchers that failed, and add rows to answers that were published without them.

        Returns the records that the native call skipped.
        """
        for i in filled.failed:
            self._table.rebuild(chains.slots[i])
        count = len(chains.which)
        left_alone = arrays.states[:count] == SLOW
        if late:
            for i in np.flatnonzero(~left_alone).tolist():
                self._add_rows(batch, arrays, i)
        if arrays.num_answered == count:
            return []
        return [chains.which[i] for i in np.flatnonzero(left_alone).tolist()]

    def _add_rows(self, batch: BatchTask, arrays: ChainArrays, i: int) -> None:
        answer = int(arrays.slots[i]), arrays.kinds[i].tolist(), arrays.forced[i].tolist()
        self._channel.add_rows(batch.seq, *answer, late=False)

    def _count_rows(self, arrays: ChainArrays, share_ns: int, *, late: bool) -> None:
        counters, count = self._counters, arrays.count
        slots = arrays.slots[:count]
        counters.took_together(
            slots if arrays.num_answered == count else slots[arrays.states[:count] != SLOW], share_ns
        )
        with self._lock:
            counters.filled_rows += arrays.num_rows
            counters.late_rows += arrays.num_rows * late

    # -- jump-forward tokens ------------------------------------------------------------------------------------------

    def propose(self, batch: BatchTask) -> list[FillTask]:
        """Answer the simple proposals of a batch; return tasks for the others.

        A proposal that the engine no longer waits for is answered with nothing: the slot's next record commits the same
        tokens again.
        """
        if self._is_stale(batch):
            self._publish_proposals(batch, batch.which, [()] * len(batch.which))
            self._counters.dropped_proposals += len(batch.which)
            return self._singles(batch, [])
        groups, rest = self._move(batch)
        for _, chains in groups:
            self._publish_proposals(batch, chains.which, self._proposed(batch, chains))
        return self._singles(batch, rest)

    def _is_stale(self, batch: BatchTask) -> bool:
        # The engine posts and waits in program order, so a newer sequence shows that it has stopped waiting.
        return self._channel.newest_seq() > batch.seq

    def _proposed(self, batch: BatchTask, chains: MovedChains) -> list[tuple[int, ...]]:
        """Return the proposal of each slot, an empty one from the moment on at which the engine stops waiting."""
        records, proposed = batch.records, list[tuple[int, ...]]()
        for index, slot in zip(chains.which, chains.slots, strict=True):
            if len(proposed) % PROPOSALS_PER_LOOK == 0 and self._is_stale(batch):
                break
            try:
                proposed.append(self._table.propose(slot, records.need_rows[index].bit_count()))
            except Exception:
                # A proposal is a convenience: a defect in it ends nothing.
                logger.exception("%r", batch, extra={"request_id": slot.request_id})
                proposed.append(())
        num_dropped = len(chains.which) - len(proposed)
        self._counters.dropped_proposals += num_dropped
        self._counters.proposed_tokens += sum(map(len, proposed))
        return proposed + [()] * num_dropped

    def _publish_proposals(self, batch: BatchTask, which: list[int], proposed: list[tuple[int, ...]]) -> None:
        arrays, count = self._take_arrays(batch, which), len(which)
        arrays.kinds[:count], arrays.forced[:count] = RowKind.DEFER, -1
        for i, tokens in enumerate(proposed):
            if tokens:
                arrays.kinds[i, : len(tokens)], arrays.forced[i, : len(tokens)] = RowKind.FORCED, tokens
        if not self._begin_publishing(batch):
            return
        if batch.late:
            for i in range(count):
                self._add_rows(batch, arrays, i)
        else:
            self._channel.publish_answers(batch.seq, arrays)
        self._end_publishing(batch, arrays, count)

    def __repr__(self) -> str:
        return f"<BatchAnswerer of at most {self._max_slots} slots, {self._threads} threads>"
