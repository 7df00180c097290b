"""Prompt lookup: the tokens behind an earlier occurrence of the answer's own suffix (Saxena 2023; LLMA, Yang 2023).

Vectorised over the lanes and without data-dependent shapes or host reads, so it can stand inside a captured step.
One invariant: it proposes only tokens of the slot's own history, and in front of them what the grammar forces, where
that is asked (forced.py): the lookup goes on from there. Not here: masks; a draft that breaks the grammar is
rejected.
"""

from __future__ import annotations

import torch

from gpu_engine.drafters.nets import Hidden
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.prefill import Chunks
from kernels.accept import StepTensors


class NgramDrafter:
    """Looks up the longest suffix of `ngram_max` down to `ngram_min` tokens."""

    def __init__(self, ngram_max: int, ngram_min: int) -> None:
        self._max, self._min = ngram_max, ngram_min

    layers: tuple[int, ...] = ()

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Nothing: the history is all it needs."""

    def propose(self, batch: StepBatch, step: StepTensors, hidden: Hidden) -> None:
        """Write `drafts_SR` and `num_drafts_S` of the lanes' slots, within draft_limit and max_length.

        The longest match wins, then the first: behind it stands the most text, and in a prompt that lists its fields
        the first is the list. A match of n tokens is good for 2 n + 1 drafts; more were hardly ever accepted
        (docs/log.md). Cost: ngram_max comparisons over the history.
        """
        slot, slots, forced_B = batch.slot, batch.slots_B.long(), batch.lane.num_jump_forward_B[: batch.num_lanes]
        ahead_B1 = forced_B.clamp(min=0).long()[:, None]
        last_B1 = slot.length_S[slots][:, None].long()
        length_B1 = last_B1 + ahead_B1  # forced tokens stand behind the history
        R = slot.drafts_SR.shape[1]
        # On a CPU the longest history of the batch bounds the work; a captured step scans the whole buffer.
        L = int(length_B1.max()) if slot.history_SL.device.type == "cpu" else slot.history_SL.shape[1]
        history_BL = slot.history_SL[slots, :L]
        at_L = torch.arange(L, device=history_BL.device)
        run_BL = torch.zeros(history_BL.shape, dtype=torch.int32, device=history_BL.device)
        alive_BL = at_L < length_B1 - 1  # a match ends before the last token
        for t in range(self._max):
            suffix_B1 = history_BL.gather(1, (length_B1 - 1 - t).clamp(min=0))
            alive_BL = alive_BL & (at_L >= t) & (history_BL.roll(t, dims=1) == suffix_B1)
            run_BL += alive_BL
        score_BL = torch.where(run_BL >= self._min, run_BL.long() * L + (L - 1 - at_L), -1)
        best_B, end_B = score_BL.max(dim=1)
        at_R = torch.arange(R, device=end_B.device)
        follow_BR = torch.where(at_R < ahead_B1, last_B1 + at_R, end_B[:, None] + 1 + at_R - ahead_B1).clamp(max=L - 1)
        room_B = slot.params.max_length_S[slots] - length_B1[:, 0] - 1
        trust_B = 2 * torch.div(best_B, L, rounding_mode="floor") + 1
        found_B = torch.where(best_B >= 0, torch.minimum(length_B1[:, 0] - 1 - end_B, trust_B), 0)
        most_B = slot.draft_limit_S[slots].clamp(max=batch.max_rows - 1) - ahead_B1[:, 0]
        count_B = torch.minimum(torch.minimum(found_B, most_B), room_B.long()).clamp(min=0) + ahead_B1[:, 0]
        stays_B = forced_B < 0
        slot.drafts_SR[slots] = torch.where(stays_B[:, None], slot.drafts_SR[slots], history_BL.gather(1, follow_BR))
        slot.num_drafts_S[slots] = torch.where(stays_B, slot.num_drafts_S[slots], count_B.int())


class NoDrafter:
    """Proposes nothing: one token a step."""

    layers: tuple[int, ...] = ()

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Nothing."""

    def propose(self, batch: StepBatch, step: StepTensors, hidden: Hidden) -> None:
        """Leave the slots without drafts."""
        batch.slot.num_drafts_S[batch.slots_B.long()] = 0
