"""The EAGLE3 head as a draft net: pairs of a target's hidden state and the token behind it (eagle3_head.py).

The pair (hidden state of position p, token p + 1) stands at position p of the head's own cache. One invariant: when a
first link begins, the cache holds true pairs of every position before `length - 1 - emitted`; the link writes those of
the step's emitted tokens itself, over whatever an older chain left there. Not here: the chain.

Shapes: B lanes, P rows of the step, N = B * P rows, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu_engine.buffers import StepBatch
from gpu_engine.drafters.eagle3_head import Eagle3Head
from gpu_engine.drafters.nets import Hidden
from kernels.paged_attention import KVPages, paged_attention


class Eagle3Net:
    """One head over one target's embedding. Owns its cache of one layer.

    Args:
        head: in eval mode, in the target's dtype, on its device.
        embedding: the target's input embedding, which stays its.
        pages: the head's cache.
    """

    def __init__(self, head: Eagle3Head, embedding: Any, pages: KVPages) -> None:
        self.head, self._embedding, self._pages = head, embedding, pages
        config = head.config
        self.layers: tuple[int, ...] = config.aux_layers
        self._heads, self._kv_heads, self._width = head.midlayer.self_attn.shape
        whole = config.draft_vocab_size == config.vocab_size
        self.d2t_V: torch.Tensor | None = None if whole else head.d2t.int().contiguous()
        self._hidden_BH: torch.Tensor | None = None
        """What stands in for the target's hidden state at the next link."""

    def prefill(
        self, history_1L: torch.Tensor, page_table_1N: torch.Tensor, start: int, end: int, hidden: Hidden
    ) -> None:
        """Store the pairs of positions [start, end); the token behind the last of them is in the history, too."""
        fused_NH = self._fused(hidden)
        at_P = torch.arange(start, start + len(fused_NH), dtype=torch.int32, device=history_1L.device)
        ids_1P = history_1L.gather(1, (at_P + 1).clamp(max=end).long()[None])
        positions_1P = torch.where(at_P < end, at_P, -1)[None]
        self._run(ids_1P, fused_NH, positions_1P, page_table_1N)

    def first(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, page_table_BN: torch.Tensor,
        hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Run the pairs of the step's emitted tokens, and draft behind the last of them."""
        slot, B, P = batch.slot, batch.num_lanes, batch.num_rows
        emitted_B1 = batch.lane.result.num_emitted_B[:B, None]
        row_P = torch.arange(P, dtype=torch.int32, device=place_B.device)
        at_BP = slot.length_S[place_B][:, None] - emitted_B1 - 1 + row_P
        positions_BP = torch.where(going_B[:, None] & (row_P < emitted_B1), at_BP, -1)
        behind_BP = (at_BP + 1).clamp(min=0, max=slot.history_SL.shape[1] - 1).long()
        ids_BP = slot.history_SL[place_B[:, None], behind_BP]
        out_BPH = self._run(ids_BP, self._fused(hidden), positions_BP, page_table_BN).view(B, P, -1)
        last_B = (emitted_B1[:, 0] - 1).clamp(min=0).long()
        return self._speak(out_BPH[torch.arange(B, device=place_B.device), last_B])

    def next(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        """Run the pair of the head's own last output and the draft behind it."""
        assert self._hidden_BH is not None, "a first link is before this"
        # The draft is token `positions_B1`; its pair stands where the hidden state does, one in front.
        at_B1 = torch.where(positions_B1 < 0, -1, positions_B1 - 1)
        return self._speak(self._run(ids_B1, self._hidden_BH, at_B1, page_table_BN))

    def _fused(self, hidden: Hidden) -> torch.Tensor:
        states = [hidden[layer] for layer in self.layers]
        fused: torch.Tensor = self.head.fuse(torch.cat([state for state in states if state is not None], dim=-1))
        return fused

    def _speak(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        self._hidden_BH = hidden_BH
        return self.head.logits(hidden_BH)

    def _run(
        self, ids_BP: torch.Tensor, hidden_NH: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor
    ) -> torch.Tensor:
        """Return the head's hidden states, [N, H], and store the pairs at their positions."""
        B, P = positions_BP.shape
        where_BP = positions_BP.int().contiguous()

        def attend(q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
            out_BPHD = paged_attention(
                q_NHD.view(B, P, self._heads, self._width),
                k_NGD.view(B, P, self._kv_heads, self._width),
                v_NGD.view(B, P, self._kv_heads, self._width),
                self._pages,
                page_table_BN,
                where_BP,
                scale=self._width**-0.5,
            )
            return out_BPHD.view(B * P, -1)

        embeds_NH = self._embedding(ids_BP.long()).view(B * P, -1)
        out: torch.Tensor = self.head(embeds_NH, hidden_NH, where_BP.clamp(min=0).view(-1), attend)
        return out

    def __repr__(self) -> str:
        config = self.head.config
        return f"<Eagle3Net layers={self.layers} vocabulary={config.draft_vocab_size} of {config.vocab_size}>"
