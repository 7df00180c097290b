"""What a chain of drafts runs: a network that has a first link, over tokens that are certain, and links behind it.

`ModelNet` is a whole language model. One invariant: a net's pages are the target's page numbers over tensors of its
own, and before a first link its cache holds everything in front of the tokens that the link is given. Tensor operations
alone, without a look at their values, so that links can be captured. Not here: the chain (model.py, chain.py), EAGLE3
(eagle3.py).

Shapes: B lanes, L tokens of history, N pages of a sequence, P rows of the step, H hidden size, Vd columns of the net.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.buffers import StepBatch
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.prefill import prefill_row
from kernels.paged_attention import KVPages

Hidden = dict[int, torch.Tensor | None]
"""Target layer -> its input, [rows, H]; see `AttentionContext.hidden`."""


def put_forced(batch: StepBatch, place_B: torch.Tensor, k: int) -> None:
    """Put the token that the grammar forces in place of draft k, where one is; a chain that met a dead end stays so.

    `place_B` int64 are the lanes' slots.
    """
    slot, lane, B = batch.slot, batch.lane, batch.num_lanes
    at_B = (slot.length_S[place_B] + k).clamp(max=slot.history_SL.shape[1] - 1).long()
    drawn_B, behind_B = lane.drafts_BR[:B, k], slot.history_SL[place_B, at_B]
    forced_B = (lane.num_forced_B[:B] > k) & (drawn_B >= 0)
    lane.drafts_BR[:B, k] = torch.where(forced_B, slot.drafts_SR[place_B, k], drawn_B)
    # Where the next draft's penalties find it, in place of the one that was drawn.
    slot.history_SL[place_B, at_B] = torch.where(forced_B, slot.drafts_SR[place_B, k], behind_B)


class DraftNet(Protocol):
    """A network that drafts. Owned by one chain; its state between two links is its own."""

    layers: tuple[int, ...]
    """Target layers whose input it wants to see, at every prefill and verify."""
    d2t_V: torch.Tensor | None
    """int32 [Vd]: added to a column to give its token; None where columns are tokens."""

    def prefill(
        self, history_1L: torch.Tensor, page_table_1N: torch.Tensor, start: int, end: int, hidden: Hidden
    ) -> None:
        """See tokens [start, end) of one sequence go by; `hidden` is the target's at these, padding behind."""

    def first(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, page_table_BN: torch.Tensor,
        hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Return the logits [B, Vd] of draft 0. `place_B` are the lanes' slots, `hidden` the target's at B * P rows."""

    def next(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, Vd] behind the draft `ids_B1`, which stands at `positions_B1`; -1: padding."""


class ModelNet:
    """A causal language model. It stores a token's key at the token's own position."""

    layers: tuple[int, ...] = ()
    d2t_V: torch.Tensor | None = None

    def __init__(self, model: LoadedModel, pages: list[KVPages]) -> None:
        self.model, self._pages = model, pages

    def prefill(
        self, history_1L: torch.Tensor, page_table_1N: torch.Tensor, start: int, end: int, hidden: Hidden
    ) -> None:
        """Fill the cache with the same tokens."""
        prefill_row(self.model, self._pages, history_1L, page_table_1N, start, end)

    def first(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, page_table_BN: torch.Tensor,
        hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Run the last two tokens: after a full acceptance it has not seen the last draft yet."""
        slot = batch.slot
        tail_B2 = slot.length_S[place_B][:, None] - 2 + torch.arange(2, dtype=torch.int32, device=place_B.device)
        ids_B2 = slot.history_SL[place_B[:, None], tail_B2.clamp(min=0).long()]
        return self._logits(ids_B2, torch.where(going_B[:, None], tail_B2, -1), page_table_BN)

    def next(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        """Run one token."""
        return self._logits(ids_B1, positions_B1, page_table_BN)

    def _logits(self, ids_BP: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        B, P = positions_BP.shape
        context = AttentionContext(self._pages, page_table_BN, positions_BP.int().contiguous())
        return self.model.logits(ids_BP.long(), context).view(B, P, -1)[:, -1]

    def __repr__(self) -> str:
        return f"<ModelNet {self.model.name}>"
