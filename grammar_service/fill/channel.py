"""What a worker needs of the step plane, as a protocol; `shared_mem.grammar_end.GrammarEnd` implements it.

Invariant: no behaviour here, so that tests can pass a fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared_mem.chains import ChainArrays, SpecialWords
from shared_mem.layout import Layout
from shared_mem.records import Records


class Channel(Protocol):
    """The grammar process's end of a mapped segment."""

    layout: Layout
    start_seq: int
    """The sequence before the first one that belongs to this process."""

    def wait(self, last_seq: int, timeout_s: float, spin_ns: int) -> int:
        """Return the newest posted sequence; `last_seq` when the engine posted none in time."""
        ...

    def newest_seq(self) -> int:
        """Return the newest posted sequence without waiting. Any thread."""
        ...

    def read(self, seq: int) -> Records:
        """Return the records of `seq`. The thread that waits calls it. Raises RingOverrun."""
        ...

    def mask_rows(self, seq: int) -> NDArray[np.int32]:
        """Return the mask rows of `seq` to write, int32 [num_slots, R, row_stride / 4]."""
        ...

    def publish(
        self,
        seq: int,
        slot: int,
        slot_gen: int,
        kinds: Sequence[int],
        forced: Sequence[int],
        *,
        late: bool = False,
    ) -> bool:
        """Publish a slot's answer; `late`: more rows may come. False: a newer answer is there."""
        ...

    def add_rows(self, seq: int, slot: int, kinds: Sequence[int], forced: Sequence[int], *, late: bool) -> bool:
        """Add rows to a late answer; `late` False: no more rows will come. False: another answer is there."""
        ...

    def chains(self, most: int, tallies: NDArray[np.int64]) -> ChainArrays:
        """Return arrays for the rows of at most `most` slots that are answered together."""
        ...

    def publish_chains(self, seq: int, arrays: ChainArrays, special: SpecialWords, *, publishes: bool = True) -> None:
        """Copy the rows of the chains into place and publish their answers."""
        ...

    def publish_answers(self, seq: int, arrays: ChainArrays) -> None:
        """Publish the kinds and forced tokens of the chains."""
        ...

    def overdue(self, limit_ns: int, timeout_s: float) -> bool:
        """Wait until the leading thread has been away from `wait` for `limit_ns`; False after `timeout_s`."""
        ...

    def take_over(self, ahead_ns: int = 0) -> None:
        """Restart the clock that `overdue` reads, now or `ahead_ns` later."""
        ...

    def heartbeat(self) -> None:
        """Write a sign of life for the engine."""
        ...

    @property
    def permissive(self) -> bool:
        """The engine asks for ALL in every row (it warms up or captures)."""
        ...
