"""Records of many slots answered together: matchers move one by one, one native call writes rows, one publishes them.

Only what is plain goes this way: the matcher is well and at or behind the record's place, the answer's end is far, all
rows behind the first wanted one are wanted, and none of them stands already. Invariant: a row that is published here is
the row that the slot-by-slot way would have given; whatever is not plain, or what the native calls cannot tell, is
handed back as questions of one slot each. Not here: that way (worker.py), and who holds the lanes (lanes.py).
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
from grammar_service.fill.mask_row_cache import MaskRowCache, Noted
from grammar_service.fill.matchers import Health, Slot, SlotTable, roll_back
from grammar_service.fill.tasks import Batch, Change, FillTask, goes_together
from grammar_service.fill.work_queues import Work
from shared_mem.chains import SLOW, ChainArrays
from shared_mem.grammar_end import Record
from shared_mem.layout import RowKind

logger = logging.getLogger(__name__)

LEAST = 4
"""Fewer records go slot by slot: the calls for a batch cost as much as so many records save."""
MOST_SLOTS, MOST_ROWS = 32, 256
"""Of one batch. Its answers are out while the next one is filled, and its rows fit a second-level cache."""
DEAR_NS, DEAREST_NS = 500_000, 4_000_000
"""A slot whose last record took longer than the first is batched among its like, behind the others, where so many are
dear that it alone does not make that batch longer. Never one that took longer than the second."""
SURPRISE_NS, REMEMBERED = 2_000_000, 64
"""A batch that takes four times what its slots took before, and this, had a dear one: each is timed by itself the next
time, but no slot twice in so many records."""


class _Plain(NamedTuple):
    """A slot that stands where its first wanted row is."""

    record: Record
    slot: Slot
    standing: MaskRowCache
    first: int


class Batches:
    """Makes and answers batches. Any number of threads, each with its own batch.

    Args:
        channel: rows and answers go there.
        table, standing, books: of the worker; slots whose lanes the caller holds are touched.
        lock: of the lanes.
        ask: answers one question, slot by slot.
        threads: of the libraries' pools.
        most_ns: a batch is expected to take no longer.
    """

    def __init__(
        self,
        channel: Channel,
        table: SlotTable,
        standing: list[MaskRowCache],
        books: Counters,
        lock: Lock,
        ask: Callable[[FillTask], None],
        threads: int,
        most_ns: int,
    ) -> None:
        self._channel, self._table, self._standing, self._books = channel, table, standing, books
        self._lock, self._ask, self._threads = lock, ask, threads
        self._most = min(MOST_SLOTS, channel.layout.num_slots)
        self._free: list[ChainArrays] = []
        self._most_ns = most_ns

    def split(self, seq: int, records: Sequence[Record], least: int = LEAST) -> tuple[list[Batch], list[Record]]:
        """Return batches of what may be plain, at least `least` records in all, and the rest."""
        found = [self._table.slots.get(record.slot) for record in records]
        costs = [
            slot.cost_ns if slot is not None and goes_together(slot.filler, record) else 0
            for slot, record in zip(found, records, strict=True)
        ]
        most_ns = min(max(DEAR_NS, sum(costs) // self._threads), DEAREST_NS)
        cheap = [record for record, cost in zip(records, costs, strict=True) if 0 < cost <= DEAR_NS]
        dear = [record for record, cost in zip(records, costs, strict=True) if DEAR_NS < cost <= most_ns]
        batches = []
        for group, worst_ns in ((cheap, DEAR_NS), (dear, most_ns)):
            if len(group) >= least:
                rows = 1 + max(len(record.drafts) for record in group)
                fits = min(MOST_ROWS // rows, self._most_ns * self._threads // worst_ns)
                most = min(MOST_SLOTS, max(LEAST, fits))
                batches += [Batch(seq, group[at : at + most], self.answer) for at in range(0, len(group), most)]
        taken = {lane for batch in batches for lane in batch.lanes}
        return batches, [record for record in records if record.slot not in taken]

    def question(self, batch: Batch, record: Record) -> FillTask:
        """Return the question of one slot of a batch."""
        question = FillTask(batch.seq, record, self._ask)
        question.late = batch.late
        return question

    def parted(self, batch: Batch, lanes: Sequence[int]) -> list[FillTask]:
        """Take lanes out of a batch that has not begun."""
        taken = [self.question(batch, record) for record in batch.records if record.slot in lanes]
        batch.records = [record for record in batch.records if record.slot not in lanes]
        batch.lanes = tuple(record.slot for record in batch.records)
        return taken

    def tell_late(self, batch: Batch) -> None:
        """Publish answers without rows, once, unless the whole ones are on their way. Under the lanes' lock."""
        batch.owed = batch.settled
        if batch.late or batch.settled:
            return
        batch.late = True
        for record in batch.records:
            none = [-1] * (len(record.drafts) + 1)
            told = record.slot, record.slot_gen, [int(RowKind.DEFER)] * len(none), none
            self._books.late_answers += self._channel.publish(batch.seq, *told, late=True)

    def abandon(self, batch: Batch) -> list[Work]:
        """Take a batch that does not end out of its thread's hands: its slots get matchers made anew, and are asked one
        by one. Under the lanes' lock; () when it is about to end after all.
        """
        if batch.settled:
            return []
        batch.abandoned = True
        works: list[Work] = []
        for record in batch.records:
            works.append(Change(record.slot, lambda number=record.slot: self._renew(number)))  # type: ignore[misc]
            works.append(self.question(batch, record))
        return works

    def _renew(self, number: int) -> None:
        # The thread that was left behind has the old objects, and may still move them.
        if (old := self._table.slots.get(number)) is not None:
            tokens, closing = list(old.tokens), old.closing.copy() if old.closing else None
            slot = Slot(old.gen, old.fresh, old.matcher, tokens, min(old.certain, len(tokens)), closing, old.health)
            slot.problem, slot.request_id, slot.filler = old.problem, old.request_id, old.filler
            self._table.slots[number], self._standing[number] = slot, MaskRowCache()
            self._table.rebuild(slot)

    def known_ns(self, batch: Batch) -> int:
        """Return what the batch's slots took the last time, together."""
        slots = self._table.slots
        return sum(slots[lane].cost_ns for lane in batch.lanes if lane in slots)

    def answer(self, batch: Batch) -> list[FillTask]:
        """Answer what is plain; return the rest."""
        groups: dict[ChainFiller, list[_Plain]] = collections.defaultdict(list)
        rest = []
        begun = time.perf_counter_ns()
        with self._lock:
            # Only these from here on: who abandons the batch puts others in their place.
            held = [(self._table.slots.get(lane), self._standing[lane]) for lane in batch.lanes]
        for record, (slot, standing) in zip(batch.records, held, strict=True):
            first = self._stand(slot, standing, record) if slot is not None else -1
            if first >= 0 and slot is not None and slot.filler is not None:
                groups[slot.filler].append(_Plain(record, slot, standing, first))
            else:
                rest.append(record)
        for filler, plains in groups.items():
            rest += self._fill(batch, filler, plains, begun)
            begun = time.perf_counter_ns()
        with self._lock:
            batch.settled = True
            return [] if batch.abandoned else [self.question(batch, record) for record in rest]

    def _stand(self, slot: Slot, standing: MaskRowCache, record: Record) -> int:
        """Bring the matcher to the first wanted row and return its number; -1: the record is not plain.

        What was moved by then is what the slot-by-slot way would have moved, too. Raises nothing.
        """
        try:
            return self._moved(slot, standing, record)
        except MatcherFailed:
            pass
        except Exception:
            # A defect of ours, or of a library's, ends one request at most, by the slot-by-slot way.
            logger.exception("slot %d: record %r", record.slot, record, extra={"request_id": slot.request_id})
        # How far the matcher came nobody knows.
        self._table.rebuild(slot)
        return -1

    def _moved(self, slot: Slot, standing: MaskRowCache, record: Record) -> int:
        drafts, committed, start = record.drafts, record.committed, record.commit_pos
        filler, count, tokens = slot.filler, len(record.drafts), slot.tokens
        need = record.need_rows & ((2 << count) - 1)
        first = (need & -need).bit_length() - 1
        well = slot.gen == record.slot_gen and slot.health is Health.GOOD and start <= slot.certain
        if filler is None or not well or not need or need + (1 << first) != 2 << count or slot.matcher.terminated:
            return -1
        if not standing.is_clean(record):
            return -1
        end = start + len(committed)
        keep = start
        while keep < end and keep < len(tokens) and tokens[keep] == committed[keep - start]:
            keep += 1
        if slot.closing is not None and not slot.closing.is_far(keep, end + count):
            return -1
        new = [*committed[keep - start :], *drafts[:first]]
        if not filler.all_plain(new) or not filler.all_plain(drafts[first:]):
            return -1
        if len(tokens) > keep:
            roll_back(slot, keep)
        slot.certain = keep
        taken = filler.accept(slot.matcher, new) if new else 0
        tokens += new[:taken]
        slot.certain = min(end, keep + taken)
        return first if taken == len(new) else -1

    def _fill(self, batch: Batch, filler: ChainFiller, plains: list[_Plain], begun: int) -> list[Record]:
        """Fill and publish; return records that are still to be answered."""
        count, rows = len(plains), self._channel.layout.num_rows
        try:
            arrays = self._free.pop()
        except IndexError:
            arrays = self._channel.chains(self._most, self._books.tallies)
        chains = []
        for i, (record, slot, _, first) in enumerate(plains):
            chains.append(Chain(slot.matcher, i * rows, list(record.drafts[first:])))
        arrays.slots[:count] = [plain.record.slot for plain in plains]
        arrays.slot_gens[:count] = [plain.record.slot_gen for plain in plains]
        arrays.n_draft[:count] = [len(plain.record.drafts) for plain in plains]
        arrays.first[:count] = [plain.first for plain in plains]
        if any(chain.drafts for chain in chains):
            arrays.drafts[:count] = [chain.drafts + [0] * (rows - len(chain.drafts)) for chain in chains]
        arrays.mark(count)
        try:
            filled = filler.fill(chains, arrays.rows, self._threads)
        except Exception:
            # A defect of ours must not end the worker; slot by slot it ends one request at most.
            logger.exception("%r", batch)
            filled = Filled([-1] * count, [False] * count)
        arrays.accepting[:count] = filled.accepting
        arrays.states[:count] = [SLOW if stands < 0 else 0 for stands in filled.num_accepted]
        with self._lock:
            if batch.abandoned:
                return []
            late, batch.settled = batch.late, True
        self._channel.publish_chains(batch.seq, arrays, count, filler.special, publishes=not late)
        took = time.perf_counter_ns() - begun
        surprised = took > 4 * sum(plain.slot.cost_ns for plain in plains) + SURPRISE_NS
        for plain in plains:
            again = surprised and not plain.slot.timed
            plain.slot.timed = REMEMBERED if again else max(0, plain.slot.timed - 1)
            plain.slot.cost_ns = 0 if again else took // count
        rest = self._settle(batch, plains, filled, arrays, late=late)
        self._books.took_together(arrays.slots[:count][arrays.states[:count] != SLOW], took // count)
        self._free.append(arrays)
        self._channel.heartbeat()
        with self._lock:
            batch.settled = False
            if batch.owed:
                self.tell_late(batch)
        return rest

    def _settle(
        self, batch: Batch, plains: list[_Plain], filled: Filled, arrays: ChainArrays, *, late: bool
    ) -> list[Record]:
        """Keep the books of a batch whose rows are in place, and add rows to answers that went out without."""
        count, half, rest = len(plains), batch.seq & 1, []
        states = arrays.states[:count].tolist()
        answers = (array[:count].tolist() for array in (arrays.kinds, arrays.forced))
        for plain, stands, state, *answer in zip(plains, filled.num_accepted, states, *answers, strict=True):
            record, slot, standing, first = plain
            if stands < 0:
                self._table.rebuild(slot)
            elif stands:
                slot.tokens += record.drafts[first : first + stands]
            if state == SLOW:
                rest.append(record)
                continue
            standing.note(Noted(half, record.drafts, first, *answer))
            if late:
                self._channel.add_rows(batch.seq, record.slot, *answer, late=False)
        told = arrays.states[:count] != SLOW
        done, stand = int(told.sum()), int((arrays.kinds[:count][told] != RowKind.DEFER).sum())
        books = self._books
        books.records += done
        books.batched_records += done
        books.filled_rows += stand
        books.late_rows += stand * late
        return rest

    def __repr__(self) -> str:
        return f"<Batches of at most {self._most} slots, {self._threads} threads>"
