"""A network as the drafter: K recurrent links inside the step, each masked and drawn as the target's.

The chain of speculative decoding (Leviathan et al. 2023) under common random numbers: draft k is drawn at absolute
position length + k with the noise that verification will use there, from logits under the mask that verification will
apply there. So a drafter that equals the target is always accepted. The rows asked for here are kept for the next
verify.

One invariant: a lane's drafts are counted up to the first that is none, and nothing is asked for it behind that. Not
here: which token is accepted, and what a link computes (nets.py, eagle3.py).
"""

from __future__ import annotations

import torch

from gpu_engine.drafters.nets import DraftNet, Hidden, put_jump_forward, with_jump_forward
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.prefill import Chunks
from gpu_engine.step.sync import Sync
from kernels.accept import StepTensors, draw_drafts


class ModelDrafter:
    """Owns the net. Run by the engine thread alone."""

    def __init__(self, net: DraftNet, sync: Sync, *, masked: bool, forced: bool = False) -> None:
        self.net, self._sync, self._masked, self._forced = net, sync, masked, forced
        self.layers = net.layers

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Let the net see the same tokens."""
        self.net.prefill(chunks, hidden)

    def propose(self, batch: StepBatch, step: StepTensors, hidden: Hidden) -> None:
        """Draft up to K tokens a lane, or as many as are forced; a lane without news keeps the drafts it has."""
        slot, lane, B, slots = batch.slot, batch.lane, batch.num_lanes, batch.slots_B.long()
        length_B1, drafting_B = slot.length_S[slots][:, None], lane.drafting_B[:B].clone()
        room_B = slot.params.max_length_S[slots] - length_B1[:, 0] - 1
        wanted_B = torch.minimum(slot.draft_limit_S[slots], room_B).clamp(min=0, max=batch.max_rows - 1) * drafting_B
        # On a CPU the longest wish bounds the chain; a captured step always runs K.
        chain = int(wanted_B.max())
        table_BN = slot.page_table_SN[slots]
        if not chain and bool((drafting_B & (slot.draft_limit_S[slots] > 0)).any()):
            # Who drafts later must not have missed these tokens.
            self.net.first(batch, slots, drafting_B, table_BN, hidden)
        count_B = torch.zeros_like(wanted_B)
        for k in range(chain):
            # A chain that met a dead end asks for no more rows: what follows is no token.
            lane.drafting_B[:B] = drafting_B & (wanted_B > k) & (count_B == k)
            if self._masked:
                self._sync.post_draft(batch, k)
            if k == 0:
                logits_BV = self.net.first(batch, slots, drafting_B, table_BN, hidden)
            else:
                # A lane that wants no more writes no more: behind its last position it owns no page.
                on_B1 = (drafting_B & (wanted_B > k))[:, None]
                drawn_B1 = lane.drafts_BR[:B, k - 1 : k].clamp(min=0)
                logits_BV = self.net.next(drawn_B1, torch.where(on_B1, length_B1 + k - 1, -1), table_BN)
            if self._masked:
                self._sync.await_draft(batch, k)
            else:
                lane.kinds_BR[:B, k] = 0
            draw_drafts(logits_BV, step, k, d2t_V=self.net.d2t_V)
            if self._forced and batch.any_guided:
                put_jump_forward(batch, slots, k)
            count_B += (lane.drafts_BR[:B, k] >= 0) & lane.drafting_B[:B]
        drawn_BR = drafting_B[:, None] & (torch.arange(lane.drafts_BR.shape[1]) < count_B[:, None])
        slot.drafts_SR[slots] = torch.where(drawn_BR, lane.drafts_BR[:B], slot.drafts_SR[slots])
        if self._forced and batch.any_guided:
            count_B = with_jump_forward(batch, count_B, wanted_B)
        # A lane that emitted nothing keeps drafts and rows for its next try; one that was cut short has none.
        stuck_B = lane.result.num_emitted_B[:B] == 0
        cached_B = torch.where(stuck_B, slot.num_drafts_S[slots], 0)
        slot.num_drafts_S[slots] = torch.where(drafting_B, count_B, cached_B).int()
        lane.drafting_B[:B] = drafting_B
