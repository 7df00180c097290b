"""The DFlash head as a draft net: the first link of a chain computes the drafts of all (dflash_head.py).

Its cache has, for each position whose target state is known, keys and values of that state; after them those of the
last block. A step first stores those of the tokens that it emitted, over an older block, and then its own block after
them. So a rejected draft leaves nothing that a later block sees. Invariant: before a first link the cache holds
every position before `length - 1 - emitted`; a block writes up to `length - 1 + drafts` (see `lookahead` of
core/executor.py). Not responsible for: the chain, which draws the drafts one by one under the masks (see chain.py).

In a layer with full attention all rows of a block see the same keys, so they are further heads of one query at the
block's last position, and the kernel is that of any decode step.

Shapes: B lanes, P rows of the step, L links, R = L + 1 rows of a block, N pages of a sequence, V columns of the logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from gpu_engine.drafters.heads.dflash_head import DFlashHead
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.prompt_rows import Chunks, Hidden
from kernels.paged_attention import KVPages, paged_attention


class DFlashNet:
    """One head over one target's embedding and output head. Owns its cache.

    Args:
        head: in eval mode, in the target's dtype, on its device.
        embedding_VH: the target's rows of its input embedding, without the target's own scale.
        output: the target's output head, of rows [N, H].
        pages: the head's cache, one entry a layer.
    """

    d2t_V: torch.Tensor | None = None

    def __init__(
        self,
        head: DFlashHead,
        embedding_VH: torch.Tensor,
        output: Callable[[torch.Tensor], torch.Tensor],
        pages: list[KVPages],
    ) -> None:
        self.head, self._embedding_VH, self._output, self._pages = head, embedding_VH, output, pages
        self._sources = tuple(layer + 1 for layer in head.config.target_layer_ids)
        self.layers = tuple(sorted(set(self._sources)))
        """The output of a layer is the input of the next one."""
        self._logits_LBV: torch.Tensor | None = None
        self._link = 0

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Store the target's states at the chunks' positions."""
        self._store(hidden, chunks.positions_BP, chunks.page_table_BN)

    def first(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, wants_BL: torch.Tensor,
        page_table_BN: torch.Tensor, hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Store the states of the step's emitted tokens, and compute the block after the last of them."""
        slot, B, P = batch.slot, batch.num_lanes, batch.num_rows
        emitted_B1, length_B1 = batch.lane.result.num_emitted_B[:B, None], slot.length_S[place_B][:, None]
        row_P = torch.arange(P, dtype=torch.int32, device=place_B.device)
        at_BP = length_B1 - emitted_B1 - 1 + row_P
        known_BP = torch.where(going_B[:, None] & (row_P < emitted_B1), at_BP, -1)
        self._store(hidden, known_BP.int().contiguous(), page_table_BN)
        last_B = slot.history_SL[place_B, (length_B1[:, 0] - 1).clamp(min=0).long()]
        out_BRH = self._block(last_B, length_B1 - 1, wants_BL, page_table_BN)
        rows_NH = out_BRH[:, 1:].transpose(0, 1).reshape(-1, out_BRH.shape[-1])
        self._logits_LBV = self.head.scaled(self._output(rows_NH)).view(*wants_BL.T.shape, -1)
        self._link = 0
        return self._logits_LBV[0]

    def next(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        """Return the next row of the block. What was drawn before it decides only its mask."""
        assert self._logits_LBV is not None, "a first link is before this"
        self._link += 1
        return self._logits_LBV[self._link]

    def _block(
        self, last_B: torch.Tensor, start_B1: torch.Tensor, wants_BL: torch.Tensor, page_table_BN: torch.Tensor
    ) -> torch.Tensor:
        """Return the head's output for the tokens `last_B`, at `start_B1`, and a mask token for each link, [B, R, H].

        A lane's block has as many mask tokens as it wants drafts; rows after them have no defined content.
        """
        config, (B, links) = self.head.config, wants_BL.shape
        ids_BR = torch.full((B, links + 1), config.mask_token_id, dtype=torch.int64, device=last_B.device)
        ids_BR[:, 0] = last_B
        embeds_BRH = functional.embedding(ids_BR, self._embedding_VH) * config.input_embedding_scale
        row_R = torch.arange(links + 1, dtype=torch.int32, device=last_B.device)
        count_B1 = wants_BL.sum(dim=1, keepdim=True)
        there_BR = (row_R <= count_B1) & (count_B1 > 0)
        positions_BR = torch.where(there_BR, start_B1 + row_R, -1).int().contiguous()
        end_B1 = torch.where(count_B1 > 0, start_B1 + count_B1, -1).int().contiguous()
        lane_B = torch.arange(B, device=last_B.device)

        def attend(layer: int, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
            kind, pages = config.kinds[layer], self._pages[layer]
            q, k, v = (x_NHD.view(B, links + 1, *x_NHD.shape[1:]) for x_NHD in (q_NHD, k_NGD, v_NGD))
            scale = config.head_dim**-0.5
            if kind.causal:
                out_BRHD = paged_attention(q, k, v, pages, page_table_BN, positions_BR, scale=scale, window=kind.window)
                return out_BRHD.reshape(len(q_NHD), -1)
            _store(k, v, pages, page_table_BN, positions_BR)
            k_B1GD, v_B1GD = k[lane_B, count_B1[:, 0]][:, None], v[lane_B, count_B1[:, 0]][:, None]
            return _attend_together(q, k_B1GD, v_B1GD, pages, page_table_BN, end_B1, scale)

        out_NH: torch.Tensor = self.head(
            embeds_BRH.view(B * (links + 1), -1), positions_BR.clamp(min=0).view(-1), attend
        )
        return out_NH.view(B, links + 1, -1)

    def _store(self, hidden: Hidden, positions_BP: torch.Tensor, page_table_BN: torch.Tensor) -> None:
        """Store keys and values of the target's states at `positions_BP`, int32 and contiguous, -1 for padding."""
        states = [hidden[layer] for layer in self._sources]
        states_NF = torch.cat([state for state in states if state is not None], dim=-1)
        keys = self.head.context(states_NF, positions_BP.clamp(min=0).view(-1))
        for (k_NGD, v_NGD), pages in zip(keys, self._pages, strict=True):
            k, v = (x_NGD.view(*positions_BP.shape, *x_NGD.shape[1:]) for x_NGD in (k_NGD, v_NGD))
            _store(k, v, pages, page_table_BN, positions_BP)

    def __repr__(self) -> str:
        config = self.head.config
        return f"<DFlashNet layers={config.target_layer_ids} of {len(config.kinds)} layers, block {config.block_size}>"


def _store(
    k_BPGD: torch.Tensor, v_BPGD: torch.Tensor, pages: KVPages, page_table_BN: torch.Tensor, positions_BP: torch.Tensor
) -> None:
    """Store keys and values. The attention of the kernel that does it sees one token, and its result is not used."""
    paged_attention(k_BPGD, k_BPGD, v_BPGD, pages, page_table_BN, positions_BP, scale=1.0, window=1)


def _attend_together(
    q_BRHD: torch.Tensor, k_B1GD: torch.Tensor, v_B1GD: torch.Tensor, pages: KVPages, page_table_BN: torch.Tensor,
    end_B1: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return [B * R, H * D]: every query sees all positions up to `end_B1`, where `k_B1GD` and `v_B1GD` are."""
    B, R, H, D = q_BRHD.shape
    G = k_B1GD.shape[2]
    q_B1MD = q_BRHD.view(B, R, G, H // G, D).transpose(1, 2).reshape(B, 1, G * R * (H // G), D)
    out_B1MD = paged_attention(q_B1MD, k_B1GD, v_B1GD, pages, page_table_BN, end_B1, scale=scale)
    return out_B1MD.view(B, G, R, H // G, D).transpose(1, 2).reshape(B * R, H * D)
