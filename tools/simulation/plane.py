"""Both ends of the step plane in one process: the real segment and its native calls, with waits in virtual time.

Each end maps the segment by itself. A native call that stores has a point before it and one after it. A kill inside
such a call leaves a prefix of its stores (`Cut`): the call runs, and the stores after the cut are taken back.

Invariant: every load and store of the plane is that of `shared_mem`; only sleeping, the clock of heartbeats and the
clock of the watch are replaced. Not responsible for: interleavings inside one native call, and memory orders weaker
than that of one processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared_mem import native
from shared_mem.batch import BatchArrays
from shared_mem.chains import ChainArrays, SpecialWords
from shared_mem.engine_end import AwaitResult, EngineEnd
from shared_mem.grammar_end import GrammarEnd
from shared_mem.layout import Layout, Stage, Word
from shared_mem.native import DEFAULT_SPIN_NS
from shared_mem.records import Records
from shared_mem.segment import Segment
from tools.simulation.world import Process, World

_KINDS_AT = 12
"""Where the kinds of an answer begin; after its sequence and the generation (shared_mem/native/flags.c)."""
_IDLE_LOOK_S = 0.01

Cut = Callable[[str, int], int | None]
"""(call, number of its stores) -> how many of them a process makes before its end; None: it goes on."""


class SimEngineEnd(EngineEnd):
    """The engine's end."""

    def __init__(self, segment: Segment, world: World) -> None:
        super().__init__(segment)
        self._world = world

    def post_batch(self, arrays: BatchArrays, batch: int | None = None, stage: int = Stage.VERIFY) -> int:
        """See `EngineEnd`."""
        self._world.point("engine posts")
        seq = super().post_batch(arrays, batch, stage)
        self._world.point(f"engine posted {seq}")
        return seq

    def await_batch(
        self,
        arrays: BatchArrays,
        seq: int,
        batch: int | None = None,
        *,
        timeout_s: float = 0.2,
        deadline_ns: int = 0,
    ) -> AwaitResult:
        """See `EngineEnd`; waits in virtual time."""
        if timeout_s > 0:
            args, self._awaited.value = arrays.await_args, seq
            args.batch = arrays.batch if batch is None else batch
            pointer = arrays.await_pointer
            self._world.wait(lambda: self.aborted or not native.take(pointer), timeout_s)
            self._world.point(f"engine takes {seq}")
        return super().await_batch(arrays, seq, batch, timeout_s=0.0)

    def heartbeat(self) -> None:
        """See `EngineEnd`."""
        native.store64(self._word(Word.HB_ENGINE), self._world.now_ns)

    def heartbeat_age_ns(self) -> int | None:
        """See `EngineEnd`."""
        stamp = native.load64(self._word(Word.HB_GRAMMAR))
        return self._world.now_ns - int(stamp) if stamp else None


class SimGrammarEnd(GrammarEnd):
    """The grammar process's end."""

    def __init__(self, segment: Segment, process: Process, cut: Cut = lambda call, stores: None) -> None:
        super().__init__(segment)
        self._process, self._world, self._cut = process, process.world, cut

    def wait(self, last_seq: int, timeout_s: float, spin_ns: int = DEFAULT_SPIN_NS) -> int:
        """See `GrammarEnd`."""
        self.heartbeat()
        self._working[0] = 0
        self._world.wait(lambda: self.newest_seq() > last_seq, timeout_s)
        newest = self.newest_seq()
        self.heartbeat()
        self._working[0] = self._world.now_ns
        self._world.point(f"worker sees {newest}")
        return max(newest, last_seq)

    def overdue(self, limit_ns: int, timeout_s: float) -> bool:
        """See `GrammarEnd`."""
        world, end_ns = self._world, self._world.now_ns + int(timeout_s * 1e9)
        while world.now_ns < end_ns:
            since = int(self._working[0])
            if since and world.now_ns - since >= limit_ns:
                return True
            left_s = (end_ns - world.now_ns) / 1e9
            if since:
                world.sleep(min(left_s, (limit_ns - (world.now_ns - since)) / 1e9))
            else:
                world.wait(lambda: self._working[0], min(left_s, _IDLE_LOOK_S))
        return False

    def take_over(self, ahead_ns: int = 0) -> None:
        """See `GrammarEnd`."""
        self._working[0] = max(self._world.now_ns + ahead_ns, 1)

    def heartbeat(self) -> None:
        """See `GrammarEnd`."""
        self._must_live()
        native.store64(self._word(Word.HB_GRAMMAR), self._world.now_ns)

    def read(self, seq: int) -> Records:
        """See `GrammarEnd`."""
        self._world.point(f"worker reads {seq}")
        return super().read(seq)

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
        """See `GrammarEnd`."""
        self._world.point(f"worker publishes {seq}.{slot} {list(map(int, kinds))}{' late' if late else ''}")
        self._must_live()
        with _Stores(self, "publish", _answer_stores(self.layout, slot)):
            fresh = super().publish(seq, slot, slot_gen, kinds, forced, late=late)
        self._world.point("worker published")
        return fresh

    def add_rows(self, seq: int, slot: int, kinds: Sequence[int], forced: Sequence[int], *, late: bool) -> bool:
        """See `GrammarEnd`."""
        self._world.point(f"worker adds {seq}.{slot} {list(map(int, kinds))}{' late' if late else ''}")
        self._must_live()
        with _Stores(self, "add_rows", _row_stores(self.layout, slot)):
            fresh = super().add_rows(seq, slot, kinds, forced, late=late)
        self._world.point("worker added")
        return fresh

    def publish_chains(self, seq: int, arrays: ChainArrays, special: SpecialWords, *, publishes: bool = True) -> None:
        """See `GrammarEnd`."""
        self._world.point(f"worker publishes {seq} of {arrays.count}")
        self._must_live()
        with _Stores(self, "publish_chains", _chain_stores(self.layout, arrays, seq)):
            super().publish_chains(seq, arrays, special, publishes=publishes)
        self._world.point("worker published")

    def publish_answers(self, seq: int, arrays: ChainArrays) -> None:
        """See `GrammarEnd`."""
        self._world.point(f"worker proposes {seq} of {arrays.count}")
        self._must_live()
        with _Stores(self, "publish_answers", _chain_stores(self.layout, arrays, None)):
            super().publish_answers(seq, arrays)
        self._world.point("worker proposed")

    def mask_rows(self, seq: int) -> NDArray[np.int32]:
        """See `GrammarEnd`."""
        return super().mask_rows(seq)

    def _must_live(self) -> None:
        assert self._process.alive, "a process that has ended stores nothing"


class _Stores:
    """Around a native call: where the process ends inside it, the stores after the cut are taken back."""

    def __init__(self, end: SimGrammarEnd, call: str, places: list[tuple[int, int]]) -> None:
        self._end, self._places = end, places
        self._keep = end._cut(call, len(places))
        self._before: list[bytes] = []

    def __enter__(self) -> None:
        if self._keep is not None:
            self._before = [self._bytes(at, size).tobytes() for at, size in self._places]

    def __exit__(self, *_: Any) -> None:
        if self._keep is None:
            return
        for (at, size), old in list(zip(self._places, self._before, strict=True))[self._keep :]:
            self._bytes(at, size)[:] = np.frombuffer(old, dtype=np.uint8)
        self._end._process.end(-9)
        self._end._world.point("worker ended inside a call")

    def _bytes(self, at: int, size: int) -> NDArray[np.uint8]:
        return self._end._memory[at : at + size]


def _answer_stores(layout: Layout, slot: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each store of `ls_publish`, in program order."""
    base = layout.ans_offset + slot * layout.ans_stride
    stores = [(base + 8, 4), (base + layout.ans_late_offset, 8)]
    for row in range(layout.num_rows):
        stores += [(base + _KINDS_AT + row, 1), (base + layout.ans_forced_offset + 4 * row, 4)]
    return [*stores, (base, 8), (layout.word_offset(Word.DOORBELL), 8)]


def _chain_stores(layout: Layout, arrays: ChainArrays, seq: int | None) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each store of `ls_publish_chains`, or with `seq` None of `ls_publish_answers`."""
    stores = []
    for chain in range(arrays.count):
        slot = int(arrays.slots[chain])
        if seq is not None:
            rows = range(int(arrays.first[chain]), int(arrays.n_draft[chain]) + 1)
            stores += [(layout.row_offset(seq, slot, row), 4 * layout.words) for row in rows]
        stores += _answer_stores(layout, slot)[:-1]
    return [*stores, (layout.word_offset(Word.DOORBELL), 8)]


def _row_stores(layout: Layout, slot: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each store of `ls_add_rows`, in program order."""
    base = layout.ans_offset + slot * layout.ans_stride
    stores = []
    for row in range(layout.num_rows):
        stores += [(base + layout.ans_forced_offset + 4 * row, 4), (base + _KINDS_AT + row, 1)]
    return [*stores, (base + layout.ans_late_offset, 8)]
