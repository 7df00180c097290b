"""What both CUDA syncs share: packing what is to be asked, and the rows kept from one post to the next. On the device.

Which rows are missing is data, so it travels in the record and never decides what is launched. One invariant: nothing
here reads the device, and a launch depends only on `num_lanes`, `num_rows` and `any_guided` of the batch, which are
constants of a graph. Every method enqueues; `late` also looks at an answer in host memory.

Padding: a lane with slot -1 is neither posted nor waited for, its kinds become ALL, and what it would write goes into a
spare row behind the last slot. Not here: how a record reaches the grammar process and an answer comes back
(sync_cuda.py).

Shapes: S slots, B lanes of the batch, R rows a slot, P rows of the step, W' words of a row's stride.
"""

from __future__ import annotations

import torch

from gpu_engine.buffers import StepBatch
from gpu_engine.lane_box import LaneBox
from gpu_engine.stream import Stream
from shared_mem.channel import EngineEnd
from shared_mem.layout import RowKind, Stage


class StreamSync:
    """What both mechanisms share: packing, and the rows that are kept from one post to the next."""

    def __init__(
        self,
        stream: Stream,
        channel: EngineEnd,
        mask_SRW: torch.Tensor,
        *,
        row_timeout_ms: float,
        draft_timeout_ms: float = 5.0,
    ) -> None:
        self.stream, self.channel, self._mask_SRW = stream, channel, mask_SRW
        self._timeout_ns, self._draft_timeout_ns = int(row_timeout_ms * 1e6), int(draft_timeout_ms * 1e6)
        S, R, device = channel.layout.num_slots, channel.layout.num_rows, stream.device
        assert mask_SRW.shape == (S, R, channel.layout.row_stride // 4)
        # Row S is the spare one, where padded lanes write.
        self._kind_SR = torch.full((S + 1, R), int(RowKind.DEFER), dtype=torch.uint8, device=device)
        self._forced_SR = torch.full((S + 1, R), -1, dtype=torch.int32, device=device)
        self._kept_SR = torch.zeros(S + 1, R, dtype=torch.bool, device=device)
        self._row_R = torch.arange(R, dtype=torch.int32, device=device)
        self._at_T = torch.arange(2 * R, dtype=torch.int32, device=device)
        self.report_2 = torch.zeros(2, dtype=torch.int64, device=device)
        """int64 [2], device: the sequence of the last verify post (0: nothing was asked), nanoseconds waited on the
        device since the start. Writer: the step; to be copied out with its results."""
        self._late_kinds = stream.pinned(S * R).view(S, R)
        self._late_forced = stream.pinned(4 * S * R).view(torch.int32).view(S, R)

    # -- the Sync protocol, but for the mechanism ---------------------------------------------------------------------

    def post(self, batch: StepBatch) -> None:
        """Enqueue the records of the guided lanes that miss a row."""
        if not batch.any_guided:
            self.stream.kernel(self._no_seq)
            return
        box = self._box(batch.num_lanes)
        self.stream.kernel(self._pack_verify, batch, box)
        self._send(box, int(Stage.VERIFY), self._timeout_ns)

    def await_rows(self, batch: StepBatch) -> None:
        """Enqueue the wait for the lanes that were asked for, at most `row_timeout_ms`, and the merge of their rows."""
        if not batch.any_guided:
            self.stream.kernel(self._all_free, batch)
            return
        box = self._box(batch.num_lanes)
        self._receive(box, int(Stage.VERIFY), (1 << batch.num_rows) - 1, self._timeout_ns)
        self.stream.kernel(self._merge_verify, batch, box)

    def settle(self, batch: StepBatch) -> None:
        """Enqueue: forget the rows of lanes that emitted something."""
        if batch.any_guided:
            self.stream.kernel(self._settle, batch)

    def post_draft(self, batch: StepBatch, k: int) -> None:
        """Enqueue the request for row k behind the first k drafts, of the lanes in `drafting_B`."""
        if batch.any_guided:
            box = self._box(batch.num_lanes)
            self.stream.kernel(self._pack_draft, batch, box, k)
            self._send(box, Stage.DRAFT + k, self._draft_timeout_ns)

    def await_draft(self, batch: StepBatch, k: int) -> None:
        """Enqueue a short wait for row k; a row that is not there leaves its draft unmasked."""
        if not batch.any_guided:
            self.stream.kernel(self._draft_free, batch, k)
            return
        box = self._box(batch.num_lanes)
        self._receive(box, Stage.DRAFT + k, 1 << k, self._draft_timeout_ns)
        self.stream.kernel(self._merge_draft, batch, box, k)

    def forget(self, slot: int) -> None:
        """Enqueue: drop the rows of a slot. Steps that are in flight are before it."""
        self.stream.kernel(self._forget, slot)

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return where the bitmask of (slot, row) lies on the device: base address, strides in 32-bit words."""
        return self._mask_SRW.data_ptr(), (self._mask_SRW.stride(0), self._mask_SRW.stride(1))

    @property
    def masks_SRW(self) -> torch.Tensor:
        """The rows themselves, int32 on the device; the sampling kernels read them where the kind is APPLY."""
        return self._mask_SRW

    def late(self, seq: int, slot: int, slot_gen: int) -> int | None:
        """Look whether the answer of a deferred slot has come; enqueue its rows and return how many, else None.

        `seq` is the step's `report_2[0]`. The slot must not be in a step that is in flight: such a step asks again.
        Does not wait.
        """
        answer = self.channel.await_rows(seq, [slot], [slot_gen], timeout_s=0.0)
        if answer.num_missing:
            return None
        kinds_R, forced_R = torch.from_numpy(answer.kinds[0]), torch.from_numpy(answer.forced[0])
        rows = (kinds_R != int(RowKind.DEFER)).nonzero()[:, 0].tolist()
        # One request of a slot is open at a time, so its line of the staging memory is free again.
        self._late_kinds[slot].copy_(kinds_R)
        self._late_forced[slot].copy_(forced_R)
        masks_RW = torch.from_numpy(self.channel.mask_rows(seq)[slot])
        for row in rows:
            if kinds_R[row] == int(RowKind.APPLY):
                self.stream.copy(self._mask_SRW[slot, row], masks_RW[row])
        for row in rows:
            at = slice(row, row + 1)
            self.stream.copy(self._kind_SR[slot, at], self._late_kinds[slot, at])
            self.stream.copy(self._forced_SR[slot, at], self._late_forced[slot, at])
            self.stream.kernel(self._keep, slot, row)
        return len(rows)

    def reserve(self, lane_counts: tuple[int, ...]) -> None:
        """Allocate for these numbers of lanes; afterwards no step allocates."""
        for count in lane_counts:
            self._box(count)

    # -- the mechanism ------------------------------------------------------------------------------------------------

    def _box(self, num_lanes: int) -> LaneBox:
        raise NotImplementedError

    def _send(self, box: LaneBox, stage: int, timeout_ns: int) -> None:
        raise NotImplementedError

    def _receive(self, box: LaneBox, stage: int, rows_wanted: int, timeout_ns: int) -> None:
        raise NotImplementedError

    # -- kernels, in torch operations ---------------------------------------------------------------------------------

    def _no_seq(self) -> None:
        self.report_2[:1].zero_()

    def _pack_verify(self, batch: StepBatch, box: LaneBox) -> None:
        lane, B = batch.lane, batch.num_lanes
        wanted_BR = self._row_R <= lane.num_drafts_B[:B, None]
        missing_BR = wanted_BR & ~self._kept_SR[self._place(batch)] & lane.guided_B[:B, None]
        self._pack(batch, box, missing_BR, lane.num_drafts_B[:B])

    def _pack_draft(self, batch: StepBatch, box: LaneBox, k: int) -> None:
        lane, B = batch.lane, batch.num_lanes
        missing_BR = (self._row_R == k) & (lane.guided_B[:B] & lane.drafting_B[:B])[:, None]
        self._pack(batch, box, missing_BR, torch.full_like(lane.num_drafts_B[:B], k))

    def _pack(self, batch: StepBatch, box: LaneBox, missing_BR: torch.Tensor, num_drafts_B: torch.Tensor) -> None:
        """Fill the box's inputs, and count as told what they tell."""
        slot, lane, B, R = batch.slot, batch.lane, batch.num_lanes, len(self._row_R)
        slots_B = batch.slots_B.clamp(min=0).long()
        missing_BR = missing_BR & (batch.slots_B >= 0)[:, None]
        asked_B = missing_BR.any(dim=1)
        told_B = slot.posted_S[slots_B]
        start_B = slot.params.prompt_length_S[slots_B] + told_B
        fresh_B = torch.where(asked_B, slot.length_S[slots_B] - start_B, 0)
        where_BR = (start_B[:, None] + self._row_R).clamp(max=slot.history_SL.shape[1] - 1).long()
        committed_BR = slot.history_SL[slots_B[:, None], where_BR]
        # Committed tokens first, drafts right behind them.
        at_T, fresh_B1 = self._at_T, fresh_B[:, None]
        source_BT = torch.where(at_T < fresh_B1, at_T, R + at_T - fresh_B1).clamp(min=0, max=2 * R - 1)
        box.tokens.copy_(torch.cat([committed_BR, lane.drafts_BR[:B]], dim=1).gather(1, source_BT.long()))
        box.slots.copy_(torch.where(asked_B, batch.slots_B, -1))
        box.slot_gens.copy_(lane.slot_gens_B[:B])
        box.commit_pos.copy_(told_B)
        box.n_commit.copy_(fresh_B)
        box.n_draft.copy_(torch.where(asked_B, num_drafts_B, 0))
        box.need_rows.copy_((missing_BR.int() << self._row_R).sum(dim=1))
        # An addition, since a padded lane shares its index with slot 0: it adds nothing.
        slot.posted_S.index_add_(0, slots_B, fresh_B)

    def _take(self, batch: StepBatch, box: LaneBox) -> None:
        """Keep the rows that the box's records asked for."""
        place_B = self._place(batch)
        asked_BR = (box.need_rows[:, None] >> self._row_R & 1).bool() & (box.slots >= 0)[:, None]
        self._kind_SR[place_B] = torch.where(asked_BR, box.kinds, self._kind_SR[place_B])
        self._forced_SR[place_B] = torch.where(asked_BR, box.forced, self._forced_SR[place_B])
        here_BR = box.kinds != int(RowKind.DEFER)
        self._kept_SR[place_B] = torch.where(asked_BR, here_BR, self._kept_SR[place_B])

    def _merge_verify(self, batch: StepBatch, box: LaneBox) -> None:
        self._take(batch, box)
        lane, B, place_B = batch.lane, batch.num_lanes, self._place(batch)
        kind_BR = torch.where(self._kept_SR[place_B], self._kind_SR[place_B], int(RowKind.DEFER))
        lane.kinds_BR[:B] = torch.where(lane.guided_B[:B, None], kind_BR, int(RowKind.ALL)).to(torch.uint8)
        lane.forced_BR[:B] = self._forced_SR[place_B]

    def _merge_draft(self, batch: StepBatch, box: LaneBox, k: int) -> None:
        self._take(batch, box)
        lane, B, place_B = batch.lane, batch.num_lanes, self._place(batch)
        here_B = self._kept_SR[place_B, k] & lane.guided_B[:B] & lane.drafting_B[:B]
        lane.kinds_BR[:B, k] = torch.where(here_B, self._kind_SR[place_B, k], int(RowKind.ALL)).to(torch.uint8)
        lane.forced_BR[:B, k] = self._forced_SR[place_B, k]

    def _settle(self, batch: StepBatch) -> None:
        place_B, still_B = self._place(batch), batch.lane.result.num_emitted_B[: batch.num_lanes] == 0
        self._kept_SR[place_B] = self._kept_SR[place_B] & still_B[:, None]

    def _all_free(self, batch: StepBatch) -> None:
        batch.lane.kinds_BR[: batch.num_lanes].fill_(int(RowKind.ALL))

    def _draft_free(self, batch: StepBatch, k: int) -> None:
        batch.lane.kinds_BR[: batch.num_lanes, k].fill_(int(RowKind.ALL))

    def _forget(self, slot: int) -> None:
        self._kept_SR[slot].zero_()
        self._kind_SR[slot].fill_(int(RowKind.DEFER))

    def _keep(self, slot: int, row: int) -> None:
        self._kept_SR[slot, row].fill_(True)

    def _place(self, batch: StepBatch) -> torch.Tensor:
        """int64 [B]: row of the kept tensors, the spare one for a padded lane."""
        return torch.where(batch.slots_B < 0, len(self._kept_SR) - 1, batch.slots_B).long()
