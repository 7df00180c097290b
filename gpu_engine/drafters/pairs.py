"""Draft nets over pairs: the target's hidden state of position p with the token at p + 1 (EAGLE, Li et al. 2024).

The pair of position p is stored at position p of the net's own cache. Invariant: when a first link begins, the
cache holds true pairs of every position before `length - 1 - emitted`; the link writes the pairs of the step's emitted
tokens itself, over the pairs of an older chain. Not responsible for: the computation of a pair (see heads/eagle3.py,
mtp.py), the chain (see chain.py).

Shapes: B lanes, P rows of the step, N = B * P rows, H hidden size, Vd columns of the net.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.prompt_rows import Chunks, Hidden
from kernels.step_tensors import TreeRows


class PairNet(ABC):
    """Stores pairs in the cache. A subclass computes the result of a pair."""

    layers: tuple[int, ...]
    d2t_V: torch.Tensor | None = None

    def __init__(self) -> None:
        self._hidden_BH: torch.Tensor | None = None
        """The net's own output, which replaces the target's hidden state at the next link."""

    @abstractmethod
    def _pair_part(self, hidden: Hidden) -> torch.Tensor:
        """Return the part of the target's hidden states that a pair has, [N, H]."""

    @abstractmethod
    def _run(
        self, ids_BP: torch.Tensor, hidden_NH: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor
    ) -> torch.Tensor:
        """Store the pairs at their positions, int32 and contiguous, -1 for padding; return hidden states, [N, H]."""

    @abstractmethod
    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Return [B, Vd]."""

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Store the pairs of the chunks' positions. The history also has the token after the last of them."""
        self._run(chunks.ids_BP(offset=1), self._pair_part(hidden), chunks.positions_BP, chunks.page_table_BN)

    def first(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, wants_BL: torch.Tensor,
        page_table_BN: torch.Tensor, hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Run the pairs of the step's emitted tokens, and draft after the last of them."""
        return self._keep_and_project(self.last(batch, place_B, going_B, page_table_BN, hidden))

    def last(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, page_table_BN: torch.Tensor,
        hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Store the pairs of the step's emitted tokens; return the net's state after the last of them, [B, H]."""
        slot, B, P = batch.slot, batch.num_lanes, batch.num_rows
        emitted_B1 = batch.lane.result.num_emitted_B[:B, None]
        row_P = torch.arange(P, dtype=torch.int32, device=place_B.device)
        at_BP = slot.length_S[place_B][:, None] - emitted_B1 - 1 + row_P
        positions_BP = torch.where(going_B[:, None] & (row_P < emitted_B1), at_BP, -1)
        behind_BP = (at_BP + 1).clamp(min=0, max=slot.history_SL.shape[1] - 1).long()
        ids_BP = slot.history_SL[place_B[:, None], behind_BP]
        part_NH = self._pair_part(hidden)
        if batch.tree is not None:
            part_NH = _walked(part_NH.view(B, P, -1), batch.tree).flatten(0, 1)
        out_BPH = self._run(ids_BP, part_NH, positions_BP.int().contiguous(), page_table_BN).view(B, P, -1)
        last_B = (emitted_B1[:, 0] - 1).clamp(min=0).long()
        return out_BPH[torch.arange(B, device=place_B.device), last_B]

    def next(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        """Run the pair of the head's own last output and the draft after it."""
        assert self._hidden_BH is not None, "a first link is before this"
        # The draft is at `positions_B1`; its pair is stored at the hidden state's position, one in front.
        at_B1 = torch.where(positions_B1 < 0, -1, positions_B1 - 1)
        return self._keep_and_project(self._run(ids_B1, self._hidden_BH, at_B1.int().contiguous(), page_table_BN))

    def _keep_and_project(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        self._hidden_BH = hidden_BH
        return self.logits(hidden_BH)


def _walked(part_BPH: torch.Tensor, tree: TreeRows) -> torch.Tensor:
    """Return for each emitted token the row of the tree that gave it; rows after the last token mean nothing."""
    B, P, H = part_BPH.shape
    rows_BP = tree.walked_BR[:B, :P].long().clamp(max=P - 1)
    return part_BPH.gather(1, rows_BP[:, :, None].expand(-1, -1, H))
