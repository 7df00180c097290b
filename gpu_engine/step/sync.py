"""How the step program meets the grammar process: post tokens, await mask rows. `Sync` is the seam.

Every method enqueues on the sync's stream. Three mechanisms implement it: `InlineSync` (CPU, stream_sync.py),
`HostCallbackSync` and `DeviceFlagSync` (CUDA, device/syncs.py). Invariant: a guided row that did not arrive in time
is DEFER, never ALL. Not responsible for: the use of a row (see launches.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.stream import Stream
from shared_mem.layout import RowKind

_ALL = int(RowKind.ALL)


class Fork(NamedTuple):
    """A matcher that becomes a copy of another one, or goes back."""

    slot: int
    slot_gen: int
    """A new one: the slot's earlier matcher is gone with it."""
    source: int
    """The other one's slot; `slot` itself for a matcher that goes back."""
    num_committed: int
    """Answer tokens that the copy has consumed."""


class Sync(Protocol):
    """The step program's view of the grammar process."""

    store: RowStore
    """The cached rows."""

    @property
    def report(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sequence number of the last step's verify post, 0 when it requested no row, and the nanoseconds waited
        since the start: int64 [1] each, on the device. None: nothing is ever posted."""

    @property
    def waited_ns(self) -> int:
        """Time waited that `report` does not have, since this was last read."""

    def check(self, num_lanes: int) -> None:
        """Raise InvalidField when the last post of a batch of this padded size was refused. Does not wait."""

    def post(self, batch: StepBatch) -> None:
        """Post committed tokens and drafts of the guided lanes;
        the sidecar starts to fill the rows that are missing."""

    def await_rows(self, batch: StepBatch) -> None:
        """Fill `kinds_BR` and `forced_BR` for the verify step; bounded in time."""

    def post_draft(self, batch: StepBatch, k: int) -> None:
        """Ask for row k of the lanes in `drafting_B`: the mask after drafts[:k]."""

    def await_draft(self, batch: StepBatch, k: int) -> None:
        """Fill row k of `kinds_BR` and `forced_BR`. Soft: a late row becomes ALL, and verification guards the draft."""

    def post_jump_forward(self, batch: StepBatch) -> None:
        """Request the jump-forward tokens of the lanes in `drafting_B`."""

    def await_jump_forward(self, batch: StepBatch) -> None:
        """Fill `num_jump_forward_B`, and put the tokens into `drafts_SR` and after the history. Soft: a late answer
        counts as no token.

        The tokens are proposals: no mask row comes with them.
        """

    def forget(self, slot: int) -> None:
        """Drop the cached rows of a slot: it has another owner, or its matcher was rebuilt."""

    def fork(self, forks: Sequence[Fork]) -> None:
        """Post `forks`, of different slots, before the next step; nothing is awaited."""

    def late(self, seq: int, slot: int, slot_gen: int, *, advanced: bool = False) -> int | None:
        """Return how many rows the answer to `seq` has by now; None while it is not complete. Never waits.

        The rows are cached for the repeated step, unless the sequence `advanced` since that post.
        """

    def unread(self, seq: int, slot: int, slot_gen: int) -> bool:
        """Return whether the record of a deferred slot was overwritten before it was read: no answer will come."""

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return where the bitmask of (slot, row) lies: base address, strides in 32-bit words."""

    def reserve(self, lane_counts: tuple[int, ...]) -> None:
        """Allocate for batches of these sizes, so that no later step allocates."""


class NoSync:
    """For an engine without a grammar process: every row is ALL, and a guided lane is a defect."""

    report = None
    waited_ns = 0

    def __init__(self, stream: Stream, num_slots: int, num_rows: int) -> None:
        self._stream = stream
        self.store = RowStore.around(torch.zeros(num_slots, num_rows, 4, dtype=torch.int32, device=stream.device))

    def check(self, num_lanes: int) -> None:
        """Return: nothing is posted."""

    def post(self, batch: StepBatch) -> None:
        """Assert that nothing is to be posted."""
        assert not batch.any_guided, "a guided lane without a grammar process"

    def await_rows(self, batch: StepBatch) -> None:
        """Enqueue: every row is ALL."""
        self._stream.kernel(free_rows, batch)

    def post_draft(self, batch: StepBatch, k: int) -> None:
        """Return: nothing is requested."""

    def await_draft(self, batch: StepBatch, k: int) -> None:
        """Enqueue: row k is ALL."""
        self._stream.kernel(free_row, batch, k)

    def post_jump_forward(self, batch: StepBatch) -> None:
        """Return: nothing is requested."""

    def await_jump_forward(self, batch: StepBatch) -> None:
        """Return: there are no jump-forward tokens."""

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return no rows; none is read."""
        return 0, (0, 0)

    def reserve(self, lane_counts: tuple[int, ...]) -> None:
        """Return: there is nothing to allocate."""

    def late(self, seq: int, slot: int, slot_gen: int, *, advanced: bool = False) -> int | None:
        """Return None: nothing is ever deferred."""
        return None

    def unread(self, seq: int, slot: int, slot_gen: int) -> bool:
        """Return False: nothing is ever requested."""
        return False

    def forget(self, slot: int) -> None:
        """Return: nothing is cached."""

    def fork(self, forks: Sequence[Fork]) -> None:
        """Assert that there is nothing to copy."""
        assert not forks, "a matcher without a grammar process"


def free_rows(batch: StepBatch) -> None:
    """Make every row of the batch ALL. Runs inside a launch."""
    batch.lane.kinds_BR[: batch.num_lanes].fill_(_ALL)


def free_row(batch: StepBatch, k: int) -> None:
    """Make row k of every lane ALL. Runs inside a launch."""
    batch.lane.kinds_BR[: batch.num_lanes, k].fill_(int(RowKind.ALL))
