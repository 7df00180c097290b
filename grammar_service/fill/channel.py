"""What the worker needs of the step plane: `shared_mem.channel.GrammarEnd` is one. A seam; no behaviour here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared_mem.chains import ChainArrays, SpecialWords
from shared_mem.grammar_end import Record
from shared_mem.layout import Layout


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
        self,
        seq: int,
        slot: int,
        slot_gen: int,
        kinds: Sequence[int],
        forced: Sequence[int],
        *,
        late: bool = False,
    ) -> bool:
        """Publish a slot's answer; `late`: more rows may come."""
        ...

    def add_rows(self, seq: int, slot: int, kinds: Sequence[int], forced: Sequence[int], *, late: bool) -> bool:
        """Add rows to a late answer; `late` False: no more will come."""
        ...

    def chains(self, most: int, tallies: NDArray[np.int64]) -> ChainArrays:
        """Return arrays for `most` slots that are answered together."""
        ...

    def publish_chains(
        self, seq: int, arrays: ChainArrays, count: int, special: SpecialWords, *, publishes: bool = True
    ) -> None:
        """Put their rows in place and publish their answers."""
        ...

    def overdue(self, limit_ns: int, timeout_s: float) -> bool:
        """Wait until whoever waits for records has been away for `limit_ns`; False after `timeout_s`."""
        ...

    def take_over(self, ahead_ns: int = 0) -> None:
        """Count that time from now on, or from `ahead_ns` later."""
        ...

    def heartbeat(self) -> None:
        """Show life."""
        ...

    @property
    def permissive(self) -> bool:
        """Answer ALL to everything."""
        ...
