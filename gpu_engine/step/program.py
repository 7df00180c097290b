"""The step program: verify K drafts with the target, sample, draft again. Over static buffers and a `Sync`.

One invariant: between `post` and the end nothing depends on the host's knowledge of a token, so on a GPU the whole of
`run` can be one captured graph. Not here: who is in the batch (scheduler), what became of the tokens (engine).
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.api.prefill_shapes import padded
from gpu_engine.drafters.nets import Hidden
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.prefill import Chunks, prefill
from gpu_engine.step.sync import Sync
from kernels.accept import RUN_ON, StepTensors, accept
from kernels.paged_attention import KVPages
from shared_mem.layout import RowKind


class Drafter(Protocol):
    """Proposes the tokens that the next step verifies."""

    layers: tuple[int, ...]
    """Target layers whose input it wants to see."""

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """See some sequences' tokens go by, with the target's hidden states there."""

    def propose(self, batch: StepBatch, step: StepTensors, hidden: Hidden) -> None:
        """Write `drafts_SR` and `num_drafts_S` of the lanes' slots."""


class StepProgram:
    """Model, cache, sync and drafter of one engine. Run by the engine thread alone."""

    def __init__(self, model: LoadedModel, pages: list[KVPages], sync: Sync, drafter: Drafter) -> None:
        self.model, self.pages, self.sync, self.drafter = model, pages, sync, drafter

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> None:
        """Advance every lane by one verify step; results are in `batch.lane.result`."""
        ids_BP, context = self._load(batch)
        context.hidden = hidden = dict.fromkeys(self.drafter.layers)
        self.sync.post(batch)  # the sidecar rolls back, accepts and fills rows while the target runs
        logits_NV = self.model.logits(ids_BP, context)
        self.sync.await_rows(batch)
        self._hold(batch)
        step = self._tensors(batch)
        accept(logits_NV, step, num_rows=batch.num_rows)
        self._settle(batch)
        self.drafter.propose(batch, step, hidden)

    @torch.inference_mode()
    def prefill(self, batch: StepBatch, start: int, end: int) -> None:
        """Fill the cache with tokens [start, end) of the one lane's sequence."""
        hidden: Hidden = dict.fromkeys(self.drafter.layers)
        start_B, end_B = torch.tensor([[start], [end]], dtype=torch.int32)
        chunks = Chunks.cut(batch.slot, batch.slots_B.long(), start_B, end_B, padded(end - start))
        prefill(self.model, self.pages, chunks, hidden)
        self.drafter.prefill(chunks, hidden)

    def warm_up(self, slot: SlotBuffers, lane: LaneBuffers, num_rows: int) -> None:
        """Run the target over a made-up token in page 0, so that libraries choose and allocate early."""
        slot.length_S[0] = 1
        slot.num_drafts_S[0] = num_rows - 1
        lane.slots_B[0] = 0
        with torch.inference_mode():
            self.model.logits(*self._load(StepBatch(slot, lane, 1, num_rows, any_guided=False)))
        slot.num_drafts_S[0] = slot.length_S[0] = 0

    def _load(self, batch: StepBatch) -> tuple[torch.Tensor, AttentionContext]:
        """Cut the step's inputs from the slots: the last token and the drafts behind it."""
        slot, lane, B, P = batch.slot, batch.lane, batch.num_lanes, batch.num_rows
        slots = batch.slots_B.long()
        last_B1 = slot.length_S[slots][:, None] - 1
        lane.drafts_BR[:B] = slot.drafts_SR[slots]
        lane.num_drafts_B[:B] = slot.num_drafts_S[slots].clamp(max=P - 1)
        row_P = torch.arange(P, dtype=torch.int32)
        live_BP = (row_P <= lane.num_drafts_B[:B, None]) & ~slot.done_S[slots][:, None]
        positions_BP = torch.where(live_BP, last_B1 + row_P, -1)
        last_id_B1 = slot.history_SL[slots].gather(1, last_B1.long())
        ids_BP = torch.cat([last_id_B1, lane.drafts_BR[:B, : P - 1]], dim=1)
        ids_BP = torch.where(live_BP, ids_BP, 0).long()
        return ids_BP, AttentionContext(self.pages, slot.page_table_SN[slots], positions_BP)

    def _tensors(self, batch: StepBatch) -> StepTensors:
        slot, lane = batch.slot, batch.lane
        return StepTensors(
            batch.slots_B,
            lane.drafts_BR,
            lane.num_drafts_B,
            lane.kinds_BR,
            lane.forced_BR,
            *self.sync.rows(),
            slot.history_SL,
            slot.length_S,
            slot.params,
            lane.result,
        )

    def _hold(self, batch: StepBatch) -> None:
        """A slot that stopped in a step nobody has read yet emits nothing more."""
        done_B = batch.slot.done_S[batch.slots_B.long()]
        batch.lane.kinds_BR[: batch.num_lanes].masked_fill_(done_B[:, None], int(RowKind.DEFER))

    def _settle(self, batch: StepBatch) -> None:
        """Who goes on: a lane that emitted and did not end. The rows of the others' past are forgotten."""
        lane, result, B = batch.lane, batch.lane.result, batch.num_lanes
        batch.slot.done_S[batch.slots_B.long()] |= (result.finish_B[:B] != RUN_ON) | (
            result.blocked_B[:B] > int(RowKind.DEFER)
        )
        lane.drafting_B[:B] = (
            (result.num_emitted_B[:B] > 0) & (result.finish_B[:B] == RUN_ON) & (result.blocked_B[:B] == 0)
        )
        self.sync.settle(batch)
