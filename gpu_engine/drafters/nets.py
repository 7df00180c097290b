"""The networks that a chain of drafts runs: a first link over emitted tokens, and links after it.

`ModelNet` is a whole language model. Invariant: a net's pages have the target's page numbers over tensors of its
own, and before a first link its cache holds every token before the ones that the link gets. Nets use tensor
operations alone and never read values, so that links can be captured. Not responsible for: the chain (see chain.py),
nets over pairs (see pairs.py), a net that computes all links at once (see heads/dflash.py).

Shapes: B lanes, L tokens of history, N pages of a sequence, P rows of the step, H hidden size, Vd columns of the net.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.prompt_rows import Chunks, Hidden, fill_prompts, prefill
from kernels.paged_attention import KVPages


def put_jump_forward(batch: StepBatch, place_B: torch.Tensor, k: int) -> None:
    """Replace draft k by the jump-forward token there, if any; a chain that met a dead end is not resumed.

    `place_B` int64 are the lanes' slots.
    """
    slot, lane, B = batch.slot, batch.lane, batch.num_lanes
    at_B = (slot.length_S[place_B] + k).clamp(max=slot.history_SL.shape[1] - 1).long()
    drawn_B, behind_B = lane.drafts_BR[:B, k], slot.history_SL[place_B, at_B]
    forced_B = (lane.num_jump_forward_B[:B] > k) & (drawn_B >= 0)
    lane.drafts_BR[:B, k] = torch.where(forced_B, slot.drafts_SR[place_B, k], drawn_B)
    # The next draft's penalties read the history, so the jump-forward token replaces the drawn one there as well.
    slot.history_SL[place_B, at_B] = torch.where(forced_B, slot.drafts_SR[place_B, k], behind_B)


def with_jump_forward(batch: StepBatch, count_B: torch.Tensor, wanted_B: torch.Tensor) -> torch.Tensor:
    """Return how many drafts each lane has: jump-forward tokens may reach beyond a whole chain.

    `count_B` links of the chain gave a draft, `wanted_B` were wanted. `drafts_SR` has the jump-forward tokens already.
    """
    forced_B = batch.lane.num_jump_forward_B[: batch.num_lanes]
    return torch.where(count_B == wanted_B, torch.maximum(count_B, forced_B.to(count_B.dtype)), count_B)


class DraftNet(Protocol):
    """A network that drafts. Owned by one chain; it stores its own state between two links."""

    layers: tuple[int, ...]
    """Target layers whose input it needs, at every prefill and verify."""
    d2t_V: torch.Tensor | None
    """int32 [Vd]: added to a column to give its token; None where columns are tokens."""

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Process the tokens of some sequences; `hidden` has the target's states at them and at the padding."""

    def first(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, wants_BL: torch.Tensor,
        page_table_BN: torch.Tensor, hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Return the logits [B, Vd] of draft 0.

        `place_B` has the lanes' slots, and `hidden` the target's hidden states at B * P rows. `wants_BL` (bool) is
        True for the links of the chain in which a lane takes part: its first ones, and none if `going_B` is False.
        """

    def next(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, Vd] after the draft `ids_B1` at `positions_B1`; -1: padding."""


class ModelNet:
    """A causal language model. It stores a token's key at the token's own position.

    Args:
        model: with the target's tokenizer.
        pages: its cache.
        num_links: the longest chain, K. When a step accepts more drafts, the model has not seen all of them.
        d2t_V: see `DraftNet`.
    """

    layers: tuple[int, ...] = ()

    def __init__(
        self, model: LoadedModel, pages: list[KVPages], num_links: int, d2t_V: torch.Tensor | None = None
    ) -> None:
        self.model, self._pages, self._links, self.d2t_V = model, pages, num_links, d2t_V

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Fill the cache with the same tokens; without the padding where chunks of several lengths run at once."""
        if chunks.runs_at_once and self.model.takes_prompts:
            fill_prompts(self.model, self._pages, chunks.rows())
        else:
            prefill(self.model, self._pages, chunks)

    def first(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, wants_BL: torch.Tensor,
        page_table_BN: torch.Tensor, hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Run the last tokens: after a full acceptance the model has not seen the chain's last draft,
        nor any after it.

        In a step of P rows these are at most P - K tokens, and the step's own token.
        """
        slot = batch.slot
        length_B1 = slot.length_S[place_B][:, None]
        row_T = torch.arange(max(2, batch.num_rows - self._links + 1), dtype=torch.int32, device=place_B.device)
        tail_BT = (length_B1 - len(row_T)).clamp(min=0) + row_T
        live_BT = going_B[:, None] & (tail_BT < length_B1)
        ids_BT = slot.history_SL[place_B[:, None], tail_BT.long()]
        context = self._context(torch.where(live_BT, tail_BT, -1), page_table_BN)
        last_B = (live_BT.sum(dim=1) - 1).clamp(min=0)
        rows_B = torch.arange(len(place_B), device=place_B.device) * ids_BT.shape[1] + last_B
        return self._drawable(self.model.logits_of(ids_BT.long(), context, rows_B))

    def next(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        """Run one token."""
        return self._drawable(self.model.logits(ids_B1.long(), self._context(positions_B1, page_table_BN)))

    def _drawable(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the columns that have a token of the target."""
        return logits_BV if self.d2t_V is None else logits_BV[:, : len(self.d2t_V)].contiguous()

    def _context(self, positions_BP: torch.Tensor, page_table_BN: torch.Tensor) -> AttentionContext:
        return AttentionContext(self._pages, page_table_BN, positions_BP.int().contiguous())

    def __repr__(self) -> str:
        return f"<ModelNet {self.model.name}>"
