"""A drafting network as launches: the chain of drafters/model.py with a fixed K, for capture and replay.

Every lane goes through every link. A lane that wants fewer drafts, met a dead end or is padding takes no part in the
links behind: it asks for no row, its positions are padding, and what is drawn for it is not counted. One invariant: no
launch depends on data. Not here: the rule by which a draft is drawn.

Shapes: B lanes, S slots with the spare one, R rows a slot, N pages of a sequence.
"""

from __future__ import annotations

import torch

from gpu_engine.drafters.nets import DraftNet, Hidden, put_jump_forward, with_jump_forward
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.prefill import Chunks
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import Sync
from kernels.accept import RUN_ON, StepTensors, draw_drafts
from shared_mem.layout import RowKind


class ModelChain:
    """Owns the net and the chain's buffers. Padded lanes write into the last slot, the spare one."""

    def __init__(
        self,
        stream: Stream,
        net: DraftNet,
        sync: Sync,
        *,
        masked: bool,
        num_lanes: int,
        num_links: int,
        forced: bool = False,
    ) -> None:
        self._stream, self.net, self._sync, self._masked, self._forced = stream, net, sync, masked, forced
        self.layers, self._links = net.layers, num_links

        def ints(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=stream.device)

        self._wanted_B, self._count_B = ints(num_lanes), ints(num_lanes)
        self._going_B = ints(num_lanes, torch.bool)
        """Lanes that emitted and go on."""
        self._ids, self._positions = ints(num_lanes, torch.int64), ints(num_lanes)
        """The next link's draft of each lane, and where it stands."""
        self._logits_BV: torch.Tensor | None = None

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Let the net see the same tokens."""
        self.net.prefill(chunks, hidden)

    def enqueue(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue K links; a lane without news keeps the drafts it has."""
        kernel, links = self._stream.kernel, min(self._links, batch.max_rows - 1)
        kernel(self._begin, batch, links)
        for k in range(links):
            kernel(self._link, batch, k)
            if self._masked:
                self._sync.post_draft(batch, k)
            kernel(self._forward, batch, k, page_table_BN, hidden)
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

    def _link(self, batch: StepBatch, k: int) -> None:
        """A chain that met a dead end asks for no more rows: what follows is no token."""
        B = batch.num_lanes
        batch.lane.drafting_B[:B] = self._going_B[:B] & (self._wanted_B[:B] > k) & (self._count_B[:B] == k)

    @torch.no_grad()
    def _forward(self, batch: StepBatch, k: int, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        B = batch.num_lanes
        if k == 0:
            self._logits_BV = self.net.first(batch, _place(batch), self._going_B[:B], page_table_BN, hidden)
        else:
            self._logits_BV = self.net.next(self._ids[:B, None], self._positions[:B, None], page_table_BN)

    @torch.no_grad()
    def _draw(self, batch: StepBatch, step: StepTensors, k: int) -> None:
        assert self._logits_BV is not None, "the forward is before this"
        lane, B = batch.lane, batch.num_lanes
        if not self._masked:
            lane.kinds_BR[:B, k] = int(RowKind.ALL)
        draw_drafts(self._logits_BV, step, k, d2t_V=self.net.d2t_V)
        self._logits_BV = None
        if self._forced and batch.any_guided:
            put_jump_forward(batch, _place(batch), k)
        drawn_B = lane.drafts_BR[:B, k]
        self._count_B[:B] += (drawn_B >= 0) & lane.drafting_B[:B]
        self._ids[:B] = drawn_B.clamp(min=0)
        # A lane that wants no more writes no more: behind its last position it owns no page.
        next_B = batch.slot.length_S[_place(batch)] + k
        on_B = self._going_B[:B] & (self._wanted_B[:B] > k + 1)
        self._positions[:B] = torch.where(on_B, next_B, -1)

    def _finish(self, batch: StepBatch, links: int) -> None:
        slot, lane, B, place_B = batch.slot, batch.lane, batch.num_lanes, _place(batch)
        going_B, count_B = self._going_B[:B], self._count_B[:B]
        drawn_BK = going_B[:, None] & (torch.arange(links, device=count_B.device) < count_B[:, None])
        slot.drafts_SR[place_B, :links] = torch.where(
            drawn_BK, lane.drafts_BR[:B, :links], slot.drafts_SR[place_B, :links]
        )
        if self._forced and batch.any_guided:
            count_B = with_jump_forward(batch, count_B, self._wanted_B[:B])
        # A lane that emitted nothing keeps drafts and rows for its next try; one that was cut short has none.
        cached_B = torch.where(lane.result.num_emitted_B[:B] == 0, slot.num_drafts_S[place_B], 0)
        slot.num_drafts_S[place_B] = torch.where(going_B, count_B, cached_B).int()
        lane.drafting_B[:B] = going_B


def _place(batch: StepBatch) -> torch.Tensor:
    """int64 [B]: each lane's slot, the spare one for a padded lane."""
    return torch.where(batch.slots_B < 0, len(batch.slot.length_S) - 1, batch.slots_B).long()
