"""The launches of a step in plain torch: what the native calls and the kernels are compared with.

Shapes: S slots (the last one is spare), B lanes, R rows a slot, P rows of this step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import PROPOSE, VERIFY, place_of
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.post_buffers import PostBuffers
from kernels.accept import RUN_ON, StepTensors, accept
from kernels.logprobs import RowLogprobs
from shared_mem.layout import RowKind


class TorchLaunches:
    """`StepLaunches` in plain torch. `num_rows` is R; `mask_rows` as `NativeLaunches` has it, None where the sync has
    brought the mask rows into the store."""

    def __init__(
        self, num_rows: int, device: torch.device | str = "cpu", mask_rows: Callable[[int], Any] | None = None
    ) -> None:
        self._mask_rows = mask_rows
        self._row_R = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._at_T = torch.arange(2 * num_rows, dtype=torch.int32, device=device)

    def load(
        self, batch: StepBatch, ids_BP: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor
    ) -> None:
        """See `StepLaunches.load`."""
        slot, lane, B, P, place_B = batch.slot, batch.lane, batch.num_lanes, batch.num_rows, place_of(batch)
        last_B1 = slot.length_S[place_B][:, None] - 1
        lane.drafts_BR[:B] = slot.drafts_SR[place_B]
        lane.num_drafts_B[:B] = torch.minimum(slot.num_drafts_S[place_B], lane.draft_limit_B[:B]).clamp(max=P - 1)
        row_P = self._row_R[:P]
        live_BP = (row_P <= lane.num_drafts_B[:B, None]) & ~slot.done_S[place_B][:, None]
        positions_BP.copy_(torch.where(live_BP, last_B1 + row_P, -1))
        last_id_B1 = slot.history_SL[place_B].gather(1, last_B1.long())
        ids_BP.copy_(torch.where(live_BP, torch.cat([last_id_B1, lane.drafts_BR[:B, : P - 1]], dim=1), 0))
        page_table_BN.copy_(slot.page_table_SN[place_B])

    def accept(self, batch: StepBatch, logits_NV: torch.Tensor, step: StepTensors) -> None:
        """See `StepLaunches.accept`."""
        lane, r, B, place_B = batch.lane, batch.lane.result, batch.num_lanes, place_of(batch)
        # The slot may have ended in a step that the host has not read yet.
        lane.kinds_BR[:B].masked_fill_(batch.slot.done_S[place_B][:, None], int(RowKind.DEFER))
        accept(logits_NV, step, num_rows=batch.num_rows)
        batch.slot.done_S[place_B] |= (r.finish_B[:B] != RUN_ON) | (r.blocked_B[:B] > int(RowKind.DEFER))

    def advance(self, batch: StepBatch, store: RowStore) -> None:
        """See `StepLaunches.advance`."""
        lane, r, B = batch.lane, batch.lane.result, batch.num_lanes
        emitted_B = r.num_emitted_B[:B] > 0
        lane.drafting_B[:B] = emitted_B & (r.finish_B[:B] == RUN_ON) & (r.blocked_B[:B] == 0) & (batch.slots_B >= 0)
        if batch.any_guided:
            place_B = place_of(batch)
            store.cached_SR[place_B] = store.cached_SR[place_B] & ~emitted_B[:, None]

    def pack(self, batch: StepBatch, store: RowStore, post: PostBuffers, k: int) -> None:
        """See `StepLaunches.pack`."""
        slot, lane, B, R = batch.slot, batch.lane, batch.num_lanes, len(self._row_R)
        slots_B = place_of(batch)
        length_B, drafts_B = slot.length_S[slots_B], lane.num_drafts_B[:B]
        may_request_B = lane.guided_B[:B] & (batch.slots_B >= 0)
        if k == VERIFY:
            may_request_B &= ~slot.done_S[slots_B]
            missing_BR = (self._row_R <= drafts_B[:, None]) & ~store.cached_SR[slots_B] & may_request_B[:, None]
        elif k == PROPOSE:
            room_B = slot.params.max_length_S[slots_B] - length_B - 1
            wanted_B = torch.minimum(slot.jump_forward_limit_S[slots_B], room_B).clamp(max=min(R, batch.max_rows) - 1)
            missing_BR = (self._row_R < wanted_B[:, None]) & (may_request_B & lane.drafting_B[:B])[:, None]
            drafts_B = torch.zeros_like(drafts_B)
        else:
            missing_BR = (self._row_R == k) & (may_request_B & lane.drafting_B[:B])[:, None]
            drafts_B = torch.full_like(drafts_B, k)
        requested_B, posted_B = missing_BR.any(dim=1), slot.posted_S[slots_B]
        start_B = slot.params.prompt_length_S[slots_B] + posted_B
        num_new_B = torch.where(requested_B, length_B - start_B, 0)
        where_BR = (start_B[:, None] + self._row_R).clamp(max=slot.history_SL.shape[1] - 1).long()
        committed_BR = slot.history_SL[slots_B[:, None], where_BR]
        # Committed tokens first, drafts right after them.
        at_T, num_new_B1 = self._at_T, num_new_B[:, None]
        source_BT = torch.where(at_T < num_new_B1, at_T, R + at_T - num_new_B1).clamp(min=0, max=2 * R - 1)
        drafts_BR = lane.drafts_BR[:B]
        post.tokens.copy_(torch.cat([committed_BR, drafts_BR], dim=1).gather(1, source_BT.long()))
        post.slots.copy_(torch.where(requested_B, batch.slots_B, -1))
        post.slot_gens.copy_(lane.slot_gens_B[:B])
        post.commit_pos.copy_(posted_B)
        post.n_commit.copy_(num_new_B)
        post.n_draft.copy_(torch.where(requested_B, drafts_B, 0))
        post.need_rows.copy_((missing_BR.int() << self._row_R).sum(dim=1))
        # An addition, since padded lanes share the spare slot: they add nothing.
        if k != PROPOSE:
            slot.posted_S.index_add_(0, slots_B, num_new_B)

    def cache_rows(
        self, batch: StepBatch, store: RowStore, post: PostBuffers, k: int, post_seq: torch.Tensor | None
    ) -> None:
        """See `StepLaunches.cache_rows`."""
        if self._mask_rows is not None and (seq := int(post.awaited)):
            requested_BR = (post.need_rows[:, None] >> self._row_R & 1).bool() & (post.slots >= 0)[:, None]
            lanes, rows = (requested_BR & (post.kinds == int(RowKind.APPLY))).nonzero(as_tuple=True)
            slots = post.slots[lanes].long()
            store.mask_SRW[slots, rows] = torch.from_numpy(self._mask_rows(seq))[slots, rows]
        if post_seq is not None:
            post_seq.copy_(post.awaited)
        lane, B, place_B = batch.lane, batch.num_lanes, place_of(batch)
        requested_BR = (post.need_rows[:, None] >> self._row_R & 1).bool() & (post.slots >= 0)[:, None]
        kind_BR = torch.where(requested_BR, post.kinds, store.kind_SR[place_B])
        forced_BR = torch.where(requested_BR, post.forced, store.forced_SR[place_B])
        here_BR = torch.where(requested_BR, post.kinds != int(RowKind.DEFER), store.cached_SR[place_B])
        store.kind_SR[place_B], store.forced_SR[place_B], store.cached_SR[place_B] = kind_BR, forced_BR, here_BR
        guided_B = lane.guided_B[:B]
        if k == VERIFY:
            kind_BR = torch.where(here_BR, kind_BR, int(RowKind.DEFER))
            lane.kinds_BR[:B] = torch.where(guided_B[:, None], kind_BR, int(RowKind.ALL)).to(torch.uint8)
            lane.forced_BR[:B] = forced_BR
        else:
            here_B = here_BR[:, k] & guided_B & lane.drafting_B[:B]
            lane.kinds_BR[:B, k] = torch.where(here_B, kind_BR[:, k], int(RowKind.ALL)).to(torch.uint8)
            lane.forced_BR[:B, k] = forced_BR[:, k]

    def take_jump_forward(self, batch: StepBatch, post: PostBuffers, vocab_size: int) -> None:
        """See `StepLaunches.take_jump_forward`. Looks at values."""
        slot, lane, B = batch.slot, batch.lane, batch.num_lanes
        # In Python: a lane has few tokens, and an operation on tensors costs more after a forward than all of them.
        emitted = lane.result.num_emitted_B[:B].tolist()
        lanes = zip(batch.slots_B.tolist(), emitted, post.slots.tolist(), post.need_rows.tolist(), strict=True)
        for b, (place, count, posted_slot, need) in enumerate(lanes):
            if place < 0 or not count:
                lane.num_jump_forward_B[b] = -1
                continue
            num_requested = need.bit_length() if posted_slot >= 0 else 0
            kinds, tokens = post.kinds[b].tolist(), post.forced[b]
            rows = list(zip(kinds[:num_requested], tokens[:num_requested].tolist(), strict=True))
            count = self._count(rows, RowKind.FORCED, vocab_size)
            if count:
                at = int(slot.length_S[place])
                slot.history_SL[place, at : at + count] = tokens[:count]
                slot.drafts_SR[place, :count] = tokens[:count]
            lane.num_jump_forward_B[b] = slot.num_drafts_S[place] = count

    def _count(self, rows: list[tuple[int, int]], kind: RowKind, vocab_size: int) -> int:
        """Return how many rows at the front have this kind and a token of the vocabulary."""
        legal = itertools.takewhile(lambda row: row[0] == int(kind) and 0 <= row[1] < vocab_size, rows)
        return len(list(legal))

    def drop_drafts(self, batch: StepBatch) -> None:
        slot, lane, B, place_B = batch.slot, batch.lane, batch.num_lanes, place_of(batch)
        emitted_B = lane.result.num_emitted_B[:B] > 0
        slot.num_drafts_S[place_B] = torch.where(emitted_B, 0, slot.num_drafts_S[place_B])
        lane.num_jump_forward_B[:B] = torch.where(emitted_B, 0, -1)

    def row_logprobs(self, logits_NV: torch.Tensor, rows: RowLogprobs) -> None:
        """See `StepLaunches.row_logprobs`. Looks at values."""
        n, wanted = len(logits_NV), int(rows.wanted_1)
        logprobs_NV = logits_NV.float().log_softmax(-1)
        rows.logprob_N[:n] = logprobs_NV.gather(1, rows.tokens_N[:n, None].long())[:, 0]
        top = logprobs_NV.topk(wanted)
        rows.top_logprobs_NM[:n, :wanted], rows.top_ids_NM[:n, :wanted] = top.values, top.indices.int()

    def propose_ngram(self, batch: StepBatch, ngram_max: int, *, jump_forward: bool) -> None:
        """See `StepLaunches.propose_ngram`. Looks at values.

        The longest match wins, then the last one in the answer: a draft that was rejected there is not made again. Of
        matches in the prompt alone the first wins: after it there is the most text, and in a prompt that lists its
        fields the first one is the list. A match of n tokens is good for 2 n + 1 drafts; more were hardly ever accepted
        (docs/log/). Cost: `ngram_max` comparisons over the history. (On a CPU the drafter `ngram` uses the votes of
        drafters/suffix.py instead.)
        """
        slot, slots, R = batch.slot, place_of(batch), len(self._row_R)
        last_B1 = slot.length_S[slots][:, None].long()
        num_jump_forward_B = (
            batch.lane.num_jump_forward_B[: batch.num_lanes] if jump_forward else torch.zeros_like(batch.slots_B)
        )
        num_jump_forward_B1 = num_jump_forward_B.clamp(min=0).long()[:, None]
        length_B1 = last_B1 + num_jump_forward_B1  # jump-forward tokens are after the history
        L = int(length_B1.max())  # the longest history of the batch bounds the work
        history_BL = slot.history_SL[slots, :L]
        at_L = torch.arange(L, device=history_BL.device)
        run_BL = torch.zeros(history_BL.shape, dtype=torch.int32, device=history_BL.device)
        alive_BL = at_L < length_B1 - 1  # a match ends before the last token
        for t in range(ngram_max):
            suffix_B1 = history_BL.gather(1, (length_B1 - 1 - t).clamp(min=0))
            alive_BL = alive_BL & (at_L >= t) & (history_BL.roll(t, dims=1) == suffix_B1)
            run_BL += alive_BL
        written_BL = at_L + 1 >= slot.params.prompt_length_S[slots][:, None]  # the token after the match
        rank_BL = torch.where(written_BL, L + at_L, L - 1 - at_L)
        score_BL = torch.where(run_BL >= 1, run_BL.long() * 2 * L + rank_BL, -1)
        best_B, end_B = score_BL.max(dim=1)
        at_R = torch.arange(R, device=end_B.device)
        follow_BR = torch.where(
            at_R < num_jump_forward_B1, last_B1 + at_R, end_B[:, None] + 1 + at_R - num_jump_forward_B1
        ).clamp(max=L - 1)
        room_B = slot.params.max_length_S[slots] - length_B1[:, 0] - 1
        trust_B = 2 * torch.div(best_B, 2 * L, rounding_mode="floor") + 1
        available_B = torch.where(best_B >= 0, torch.minimum(length_B1[:, 0] - 1 - end_B, trust_B), 0)
        limit_B = slot.draft_limit_S[slots].clamp(max=batch.max_rows - 1) - num_jump_forward_B1[:, 0]
        count_B = (
            torch.minimum(torch.minimum(available_B, limit_B), room_B.long()).clamp(min=0) + num_jump_forward_B1[:, 0]
        )
        unchanged_B = num_jump_forward_B < 0
        slot.drafts_SR[slots] = torch.where(
            unchanged_B[:, None], slot.drafts_SR[slots], history_BL.gather(1, follow_BR)
        )
        slot.num_drafts_S[slots] = torch.where(unchanged_B, slot.num_drafts_S[slots], count_B.int())
