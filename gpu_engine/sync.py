"""How the step program meets the grammar process: post tokens, await rows. `Sync` is the seam, one class a mechanism.

One invariant: a guided row that did not arrive in time is DEFER, never free. `InlineSync` is the CPU's: plain calls
into the native flags with the GIL released. Not here: what is done with a row.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.buffers import StepBatch
from shared_mem.channel import EngineEnd
from shared_mem.layout import RowKind


class Sync(Protocol):
    """The step program's view of the grammar process."""

    def post(self, batch: StepBatch) -> None:
        """Tell the committed tokens and the drafts of the guided lanes; the sidecar starts on their rows."""

    def await_rows(self, batch: StepBatch) -> None:
        """Fill `kinds_BR` and `forced_BR`; bounded in time."""

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return where the bitmask of (slot, row) lies: base address, strides in 32-bit words."""


class InlineSync:
    """Posts and waits on the calling thread. Owned by the engine thread."""

    def __init__(self, channel: EngineEnd, num_lanes: int, *, row_timeout_ms: float) -> None:
        self.channel = channel
        self.waited_ns = 0
        """Time that the last step stood waiting."""
        self.seq = 0
        """Sequence of the last post."""
        self._timeout_s = row_timeout_ms / 1e3
        self._arrays = channel.batch_arrays(num_lanes)
        shared = {name: torch.from_numpy(getattr(self._arrays, name)) for name in ("kinds", "forced", "tokens")}
        self._kinds_BR, self._forced_BR, self._tokens_BT = shared["kinds"], shared["forced"], shared["tokens"]

    def post(self, batch: StepBatch) -> None:
        """Write the records of the guided lanes and flip the flag."""
        self.waited_ns = 0
        if not batch.any_guided:
            return
        arrays, slot, lane, B = self._arrays, batch.slot, batch.lane, batch.num_lanes
        slots = batch.slots_B.long()
        told = slot.posted_S[slots]
        start = slot.params.prompt_length_S[slots] + told
        fresh = slot.length_S[slots] - start
        R = lane.drafts_BR.shape[1]
        at = torch.arange(2 * R)
        committed_BR = slot.history_SL[slots].gather(
            1, (start[:, None] + at[:R]).clamp(max=slot.history_SL.shape[1] - 1).long()
        )
        # Committed tokens first, drafts right behind them.
        source = torch.where(at < fresh[:, None], at, R + at - fresh[:, None]).clamp(max=2 * R - 1).long()
        self._tokens_BT[:B] = torch.cat([committed_BR, lane.drafts_BR[:B]], dim=1).gather(1, source)
        guided = lane.guided_B[:B]
        arrays.slots[:B] = torch.where(guided, batch.slots_B, -1).numpy()
        arrays.slot_gens[:B] = lane.slot_gens_B[:B].numpy()
        arrays.commit_pos[:B] = told.numpy()
        arrays.n_commit[:B] = torch.where(guided, fresh, 0).numpy()
        arrays.n_draft[:B] = torch.where(guided, lane.num_drafts_B[:B], 0).numpy()
        self.seq = self.channel.post_batch(arrays, B)
        slot.posted_S[slots] = torch.where(guided, told + fresh, told)

    def await_rows(self, batch: StepBatch) -> None:
        """Wait for the guided lanes, at most `row_timeout_ms`."""
        B = batch.num_lanes
        if not batch.any_guided:
            batch.lane.kinds_BR[:B] = int(RowKind.ALL)
            return
        answer = self.channel.await_batch(self._arrays, self.seq, B, timeout_s=self._timeout_s)
        batch.lane.kinds_BR[:B] = self._kinds_BR[:B]
        batch.lane.forced_BR[:B] = self._forced_BR[:B]
        self.waited_ns = answer.waited_ns

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return the rows of the last post."""
        words = self.channel.layout.row_stride // 4
        return self.channel.mask_address(self.seq), (self.channel.layout.num_rows * words, words)

    def answered(self, seq: int, slot: int, slot_gen: int) -> bool:
        """Return whether a deferred slot's answer has come in the meantime. Does not wait."""
        return self.channel.await_rows(seq, [slot], [slot_gen], timeout_s=0.0).num_missing == 0


class NoSync:
    """For an engine without a grammar process: every row is free, and a guided lane is a defect."""

    waited_ns = 0
    seq = 0

    def post(self, batch: StepBatch) -> None:
        """Check that nothing is to be posted."""
        assert not batch.any_guided, "a guided lane without a grammar process"

    def await_rows(self, batch: StepBatch) -> None:
        """Free every row."""
        batch.lane.kinds_BR[: batch.num_lanes] = int(RowKind.ALL)

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return no rows; none is read."""
        return 0, (0, 0)

    def answered(self, seq: int, slot: int, slot_gen: int) -> bool:
        """Nothing is ever deferred."""
        return True
