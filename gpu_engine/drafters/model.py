"""A causal language model as the drafter: K recurrent forwards inside the step, each masked and drawn as the target's.

The chain of speculative decoding (Leviathan et al. 2023) under common random numbers: draft k is drawn at absolute
position length + k with the noise that verification will use there, from logits under the mask that verification will
apply there. So a drafter that equals the target is always accepted. The rows asked for here are kept for the next
verify.

One invariant: the drafter's cache holds every token before `length - 2` when `propose` begins; it writes the rest
itself. The pages are the target's page numbers over tensors of its own. Not here: which token is accepted.
"""

from __future__ import annotations

import torch

from gpu_engine.buffers import StepBatch
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.prefill import prefill
from gpu_engine.sync import Sync
from kernels.accept import StepTensors, draw_drafts
from kernels.paged_attention import KVPages


class ModelDrafter:
    """Owns the draft model and its cache. Run by the engine thread alone."""

    def __init__(self, model: LoadedModel, pages: list[KVPages], sync: Sync, *, masked: bool) -> None:
        self.model, self._pages, self._sync, self._masked = model, pages, sync, masked

    def prefill(self, batch: StepBatch, start: int, end: int) -> None:
        """Fill the drafter's cache with the same tokens."""
        prefill(self.model, self._pages, batch, start, end)

    def propose(self, batch: StepBatch, step: StepTensors) -> None:
        """Draft up to K tokens a lane; a lane without news keeps the drafts it has."""
        slot, lane, B, slots = batch.slot, batch.lane, batch.num_lanes, batch.slots_B.long()
        length_B1, drafting_B = slot.length_S[slots][:, None], lane.drafting_B[:B].clone()
        room_B = slot.params.max_length_S[slots] - length_B1[:, 0] - 1
        wanted_B = torch.minimum(slot.draft_limit_S[slots], room_B).clamp(min=0, max=batch.max_rows - 1) * drafting_B
        # On a CPU the longest wish bounds the chain; a captured step always runs K.
        chain = int(wanted_B.max())
        # Two tokens at first: after a full acceptance the drafter has not seen the last draft yet.
        tail_B2 = length_B1 - 2 + torch.arange(2, dtype=torch.int32)
        positions_BP = torch.where(drafting_B[:, None], tail_B2, -1)
        ids_BP = slot.history_SL[slots].gather(1, tail_B2.clamp(min=0).long())
        count_B = torch.zeros_like(wanted_B)
        for k in range(chain):
            # A chain that met a dead end asks for no more rows: what follows is no token.
            lane.drafting_B[:B] = drafting_B & (wanted_B > k) & (count_B == k)
            if self._masked:
                self._sync.post_draft(batch, k)
            context = AttentionContext(self._pages, slot.page_table_SN[slots], positions_BP.int().contiguous())
            logits_BV = self.model.logits(ids_BP.long(), context).view(B, positions_BP.shape[1], -1)[:, -1]
            if self._masked:
                self._sync.await_draft(batch, k)
            else:
                lane.kinds_BR[:B, k] = 0
            draw_drafts(logits_BV, step, k)
            drawn_B1 = lane.drafts_BR[:B, k : k + 1]
            count_B += (drawn_B1[:, 0] >= 0) & lane.drafting_B[:B]
            ids_BP = drawn_B1.clamp(min=0)
            # A lane that wants no more writes no more: behind its last position it owns no page.
            positions_BP = torch.where((drafting_B & (wanted_B > k + 1))[:, None], length_B1 + k, -1)
        slot.drafts_SR[slots] = torch.where(drafting_B[:, None], lane.drafts_BR[:B].clamp(min=0), slot.drafts_SR[slots])
        # A lane that emitted nothing keeps drafts and rows for its next try; one that was cut short has none.
        stuck_B = lane.result.num_emitted_B[:B] == 0
        kept_B = torch.where(stuck_B, slot.num_drafts_S[slots], 0)
        slot.num_drafts_S[slots] = torch.where(drafting_B, count_B, kept_B).int()
        lane.drafting_B[:B] = drafting_B
