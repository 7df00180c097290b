"""The engine's end of the step plane: posts records, awaits answers, reads mask rows, sets the engine's words.

Invariant: writes REC and the engine's words, nothing else. One thread (or CUDA stream) posts and awaits; `set_abort`,
`clear_abort`, `heartbeat` and the ages are for any thread. Not responsible for: using the answers (see
gpu_engine/step/). See channel.py.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared_mem import native
from shared_mem.batch import BatchArrays, ByteArray, Int32Array
from shared_mem.errors import InvalidField
from shared_mem.layout import Stage, Word
from shared_mem.native import DEFAULT_SPIN_NS
from shared_mem.segment import Segment, mask_views

_POST_PROBLEMS = {
    native.BAD_SLOT: ("slots", "a slot is not in [0, {slots}), or is there twice"),
    native.BAD_N_COMMIT: ("n_commit", "not in [0, {rows}]"),
    native.BAD_N_DRAFT: ("n_draft", "not in [0, {rows})"),
    native.BAD_COMMIT_POS: ("commit_pos", "negative"),
}

Ints = npt.ArrayLike


class AwaitResult(NamedTuple):
    """Answers of a batch. The arrays are views that the next await on the same arrays overwrites."""

    kinds: ByteArray
    """[B, R] RowKind."""
    forced: Int32Array
    """[B, R] the one legal token of a FORCED row, else -1."""
    num_missing: int
    """Lanes that were deferred because their answer was missing."""
    waited_ns: int
    """0 when everything was there already."""
    num_late: int = 0
    """Lanes whose answer arrived with rows missing. These rows are DEFER until the grammar process adds them in
    place."""


class HostCall(NamedTuple):
    """A native function and its argument: `void function(void *user_data)`. Valid while the arrays and the end live."""

    function: int
    user_data: int


def _lanes(arrays: BatchArrays, batch: int | None) -> int:
    if batch is None:
        return arrays.batch
    if not 0 <= batch <= arrays.batch:
        raise InvalidField("batch", f"{batch} is not in [0, {arrays.batch}]")
    return batch


class EngineEnd:
    """The engine's role. Holds the mapping; does not close the segment.

    Args:
        segment: this process's segment. Sequences continue from the newest one in it.
        spin_ns: an await spins so long before it parks.
    """

    def __init__(self, segment: Segment, spin_ns: int = DEFAULT_SPIN_NS) -> None:
        self.segment, self.layout = segment, segment.layout
        self.spin_ns = spin_ns
        self._memory = segment.memory
        self._address = native.address_of(self._memory)
        self._view = native.View.of(self.layout, self._address)
        self._counter = native.Counter(native.load64(self._word(Word.REQ_SEQ)), 0)
        self._counter_current = ctypes.addressof(self._counter) + ctypes.sizeof(ctypes.c_uint64)
        self._awaited = ctypes.c_uint64(0)
        self._masks = mask_views(self.layout, self._memory)
        self._own = self.batch_arrays(self.layout.num_slots)
        self._posts = self._awaits = self._missing = self._waited_ns = self._longest_ns = 0

    def batch_arrays(self, batch: int, memory: ByteArray | None = None) -> BatchArrays:
        """Return arrays of B lanes, bound to this end; see `BatchArrays`."""
        # A device may have posted since this end was made. A native post on another thread advances the counter before
        # the word, so a word that was read first never takes the counter back.
        newest = self.last_seq
        if newest > self._counter.last:
            self._counter.last = newest
        arrays = BatchArrays(batch, self.layout.num_rows, memory)
        arrays.post_args.view = arrays.await_args.view = ctypes.pointer(self._view)
        arrays.post_args.counter = ctypes.pointer(self._counter)
        arrays.await_args.seq = ctypes.addressof(self._awaited)
        return arrays

    def post(
        self,
        slots: Ints,
        slot_gens: Ints,
        commit_pos: Ints,
        n_commit: Ints,
        n_draft: Ints,
        tokens: Ints,
        stage: int = Stage.VERIFY,
        need_rows: Ints | None = None,
    ) -> int:
        """Post one record per lane and return their sequence; 0 when no lane has a slot.

        Args:
            slots: [B] slot, or -1 for a lane without a grammar.
            slot_gens: [B].
            commit_pos: [B] answer tokens committed before these.
            n_commit: [B] 0 to R.
            n_draft: [B] 0 to R - 1.
            tokens: [B, <= 2R] committed tokens, then drafts, without a gap.
            stage: a Stage, or Stage.DRAFT + k.
            need_rows: [B] bitmap of wanted rows; None: all.

        Raises:
            InvalidField: a value is out of its range; nothing was posted.
        """
        own = self._own
        slots_B = np.asarray(slots, dtype=np.int32)
        tokens_BT = np.asarray(tokens, dtype=np.int32)
        batch = len(slots_B)
        if not 0 <= batch <= own.batch:
            raise InvalidField("slots", f"{batch} lanes, the segment has {own.batch} slots")
        if tokens_BT.ndim != 2 or len(tokens_BT) != batch or tokens_BT.shape[1] > 2 * own.rows:
            raise InvalidField("tokens", f"shape {tokens_BT.shape} is not [{batch}, <= {2 * own.rows}]")
        own.slots[:batch] = slots_B
        own.tokens[:batch, : tokens_BT.shape[1]] = tokens_BT
        for name, target, value in (
            ("slot_gens", own.slot_gens, slot_gens),
            ("commit_pos", own.commit_pos, commit_pos),
            ("n_commit", own.n_commit, n_commit),
            ("n_draft", own.n_draft, n_draft),
        ):
            value_B = np.asarray(value, dtype=np.int32)
            if value_B.shape != (batch,):
                raise InvalidField(name, f"shape {value_B.shape} is not [{batch}]")
            target[:batch] = value_B
        own.need_rows[:batch] = 0xFFFFFFFF if need_rows is None else np.asarray(need_rows, dtype=np.uint32)
        return self.post_batch(own, batch, stage)

    def post_batch(self, arrays: BatchArrays, batch: int | None = None, stage: int = Stage.VERIFY) -> int:
        """Post the first `batch` lanes (default: all) of filled arrays. Like `post`, but does not copy the arrays."""
        args = arrays.post_args
        args.batch = _lanes(arrays, batch)
        args.stage = stage
        native.post(arrays.post_pointer)
        if args.status < 0:
            field, problem = _POST_PROBLEMS[args.status]
            problem = problem.format(slots=self.layout.num_slots, rows=self.layout.num_rows)
            raise InvalidField(field, f"lane {args.bad_lane}: {problem}")
        self._posts += args.status == native.OK
        return self._counter.current

    def await_rows(
        self,
        seq: int,
        slots: Ints,
        slot_gens: Ints,
        *,
        timeout_s: float = 0.2,
        deadline_ns: int = 0,
    ) -> AwaitResult:
        """Wait until every lane's slot is answered under `seq`; lanes without an answer become DEFER in every row.

        Returns when all answers are there, at the deadline, or when the abort word is set. Releases the GIL
        when it has to wait.

        Args:
            seq: from `post`; 0 defers every lane that has a slot.
            slots: [B] as posted.
            slot_gens: [B] as posted: an answer to an earlier owner of the slot does not count.
            timeout_s: bound from now, when `deadline_ns` is 0.
            deadline_ns: bound on CLOCK_MONOTONIC, in nanoseconds.
        """
        own = self._own
        slots_B = np.asarray(slots, dtype=np.int32)
        gens_B = np.asarray(slot_gens, dtype=np.int32)
        batch = len(slots_B)
        if batch > own.batch or gens_B.shape != slots_B.shape:
            raise InvalidField("slots", f"{batch} lanes and {len(gens_B)} slot_gens, the segment has {own.batch} slots")
        own.slots[:batch] = slots_B
        own.slot_gens[:batch] = gens_B
        return self.await_batch(own, seq, batch, timeout_s=timeout_s, deadline_ns=deadline_ns)

    def await_batch(
        self,
        arrays: BatchArrays,
        seq: int,
        batch: int | None = None,
        *,
        timeout_s: float = 0.2,
        deadline_ns: int = 0,
    ) -> AwaitResult:
        """Wait for the first `batch` lanes (default: all) of posted arrays; as `await_rows`, without a copy."""
        args = arrays.await_args
        lanes = _lanes(arrays, batch)
        self._awaited.value = seq
        args.batch = lanes
        args.deadline_ns = deadline_ns
        args.timeout_ns = int(timeout_s * 1e9)
        args.spin_ns = self.spin_ns
        if native.take(arrays.await_pointer):
            native.await_rows(arrays.await_pointer)
        missing, waited_ns = args.missing, args.waited_ns
        self._awaits += 1
        self._missing += missing
        self._waited_ns += waited_ns
        self._longest_ns = max(self._longest_ns, waited_ns)
        return AwaitResult(arrays.kinds[:lanes], arrays.forced[:lanes], missing, waited_ns, args.late)

    def host_calls(
        self, batch: int, *, timeout_s: float, stage: int = Stage.VERIFY, memory: ByteArray | None = None
    ) -> tuple[BatchArrays, HostCall, HostCall]:
        """Return arrays with a post and an await that need no Python: a CUDA graph's host nodes, say.

        The await takes the sequence of the post before it. The caller holds the arrays and this end until no more
        call can be in flight.
        """
        arrays = self.batch_arrays(batch, memory)
        arrays.post_args.stage = stage
        arrays.await_args.seq = self._counter_current
        arrays.await_args.timeout_ns = int(timeout_s * 1e9)
        arrays.await_args.spin_ns = self.spin_ns
        post = HostCall(native.function_address("ls_post"), arrays.post_pointer)
        return arrays, post, HostCall(native.function_address("ls_await"), arrays.await_pointer)

    def unread(self, seq: int, slot: int, slot_gen: int) -> bool:
        """Return whether no answer will come: the record is gone from the ring, unless it was read just before that."""
        gone = native.load64(self._word(Word.REQ_SEQ)) - seq >= self.layout.num_recs
        return gone and bool(self.await_rows(seq, [slot], [slot_gen], timeout_s=0.0).num_missing)

    def mask_rows(self, seq: int) -> Int32Array:
        """Return the mask rows of `seq` in place: int32 [num_slots, R, row_stride / 4]; only the first W words count.

        Valid for APPLY and FORCED rows, from the await until the next post but one.
        """
        return self._masks[seq & 1]

    def mask_address(self, seq: int) -> int:
        """Return where `mask_rows(seq)` starts in this process."""
        return self._address + self.layout.row_offset(seq, 0, 0)

    def set_abort(self) -> None:
        """End the running await and every later one at once, until `clear_abort`. Any thread."""
        native.set_abort(self._view, 1)

    def clear_abort(self) -> None:
        """Let awaits wait again."""
        native.set_abort(self._view, 0)

    @property
    def aborted(self) -> bool:
        """True between `set_abort` and `clear_abort`."""
        return bool(native.load64(self._word(Word.ABORT)))

    @property
    def permissive(self) -> bool:
        """True during warm-up and capture: the grammar process answers ALL to everything."""
        return bool(native.load32(self._word(Word.PERMISSIVE)))

    @permissive.setter
    def permissive(self, value: bool) -> None:
        native.store32(self._word(Word.PERMISSIVE), int(value))

    def heartbeat(self) -> None:
        """Stamp the engine's heartbeat. Any thread."""
        native.stamp(self._word(Word.HB_ENGINE))

    def heartbeat_age_ns(self) -> int | None:
        """Return the age of the grammar process's heartbeat in nanoseconds, or None before the first."""
        age: int = native.age_ns(self._word(Word.HB_GRAMMAR))
        return None if age < 0 else age

    @property
    def grammar_parked(self) -> bool:
        """Return whether the grammar process sleeps at this moment and waits for a post."""
        return bool(native.load32(self._word(Word.GRAMMAR_PARKED)))

    @property
    def last_seq(self) -> int:
        """Newest sequence in the segment, posted by this end or by a device."""
        return int(native.load64(self._word(Word.REQ_SEQ)))

    def stats(self) -> dict[str, int]:
        """Return counters since the start; times in nanoseconds."""
        return {
            "posts": self._posts,
            "awaits": self._awaits,
            "missing_lanes": self._missing,
            "waited_ns": self._waited_ns,
            "longest_wait_ns": self._longest_ns,
        }

    def _word(self, word: Word) -> int:
        return self._address + self.layout.word_offset(word)

    def __repr__(self) -> str:
        return f"EngineEnd(generation={self.layout.generation}, last_seq={self.last_seq}, {self.stats()})"
