"""The grammar process's end of the step plane: waits for records, fills mask rows, publishes answers.

Invariant: writes ANS, MASK and the grammar process's words, nothing else. One thread waits and reads records; threads
with different slots may publish at the same time. Not responsible for: matchers (see grammar_service/fill/). See
channel.py.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared_mem import native
from shared_mem.batch import Int32Array
from shared_mem.chains import ChainArrays, SpecialWords
from shared_mem.errors import InvalidField, RingOverrun
from shared_mem.layout import Layout, RowKind, Word
from shared_mem.native import DEFAULT_SPIN_NS
from shared_mem.records import NUM_FIELDS, Record, Records
from shared_mem.segment import Segment, mask_views


class GrammarEnd:
    """The grammar process's role. Holds the mapping; does not close the segment."""

    def __init__(self, segment: Segment) -> None:
        self.layout: Layout = segment.layout
        self.start_seq = segment.start_seq
        """The first `wait` starts after this sequence: earlier posts were for a predecessor of this process."""
        self.row_stride = self.layout.row_stride
        self._memory = segment.memory
        self._address = native.address_of(self._memory)
        self._view = native.View.of(self.layout, self._address)
        self._masks = mask_views(self.layout, self._memory)
        slots, rows = self.layout.num_slots, self.layout.num_rows
        self._in = np.zeros((NUM_FIELDS, slots), dtype=np.int32)
        self._in_tokens = np.zeros((slots, 2 * rows), dtype=np.int32)
        at = native.address_of
        self._records_args = native.RecordsArgs(ctypes.pointer(self._view), *map(at, self._in), at(self._in_tokens))
        self._records_pointer = ctypes.addressof(self._records_args)
        self._kinds = np.zeros((slots, rows), dtype=np.uint8)
        self._forced = np.zeros((slots, rows), dtype=np.int32)
        self._publish_args = [
            native.PublishArgs(ctypes.pointer(self._view), at(self._kinds[s]), at(self._forced[s]), 0, s, 0, 0)
            for s in range(slots)
        ]
        self._working = np.zeros(1, dtype=np.uint64)
        self._working_address = at(self._working)
        self._watch = np.zeros(2, dtype=np.int64)  # `ls_watch`: written only by the calls of `overdue`
        self._watch_address = at(self._watch)
        self._waits = self._records = self._overruns = 0
        # Per slot: threads with different slots share no counter.
        self._published = np.zeros((2, slots), dtype=np.int64)

    def wait(self, last_seq: int, timeout_s: float, spin_ns: int = DEFAULT_SPIN_NS) -> int:
        """Wait until a sequence after `last_seq` is posted, and return the newest; `last_seq` at the timeout.

        Spins for `spin_ns` and then sleeps. Releases the GIL. The call stamps the heartbeat at its start and its end,
        so `timeout_s` should be well under the age at which the engine considers this process hung.
        """
        self._waits += 1
        seq: int = native.wait_req(self._view, last_seq, int(timeout_s * 1e9), spin_ns, self._working_address)
        return seq

    def newest_seq(self) -> int:
        """Return the newest posted sequence without waiting. Any thread."""
        return int(native.load64(self._word(Word.REQ_SEQ)))

    def overdue(self, limit_ns: int, timeout_s: float) -> bool:
        """Wait until the thread that waits for records has been away from `wait` for `limit_ns`; False: not in time.

        For one other thread at a time. Releases the GIL. Looks every half of the limit, or every 10 ms where no
        sequence was posted for 100 ms: the steps of an unconstrained batch post none.
        """
        late: int = native.overdue(
            self._view, self._working_address, self._watch_address, limit_ns, int(timeout_s * 1e9)
        )
        return bool(late)

    def take_over(self, ahead_ns: int = 0) -> None:
        """Restart the time that `overdue` measures, now or `ahead_ns` from now.

        Called when the next piece of work starts, or when another thread has taken over the current one.
        """
        native.store64(self._working_address, time.monotonic_ns() + ahead_ns)

    def read(self, seq: int) -> Records:
        """Return the records of `seq`, a copy as arrays. One native call reads all of them.

        Raises:
            RingOverrun: they were overwritten (this end is `num_recs` posts late), before or during the copy.
        """
        args = self._records_args
        args.seq = seq
        native.records(self._records_pointer)
        if args.status != native.OK:
            self._overruns += 1
            raise RingOverrun(seq)
        n = args.count
        self._records += n
        return Records(seq, self._in[:, :n].copy(), self._in_tokens[:n].copy())

    def records(self, seq: int) -> list[Record]:
        """Return the records of `seq` as values; see `read`."""
        return list(self.read(seq))

    def row_address(self, seq: int, slot: int, row: int) -> int:
        """Return where to write a mask row: W words of `row_stride` bytes. Rows of a slot follow each other."""
        return self._address + self.layout.row_offset(seq, slot, row)

    def mask_rows(self, seq: int) -> Int32Array:
        """Return the mask rows of `seq` to write, int32 [num_slots, R, row_stride / 4]."""
        return self._masks[seq & 1]

    def publish(
        self,
        seq: int,
        slot: int,
        slot_gen: int,
        kinds: Sequence[int],
        forced: Sequence[int] | None = None,
        *,
        late: bool = False,
    ) -> bool:
        """Publish a slot's answer after its mask rows are written. One thread per slot at a time.

        Args:
            seq: the sequence number of the answered record.
            slot: 0 <= slot < num_slots.
            slot_gen: the record's slot_gen.
            kinds: at most R RowKinds; the rows after them become DEFER.
            forced: as long as `kinds`; tokens of the FORCED rows, elsewhere STEERED or -1. None: all -1.
            late: rows that are DEFER here may still come, by `add_rows`, until a call of that says that none will.

        Returns:
            False when an answer of the same or a newer sequence is there; nothing was written.

        Raises:
            InvalidField: slot out of range, or more kinds than rows.
        """
        if not 0 <= slot < self.layout.num_slots:
            raise InvalidField("slot", f"{slot} is not in [0, {self.layout.num_slots})")
        n = len(kinds)
        if n > self.layout.num_rows:
            raise InvalidField("kinds", f"{n} rows, the segment has {self.layout.num_rows}")
        self._kinds[slot, :n] = kinds
        self._kinds[slot, n:] = RowKind.DEFER
        _fill(self._forced[slot], forced, n)
        args = self._publish_args[slot]
        args.seq, args.slot_gen, args.late = seq, slot_gen, late
        stale: int = native.publish(ctypes.addressof(args))
        self._published[stale, slot] += 1
        return not stale

    def add_rows(self, seq: int, slot: int, kinds: Sequence[int], forced: Sequence[int], *, late: bool) -> bool:
        """Add rows to a late answer, after their mask rows are written. One thread per slot at a time.

        A row that was published is unchanged; DEFER adds nothing. Arguments as in `publish`; `late` False: no
        row will come any more. Returns False when another answer is there; nothing was written.
        """
        n = len(kinds)
        self._kinds[slot, :n] = kinds
        self._kinds[slot, n:] = RowKind.DEFER
        self._forced[slot, :n] = forced
        args = self._publish_args[slot]
        args.seq, args.late = seq, late
        return not native.add_rows(ctypes.addressof(args))

    def chains(self, max_chains: int, tallies: npt.NDArray[np.int64]) -> ChainArrays:
        """Return arrays for at most `max_chains` slots that are answered together; rows are counted in `tallies`."""
        arrays = ChainArrays(self.layout, max_chains)
        arrays.bind(self._view, tallies, self._published)
        return arrays

    def publish_chains(self, seq: int, arrays: ChainArrays, special: SpecialWords, *, publishes: bool = True) -> None:
        """Publish the answers of the chains, each as `publish` does, after copying their rows into the segment.

        Chains whose state is SLOW then were skipped. Releases the GIL. `publishes` False: only copies the rows.
        """
        arrays.publish(seq, self._address + self.layout.row_offset(seq, 0, 0), special, publishes=publishes)

    def publish_answers(self, seq: int, arrays: ChainArrays) -> None:
        """Publish the kinds and forced tokens of the chains, each as `publish` does. No mask row is written."""
        arrays.publish_answers(seq)

    @property
    def permissive(self) -> bool:
        """True: answer ALL to everything (the engine warms up or captures)."""
        return bool(native.load32(self._word(Word.PERMISSIVE)))

    def heartbeat(self) -> None:
        """Stamp the heartbeat of the grammar process during long work."""
        native.stamp(self._word(Word.HB_GRAMMAR))

    def heartbeat_age_ns(self) -> int | None:
        """Return the age of the engine's heartbeat in nanoseconds, or None before the first."""
        age: int = native.age_ns(self._word(Word.HB_ENGINE))
        return None if age < 0 else age

    def stats(self) -> dict[str, int]:
        """Return counters since the start."""
        published, stale = self._published.sum(axis=1).tolist()
        return {
            "waits": self._waits,
            "records": self._records,
            "overruns": self._overruns,
            "published": published,
            "stale_answers": stale,
        }

    def _word(self, word: Word) -> int:
        return self._address + self.layout.word_offset(word)

    def __repr__(self) -> str:
        return f"GrammarEnd(generation={self.layout.generation}, {self.stats()})"


def _fill(target: Int32Array, values: Sequence[int] | None, n: int) -> None:
    if values is None:
        target[:] = -1
        return
    if len(values) != n:
        raise InvalidField("forced", f"{len(values)} values for {n} rows")
    target[:n] = values
    target[n:] = -1
