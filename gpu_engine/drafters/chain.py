"""The draft model as launches: the chain of drafters/model.py with a fixed K, for capture and replay.

Every lane goes through every link. A lane that wants fewer drafts, met a dead end or is padding takes no part in the
links behind: it asks for no row, its positions are padding, and what is drawn for it is not counted. One invariant: no
launch depends on data. Not here: the rule by which a draft is drawn.

Shapes: B lanes, S slots with the spare one, R rows a slot, N pages of a sequence.
"""

from __future__ import annotations

import torch

from gpu_engine.buffers import SlotBuffers, StepBatch
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.prefill import prefill_row
from gpu_engine.stream import Stream
from gpu_engine.sync import Sync
from kernels.accept import RUN_ON, StepTensors, draw_drafts
from kernels.paged_attention import KVPages
from shared_mem.layout import RowKind


class ModelChain:
    """Owns the draft model, its cache and the chain's buffers. Padded lanes write into the last slot, the spare one."""

    def __init__(
        self, stream: Stream, model: LoadedModel, pages: list[KVPages], sync: Sync, *, masked: bool, num_lanes: int
    ) -> None:
        self._stream, self.model, self._pages, self._sync, self._masked = stream, model, pages, sync, masked

        def ints(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=stream.device)

        self._wanted_B, self._count_B = ints(num_lanes), ints(num_lanes)
        self._going_B = ints(num_lanes, torch.bool)
        """Lanes that emitted and go on."""
        # The first link has two tokens a lane: after a full acceptance the drafter has not seen the last draft yet.
        self._ids, self._positions = ints(2 * num_lanes, torch.int64), ints(2 * num_lanes)
        self._logits_BV: torch.Tensor | None = None

    def prefill(self, slot: SlotBuffers, place: int, start: int, end: int) -> None:
        """Fill the drafter's cache with the same tokens."""
        at = slice(place, place + 1)
        prefill_row(self.model, self._pages, slot.history_SL[at], slot.page_table_SN[at], start, end)

    def enqueue(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor) -> None:
        """Enqueue K links; a lane without news keeps the drafts it has."""
        kernel, links = self._stream.kernel, min(batch.slot.drafts_SR.shape[1], batch.max_rows) - 1
        kernel(self._begin, batch, links)
        for k in range(links):
            kernel(self._link, batch, k)
            if self._masked:
                self._sync.post_draft(batch, k)
            kernel(self._forward, batch, k, page_table_BN)
            if self._masked:
                self._sync.await_draft(batch, k)
            kernel(self._draw, batch, step, k)
        kernel(self._finish, batch, links)

    def _begin(self, batch: StepBatch, links: int) -> None:
        slot, lane, B, place_B = batch.slot, batch.lane, batch.num_lanes, _place(batch)
        r, length_B = lane.result, slot.length_S[place_B]
        going_B = (r.num_emitted_B[:B] > 0) & (r.finish_B[:B] == RUN_ON) & (r.blocked_B[:B] == 0) & (batch.slots_B >= 0)
        self._going_B[:B] = going_B
        room_B = slot.params.max_length_S[place_B] - length_B - 1
        self._wanted_B[:B] = torch.minimum(slot.draft_limit_S[place_B], room_B).clamp(min=0, max=links) * going_B
        self._count_B[:B] = 0
        tail_B2 = length_B[:, None] - 2 + torch.arange(2, dtype=torch.int32, device=length_B.device)
        ids_B2, positions_B2 = self._inputs(B, 2)
        positions_B2.copy_(torch.where(going_B[:, None], tail_B2, -1))
        ids_B2.copy_(slot.history_SL[place_B[:, None], tail_B2.clamp(min=0).long()])

    def _link(self, batch: StepBatch, k: int) -> None:
        """A chain that met a dead end asks for no more rows: what follows is no token."""
        B = batch.num_lanes
        batch.lane.drafting_B[:B] = self._going_B[:B] & (self._wanted_B[:B] > k) & (self._count_B[:B] == k)

    @torch.no_grad()
    def _forward(self, batch: StepBatch, k: int, page_table_BN: torch.Tensor) -> None:
        width = 1 if k else 2
        ids_BP, positions_BP = self._inputs(batch.num_lanes, width)
        context = AttentionContext(self._pages, page_table_BN, positions_BP)
        logits_NV = self.model.logits(ids_BP, context)
        self._logits_BV = logits_NV.view(batch.num_lanes, width, -1)[:, -1]

    @torch.no_grad()
    def _draw(self, batch: StepBatch, step: StepTensors, k: int) -> None:
        assert self._logits_BV is not None, "the forward is before this"
        lane, B = batch.lane, batch.num_lanes
        if not self._masked:
            lane.kinds_BR[:B, k] = int(RowKind.ALL)
        draw_drafts(self._logits_BV, step, k)
        self._logits_BV = None
        drawn_B = lane.drafts_BR[:B, k]
        self._count_B[:B] += (drawn_B >= 0) & lane.drafting_B[:B]
        ids_B1, positions_B1 = self._inputs(B, 1)
        ids_B1.copy_(drawn_B[:, None].clamp(min=0))
        # A lane that wants no more writes no more: behind its last position it owns no page.
        next_B = batch.slot.length_S[_place(batch)] + k
        on_B = self._going_B[:B] & (self._wanted_B[:B] > k + 1)
        positions_B1.copy_(torch.where(on_B, next_B, -1)[:, None])

    def _finish(self, batch: StepBatch, links: int) -> None:
        slot, lane, B, place_B = batch.slot, batch.lane, batch.num_lanes, _place(batch)
        going_B, drafts_BK = self._going_B[:B], lane.drafts_BR[:B, :links].clamp(min=0)
        slot.drafts_SR[place_B, :links] = torch.where(going_B[:, None], drafts_BK, slot.drafts_SR[place_B, :links])
        # A lane that emitted nothing keeps drafts and rows for its next try; one that was cut short has none.
        kept_B = torch.where(lane.result.num_emitted_B[:B] == 0, slot.num_drafts_S[place_B], 0)
        slot.num_drafts_S[place_B] = torch.where(going_B, self._count_B[:B], kept_B).int()
        lane.drafting_B[:B] = going_B

    def _inputs(self, num_lanes: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and positions of a link, [B, width]."""
        count = num_lanes * width
        return self._ids[:count].view(num_lanes, width), self._positions[:count].view(num_lanes, width)


def _place(batch: StepBatch) -> torch.Tensor:
    """int64 [B]: each lane's slot, the spare one for a padded lane."""
    return torch.where(batch.slots_B < 0, len(batch.slot.length_S) - 1, batch.slots_B).long()
