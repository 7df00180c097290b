"""The EAGLE3 head as a draft net: pairs of three fused hidden states and a token (eagle3_head.py).

Invariant: the embedding is the target's. Not responsible for: the storage of pairs (see pairs.py), the chain
(see chain.py), the tree (see ../head_tree.py).
"""

from __future__ import annotations

from typing import Any

import torch

from gpu_engine.drafters.heads.eagle3_head import Eagle3Head
from gpu_engine.drafters.pairs import PairNet
from gpu_engine.step.prompt_rows import Hidden
from kernels.paged_attention import KVPages, paged_attention


class Eagle3Net(PairNet):
    """One head over one target's embedding. Owns its cache of one layer.

    Args:
        head: in eval mode, in the target's dtype, on its device.
        embedding: the target's input embedding, which the target owns.
        pages: the head's cache.
    """

    def __init__(self, head: Eagle3Head, embedding: Any, pages: KVPages) -> None:
        super().__init__()
        self.head, self._embedding, self._pages = head, embedding, pages
        config = head.config
        self.layers = config.aux_layers
        self._heads, self._kv_heads, self._width = head.midlayer.self_attn.shape
        whole = config.draft_vocab_size == config.vocab_size
        self.d2t_V = None if whole else head.d2t.int().contiguous()

    def _pair_part(self, hidden: Hidden) -> torch.Tensor:
        states = [hidden[layer] for layer in self.layers]
        fused: torch.Tensor = self.head.fuse(torch.cat([state for state in states if state is not None], dim=-1))
        return fused

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Return [B, Vd]."""
        return self.head.logits(hidden_BH)

    def branch(
        self, ids_BP: torch.Tensor, hidden_BPH: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor,
        rows_BXX: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the head's states after the pairs of a tree, [B, P, H]; see `TreeNet.branch`.

        `rows_BXX` int32: at [b, p, d] the row at depth d on the way to row p. The keys of row p are stored p places
        after the first position, where no later forward reads them.
        """
        hidden_NH = hidden_BPH.flatten(0, 1)
        return self._run(ids_BP, hidden_NH, positions_BP, page_table_BN, rows_BXX).view(*ids_BP.shape, -1)

    def _run(
        self, ids_BP: torch.Tensor, hidden_NH: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor,
        tree_rows_BRR: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        B, P = positions_BP.shape

        def attend(q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
            out_BPHD = paged_attention(
                q_NHD.view(B, P, self._heads, self._width),
                k_NGD.view(B, P, self._kv_heads, self._width),
                v_NGD.view(B, P, self._kv_heads, self._width),
                self._pages,
                page_table_BN,
                positions_BP,
                scale=self._width**-0.5,
                tree_rows_BRR=tree_rows_BRR,
            )
            return out_BPHD.view(B * P, -1)

        embeds_NH = self._embedding(ids_BP.long()).view(B * P, -1)
        out: torch.Tensor = self.head(embeds_NH, hidden_NH, positions_BP.clamp(min=0).view(-1), attend)
        return out

    def __repr__(self) -> str:
        config = self.head.config
        return f"<Eagle3Net layers={self.layers} vocabulary={config.draft_vocab_size} of {config.vocab_size}>"
