"""What a step tells the grammar process and what it keeps of the answer, as device work: two forms of one rule.

`TritonRows` is a kernel each (kernels/cuda/posting.py). `TorchRows` is the same in torch operations, for devices that
have no Triton and for the tests' stream. The rule: a kept row is not asked for; a guided row that is not here is DEFER to verify and ALL to draft; a lane that emitted forgets
its rows; a slot that is done asks for nothing. One invariant: neither form reads the device, or launches by what is in
it.

Padding: a lane with slot -1 asks for nothing and its kinds are ALL. TorchRows lets it write into a spare row behind the
last slot, TritonRows does not let it write. Not here: how records and answers travel (sync_cuda.py).

Shapes: S slots, B lanes, R rows a slot, W' words of a row's stride.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.device.post_buffers import PostBuffers
from gpu_engine.step.mask_rows import RowStore
from kernels.accept import RUN_ON
from shared_mem.layout import RowKind

if TYPE_CHECKING:
    from kernels.cuda import posting

VERIFY, PROPOSE = -1, -2
"""Instead of the number of a draft; PROPOSE asks for no row, but for what the grammar forces."""


class RowWork(Protocol):
    """Kernels around a post and a wait. The store's kinds, forced and kept have S + 1 rows, the last one is spare."""

    def pack(self, batch: StepBatch, store: RowStore, box: PostBuffers, k: int) -> None:
        """Fill the box's inputs for draft k, VERIFY or PROPOSE; advance `posted_S` by what they tell.

        PROPOSE is behind `settle`, and leaves `posted_S`: the next post says the same tokens again.
        """

    def keep(self, batch: StepBatch, store: RowStore, box: PostBuffers, k: int, told: torch.Tensor | None) -> None:
        """Keep the rows that the box's inputs asked for; fill `kinds_BR` and `forced_BR`: row k, or every row.

        `told` int64 [1] gets the sequence of the answers.
        """

    def take_jump_forward(self, batch: StepBatch, box: PostBuffers, vocab_size: int) -> None:
        """Fill `num_jump_forward_B`, and put the tokens where it says; `num_drafts_S` of lanes that moved is that number.

        A token that is not in [0, `vocab_size`) ends a lane's proposal, and is not part of it.
        """

    def settle(self, batch: StepBatch, store: RowStore) -> None:
        """Forget the rows of lanes that emitted something."""


def _asking(batch: StepBatch, slots_B: torch.Tensor) -> torch.Tensor:
    """bool [B]: guided lanes whose slots have not stopped."""
    return batch.lane.guided_B[: batch.num_lanes] & ~batch.slot.done_S[slots_B]


class TorchRows:
    """Torch operations."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._row_R = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._at_T = torch.arange(2 * num_rows, dtype=torch.int32, device=device)

    def pack(self, batch: StepBatch, store: RowStore, box: PostBuffers, k: int) -> None:
        """See `RowWork.pack`."""
        slot, lane, B, R = batch.slot, batch.lane, batch.num_lanes, len(self._row_R)
        slots_B = batch.slots_B.clamp(min=0).long()
        asking_B, drafts_B = _asking(batch, slots_B) & (batch.slots_B >= 0), lane.num_drafts_B[:B]
        if k == VERIFY:
            missing_BR = (self._row_R <= drafts_B[:, None]) & ~store.cached_SR[slots_B] & asking_B[:, None]
        elif k == PROPOSE:
            r, room_B = lane.result, slot.params.max_length_S[slots_B] - slot.length_S[slots_B] - 1
            asking_B &= (r.num_emitted_B[:B] > 0) & (r.finish_B[:B] == RUN_ON) & (r.blocked_B[:B] == 0)
            wanted_B = torch.minimum(slot.jump_forward_limit_S[slots_B], room_B).clamp(max=min(R, batch.max_rows) - 1)
            missing_BR = (self._row_R < wanted_B[:, None]) & asking_B[:, None]
            drafts_B = torch.zeros_like(drafts_B)
        else:
            missing_BR = (self._row_R == k) & (asking_B & lane.drafting_B[:B])[:, None]
            drafts_B = torch.full_like(drafts_B, k)
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
        box.n_draft.copy_(torch.where(asked_B, drafts_B, 0))
        box.need_rows.copy_((missing_BR.int() << self._row_R).sum(dim=1))
        # An addition, since a padded lane shares its index with slot 0: it adds nothing.
        if k != PROPOSE:
            slot.posted_S.index_add_(0, slots_B, fresh_B)

    def keep(self, batch: StepBatch, store: RowStore, box: PostBuffers, k: int, told: torch.Tensor | None) -> None:
        """See `RowWork.keep`. The mask rows are in the store already."""
        if told is not None:
            told.copy_(box.awaited)
        lane, B, place_B = batch.lane, batch.num_lanes, _place(batch, store)
        asked_BR = (box.need_rows[:, None] >> self._row_R & 1).bool() & (box.slots >= 0)[:, None]
        store.kind_SR[place_B] = torch.where(asked_BR, box.kinds, store.kind_SR[place_B])
        store.forced_SR[place_B] = torch.where(asked_BR, box.forced, store.forced_SR[place_B])
        here_BR = torch.where(asked_BR, box.kinds != int(RowKind.DEFER), store.cached_SR[place_B])
        store.cached_SR[place_B] = here_BR
        kind_BR, forced_BR, listens_B = store.kind_SR[place_B], store.forced_SR[place_B], lane.guided_B[:B]
        if k == VERIFY:
            kind_BR = torch.where(here_BR, kind_BR, int(RowKind.DEFER))
            lane.kinds_BR[:B] = torch.where(listens_B[:, None], kind_BR, int(RowKind.ALL)).to(torch.uint8)
            lane.forced_BR[:B] = forced_BR
        else:
            here_B = here_BR[:, k] & listens_B & lane.drafting_B[:B]
            lane.kinds_BR[:B, k] = torch.where(here_B, kind_BR[:, k], int(RowKind.ALL)).to(torch.uint8)
            lane.forced_BR[:B, k] = forced_BR[:, k]

    def take_jump_forward(self, batch: StepBatch, box: PostBuffers, vocab_size: int) -> None:
        """See `RowWork.take_jump_forward`."""
        slot, lane, B, row_R = batch.slot, batch.lane, batch.num_lanes, self._row_R
        place_B = torch.where(batch.slots_B < 0, len(slot.length_S) - 1, batch.slots_B).long()
        asked_BR = (box.need_rows[:, None] >> row_R & 1).bool() & (box.slots >= 0)[:, None]
        legal_BR = (box.forced >= 0) & (box.forced < vocab_size)
        ahead_B = ((box.kinds == int(RowKind.FORCED)) & asked_BR & legal_BR).int().cumprod(dim=1).sum(dim=1).int()
        stays_B = lane.result.num_emitted_B[:B] == 0
        lane.num_jump_forward_B[:B] = torch.where(stays_B, -1, ahead_B)
        there_BR = row_R < ahead_B[:, None]
        behind_BR = (slot.length_S[place_B][:, None] + row_R).clamp(max=slot.history_SL.shape[1] - 1).long()
        old_BR = slot.history_SL[place_B[:, None], behind_BR]
        slot.history_SL[place_B[:, None], behind_BR] = torch.where(there_BR, box.forced, old_BR)
        slot.drafts_SR[place_B] = torch.where(there_BR, box.forced, slot.drafts_SR[place_B])
        slot.num_drafts_S[place_B] = torch.where(stays_B, slot.num_drafts_S[place_B], ahead_B)

    def settle(self, batch: StepBatch, store: RowStore) -> None:
        """See `RowWork.settle`."""
        place_B, still_B = _place(batch, store), batch.lane.result.num_emitted_B[: batch.num_lanes] == 0
        store.cached_SR[place_B] = store.cached_SR[place_B] & still_B[:, None]


def _place(batch: StepBatch, store: RowStore) -> torch.Tensor:
    """int64 [B]: row of the store, the spare one for a padded lane."""
    return torch.where(batch.slots_B < 0, len(store.cached_SR) - 1, batch.slots_B).long()


class TritonRows:
    """One Triton kernel a method.

    Args:
        source_NSRW: int32, where `keep` finds mask rows: the mapped segment's two buffers [2, S, R, W'], or the store's
            own rows [1, S, R, W'] when the wait has fetched them.
    """

    def __init__(self, source_NSRW: torch.Tensor) -> None:
        from kernels.cuda import posting as kernels
        from kernels.cuda.advance import advance
        from kernels.cuda.jump_forward import take_jump_forward

        self._kernels, self._settle, self._take_jump_forward = kernels, advance, take_jump_forward
        self._source_NSRW = source_NSRW

    def pack(self, batch: StepBatch, store: RowStore, box: PostBuffers, k: int) -> None:
        """See `RowWork.pack`."""
        slot, lane, B = batch.slot, batch.lane, batch.num_lanes
        self._kernels.pack_post(
            *(batch.slots_B, lane.guided_B[:B], lane.drafting_B[:B], lane.slot_gens_B[:B], lane.drafts_BR[:B]),
            *(lane.num_drafts_B[:B], slot.history_SL, slot.length_S, slot.params.prompt_length_S, slot.posted_S),
            *(self._rows(store), self._tensors(box)),
            k=k,
            # A lane that drafts has not stopped.
            done_S=slot.done_S if k == VERIFY else None,
            limits=(slot.jump_forward_limit_S, slot.params.max_length_S) if k == PROPOSE else None,
            max_rows=batch.max_rows,
        )

    def take_jump_forward(self, batch: StepBatch, box: PostBuffers, vocab_size: int) -> None:
        """See `RowWork.take_jump_forward`."""
        slot, lane, B = batch.slot, batch.lane, batch.num_lanes
        self._take_jump_forward(
            *(batch.slots_B, lane.result.num_emitted_B[:B], box.slots, box.need_rows, box.kinds, box.forced),
            *(slot.length_S, slot.history_SL, slot.drafts_SR, slot.num_drafts_S, lane.num_jump_forward_B[:B]),
            vocab_size=vocab_size,
        )

    def keep(self, batch: StepBatch, store: RowStore, box: PostBuffers, k: int, told: torch.Tensor | None) -> None:
        """See `RowWork.keep`. Copies the mask rows that were asked for into the store."""
        lane, B = batch.lane, batch.num_lanes
        self._kernels.keep_rows(
            *(batch.slots_B, lane.guided_B[:B], lane.drafting_B[:B], self._tensors(box), box.awaited),
            *(self._source_NSRW, self._rows(store), lane.kinds_BR[:B], lane.forced_BR[:B]),
            k=k,
            told=told,
        )

    def settle(self, batch: StepBatch, store: RowStore) -> None:
        """See `RowWork.settle`; also fills `drafting_B`, by the step's own rule."""
        lane, B, cached_SR = batch.lane, batch.num_lanes, self._rows(store).cached_SR
        r = lane.result
        self._settle(
            batch.slots_B, r.num_emitted_B[:B], r.finish_B[:B], r.blocked_B[:B], lane.drafting_B[:B], cached_SR
        )

    def _rows(self, store: RowStore) -> posting.KeptRows:
        S = len(store.mask_SRW)
        return self._kernels.KeptRows(store.mask_SRW, store.kind_SR[:S], store.forced_SR[:S], store.cached_SR[:S])

    def _tensors(self, box: PostBuffers) -> posting.PostTensors:
        inputs = (box.slots, box.slot_gens, box.commit_pos, box.n_commit, box.n_draft, box.need_rows, box.tokens)
        return self._kernels.PostTensors(*inputs, box.kinds, box.forced)
