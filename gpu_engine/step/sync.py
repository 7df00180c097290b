"""How the step program meets the grammar process: post tokens, await rows. `Sync` is the seam, one class a mechanism.

One invariant: a guided row that did not arrive in time is DEFER, never free. `InlineSync` is the CPU's: plain calls
into the native flags with the GIL released. Not here: what is done with a row.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.mask_rows import RowStore
from shared_mem.channel import EngineEnd
from shared_mem.layout import RowKind, Stage


class Sync(Protocol):
    """The step program's view of the grammar process."""

    @property
    def seq(self) -> int:
        """Sequence of the last verify post; 0: it had nothing to ask."""

    @property
    def waited_ns(self) -> int:
        """Time that the last step stood waiting."""

    def post(self, batch: StepBatch) -> None:
        """Tell committed tokens and drafts of the guided lanes; the sidecar starts on the rows that are missing."""

    def await_rows(self, batch: StepBatch) -> None:
        """Fill `kinds_BR` and `forced_BR` for the verify step; bounded in time."""

    def settle(self, batch: StepBatch) -> None:
        """After accept: rows of lanes that moved on are forgotten, rows of deferred lanes stay."""

    def post_draft(self, batch: StepBatch, k: int) -> None:
        """Ask for row k of the lanes in `drafting_B`: the mask behind drafts[:k]."""

    def await_draft(self, batch: StepBatch, k: int) -> None:
        """Fill row k of `kinds_BR` and `forced_BR`; soft: what is late becomes ALL, and verification guards."""

    def post_jump_forward(self, batch: StepBatch) -> None:
        """After `settle`: ask what the grammar forces behind the lanes in `drafting_B` that may have drafts."""

    def await_jump_forward(self, batch: StepBatch) -> None:
        """Fill `num_jump_forward_B`, and put the tokens where it says; soft: what is late is nothing.

        They are proposals, and no rows: none is kept, none masks anything.
        """

    def forget(self, slot: int) -> None:
        """Drop what is kept for a slot: it has another owner, or its matcher was made anew."""

    def late(self, seq: int, slot: int, slot_gen: int, *, moved: bool = False) -> int | None:
        """Return how many rows the answer to `seq` has by now; None while it is not there, or rows are still to come.

        They are kept for the repeated step, unless the slot `moved` on with those that were there. Never waits.
        """

    def unread(self, seq: int, slot: int, slot_gen: int) -> bool:
        """Whether the record of a deferred slot was overwritten before it was read: no answer will come."""

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return where the bitmask of (slot, row) lies: base address, strides in 32-bit words."""


class InlineSync:
    """Posts and waits on the calling thread. Owned by the engine thread."""

    def __init__(
        self, channel: EngineEnd, num_lanes: int, *, row_timeout_ms: float, draft_timeout_ms: float = 5.0
    ) -> None:
        self.channel = channel
        self.waited_ns = 0
        """Time that the last step stood waiting."""
        self.seq = 0
        """Sequence of the last verify post; 0: it had nothing to ask."""
        self._draft_seq = 0
        layout = channel.layout
        self.store = RowStore.allocate(layout.num_slots, layout.num_rows, layout.row_stride // 4)
        self._timeout_s, self._draft_timeout_s = row_timeout_ms / 1e3, draft_timeout_ms / 1e3
        self._arrays = channel.batch_arrays(num_lanes)
        self._kinds_BR = torch.from_numpy(self._arrays.kinds)
        self._forced_BR = torch.from_numpy(self._arrays.forced)
        self._tokens_BT = torch.from_numpy(self._arrays.tokens)

    def post(self, batch: StepBatch) -> None:
        """Write the records of the guided lanes that miss a row, and flip the flag."""
        self.waited_ns = self.seq = 0
        if not batch.any_guided:
            return
        lane, B = batch.lane, batch.num_lanes
        wanted_R = torch.arange(lane.drafts_BR.shape[1]) <= lane.num_drafts_B[:B, None]
        slots = batch.slots_B.long()
        asking_B = lane.guided_B[:B] & ~batch.slot.done_S[slots]
        missing_BR = wanted_R & ~self.store.cached_SR[slots] & asking_B[:, None]
        self.seq = self._post(batch, lane.num_drafts_B[:B], missing_BR, Stage.VERIFY)

    def await_rows(self, batch: StepBatch) -> None:
        """Wait for the lanes that were asked for, at most `row_timeout_ms`; the other rows are here."""
        B, lane = batch.num_lanes, batch.lane
        lane.kinds_BR[:B] = int(RowKind.ALL)
        if not batch.any_guided:
            return
        if self.seq:
            self._await(batch, self.seq, self._timeout_s)
        slots, guided_B1 = batch.slots_B.long(), lane.guided_B[:B, None]
        kind_BR = torch.where(self.store.cached_SR[slots], self.store.kind_SR[slots], int(RowKind.DEFER))
        lane.kinds_BR[:B] = torch.where(guided_B1, kind_BR, int(RowKind.ALL)).to(torch.uint8)
        lane.forced_BR[:B] = self.store.forced_SR[slots]

    def settle(self, batch: StepBatch) -> None:
        """Forget the rows of lanes that emitted something."""
        if batch.any_guided:
            slots, still_B = batch.slots_B.long(), batch.lane.result.num_emitted_B[: batch.num_lanes] == 0
            self.store.cached_SR[slots] &= still_B[:, None]

    def post_draft(self, batch: StepBatch, k: int) -> None:
        """Ask for row k behind the first k drafts."""
        self._draft_seq = 0
        if not batch.any_guided:
            return
        lane, B = batch.lane, batch.num_lanes
        missing_BR = torch.zeros(B, lane.drafts_BR.shape[1], dtype=torch.bool)
        missing_BR[:, k] = lane.guided_B[:B] & lane.drafting_B[:B]
        self._draft_seq = self._post(batch, torch.full((B,), k, dtype=torch.int32), missing_BR, Stage.DRAFT + k)

    def await_draft(self, batch: StepBatch, k: int) -> None:
        """Wait briefly for row k; a row that is not here leaves its draft unmasked and is asked for again to verify."""
        B, lane = batch.num_lanes, batch.lane
        lane.kinds_BR[:B, k] = int(RowKind.ALL)
        if not self._draft_seq:
            return
        self._await(batch, self._draft_seq, self._draft_timeout_s)
        slots = batch.slots_B.long()
        here_B = self.store.cached_SR[slots, k] & lane.guided_B[:B] & lane.drafting_B[:B]
        lane.kinds_BR[:B, k] = torch.where(here_B, self.store.kind_SR[slots, k], int(RowKind.ALL)).to(torch.uint8)
        lane.forced_BR[:B, k] = self.store.forced_SR[slots, k]

    def post_jump_forward(self, batch: StepBatch) -> None:
        """Ask for as many tokens as a lane may have forced drafts."""
        self._draft_seq = 0
        if not batch.any_guided or batch.max_rows < 2:
            return
        slot, lane, B, slots = batch.slot, batch.lane, batch.num_lanes, batch.slots_B.long()
        room_B = slot.params.max_length_S[slots] - slot.length_S[slots] - 1
        wanted_B = torch.minimum(slot.jump_forward_limit_S[slots], room_B).clamp(max=batch.max_rows - 1)
        asking_B = lane.guided_B[:B] & lane.drafting_B[:B]
        missing_BR = (torch.arange(lane.drafts_BR.shape[1]) < wanted_B[:, None]) & asking_B[:, None]
        self._draft_seq = self._post(batch, torch.zeros(B, dtype=torch.int32), missing_BR, Stage.PROPOSE)

    def await_jump_forward(self, batch: StepBatch) -> None:
        """Wait briefly; the tokens end at the first row that forces none, or a token that is not in the vocabulary."""
        B, lane = batch.num_lanes, batch.lane
        lane.num_jump_forward_B[:B] = torch.where(lane.result.num_emitted_B[:B] == 0, -1, 0)
        if not self._draft_seq:
            return
        arrays, slot = self._arrays, batch.slot
        self.waited_ns += self.channel.await_batch(
            arrays, self._draft_seq, B, timeout_s=self._draft_timeout_s
        ).waited_ns
        # In Python: a lane has few tokens, and an operation on tensors costs more behind a forward than all of them.
        vocab_size, forced = self.channel.layout.vocab_size, int(RowKind.FORCED)
        lanes = zip(
            *(array[:B].tolist() for array in (arrays.slots, arrays.need_rows, arrays.kinds, arrays.forced)),
            strict=True,
        )
        for b, (place, need, kinds, tokens_R) in enumerate(lanes):
            rows = zip(kinds[: need.bit_length()], tokens_R, strict=False)
            legal = itertools.takewhile(lambda row: row[0] == forced and 0 <= row[1] < vocab_size, rows)
            count = len(list(legal)) if place >= 0 else 0
            if count:
                at, tokens = int(slot.length_S[place]), self._forced_BR[b, :count]
                slot.history_SL[place, at : at + count] = tokens
                slot.drafts_SR[place, :count] = tokens
                lane.num_jump_forward_B[b] = count

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return the store's rows."""
        mask = self.store.mask_SRW
        return mask.data_ptr(), (mask.stride(0), mask.stride(1))

    def late(self, seq: int, slot: int, slot_gen: int, *, moved: bool = False) -> int | None:
        """See `Sync.late`. Of a slot that emitted nothing since `seq` these rows are the present ones."""
        answer = self.channel.await_rows(seq, [slot], [slot_gen], timeout_s=0.0)
        if answer.num_missing or answer.num_late:
            return None
        if moved:
            return int((answer.kinds[0] != int(RowKind.DEFER)).sum())
        kinds, forced = torch.from_numpy(answer.kinds[0]), torch.from_numpy(answer.forced[0])
        masks_RW = torch.from_numpy(self.channel.mask_rows(seq)[slot])
        rows = (~self.store.cached_SR[slot] & (kinds != int(RowKind.DEFER))).nonzero()[:, 0].tolist()
        self.store.take(slot, rows, kinds[rows], forced[rows], masks_RW[rows])
        return len(rows)

    def unread(self, seq: int, slot: int, slot_gen: int) -> bool:
        """See `Sync.unread`."""
        return self.channel.unread(seq, slot, slot_gen)

    def forget(self, slot: int) -> None:
        """Drop the rows of a slot: it has another owner, or its matcher was made anew."""
        self.store.forget(slot)

    def _post(self, batch: StepBatch, num_drafts_B: torch.Tensor, missing_BR: torch.Tensor, stage: int) -> int:
        """Post the lanes that miss a row; return the sequence, 0 when there is none."""
        arrays, slot, lane, B = self._arrays, batch.slot, batch.lane, batch.num_lanes
        slots, asked_B = batch.slots_B.long(), missing_BR.any(dim=1)
        told_B = slot.posted_S[slots]
        start_B = slot.params.prompt_length_S[slots] + told_B
        fresh_B = torch.where(asked_B, slot.length_S[slots] - start_B, 0)
        R = missing_BR.shape[1]
        at_T = torch.arange(2 * R)
        where_BR = (start_B[:, None] + at_T[:R]).clamp(max=slot.history_SL.shape[1] - 1).long()
        committed_BR = slot.history_SL[slots].gather(1, where_BR)
        # Committed tokens first, drafts right behind them.
        source_BT = torch.where(at_T < fresh_B[:, None], at_T, R + at_T - fresh_B[:, None]).clamp(max=2 * R - 1)
        self._tokens_BT[:B] = torch.cat([committed_BR, lane.drafts_BR[:B]], dim=1).gather(1, source_BT.long())
        arrays.slots[:B] = torch.where(asked_B, batch.slots_B, -1).numpy()
        arrays.slot_gens[:B] = lane.slot_gens_B[:B].numpy()
        arrays.commit_pos[:B] = told_B.numpy()
        arrays.n_commit[:B] = fresh_B.numpy()
        arrays.n_draft[:B] = torch.where(asked_B, num_drafts_B, 0).numpy()
        arrays.need_rows[:B] = (missing_BR.long() << torch.arange(R)).sum(dim=1).numpy()
        if stage != Stage.PROPOSE:
            # The next post says these tokens again: one that overtakes this record need not wait for it.
            slot.posted_S[slots] = told_B + fresh_B
        return self.channel.post_batch(arrays, B, stage) if bool(asked_B.any()) else 0

    def _await(self, batch: StepBatch, seq: int, timeout_s: float) -> None:
        """Wait for the posted lanes and keep the rows that they were asked for."""
        arrays, B = self._arrays, batch.num_lanes
        answer = self.channel.await_batch(arrays, seq, B, timeout_s=timeout_s)
        self.waited_ns += answer.waited_ns
        masks_SRW = torch.from_numpy(self.channel.mask_rows(seq))
        for b, slot in enumerate(arrays.slots[:B].tolist()):
            need = int(arrays.need_rows[b])
            if slot >= 0:
                rows = [row for row in range(arrays.rows) if need >> row & 1]
                self.store.take(slot, rows, self._kinds_BR[b, rows], self._forced_BR[b, rows], masks_SRW[slot, rows])


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

    def settle(self, batch: StepBatch) -> None:
        """Nothing is kept."""

    def post_draft(self, batch: StepBatch, k: int) -> None:
        """Nothing is asked."""

    def await_draft(self, batch: StepBatch, k: int) -> None:
        """Free the row."""
        batch.lane.kinds_BR[: batch.num_lanes, k] = int(RowKind.ALL)

    def post_jump_forward(self, batch: StepBatch) -> None:
        """Nothing is asked."""

    def await_jump_forward(self, batch: StepBatch) -> None:
        """Nothing is forced."""

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return no rows; none is read."""
        return 0, (0, 0)

    def late(self, seq: int, slot: int, slot_gen: int, *, moved: bool = False) -> int | None:
        """Nothing is ever deferred."""
        return None

    def unread(self, seq: int, slot: int, slot_gen: int) -> bool:
        """Nothing is ever asked."""
        return False

    def forget(self, slot: int) -> None:
        """Nothing is kept."""
