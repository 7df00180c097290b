"""Runs a draft head over a whole answer at once, several drafts deep ("training-time test" in the EAGLE-3 paper).

At depth j the pair at position p is (the head's own output of depth j - 1 at p - 1, token p + 1), as it is when the
engine computes draft j. Its attention sees true pairs up to p - j, and the head's own pairs after that. So the logits
at depth j are those of draft j after j right drafts, for every position of the answer at the same time.

Invariant: no value at depth j of base position b = p - j depends on hidden states after b.
Not responsible for: the loss (see eagle.py).

Shapes: n tokens of a sequence, m positions of the answer's region, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpu_engine.drafters.heads.eagle3_head import Eagle3Head
from gpu_engine.drafters.heads.parts import rotate


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt with the target's answer, and the target's hidden states along both."""

    ids_n: torch.Tensor
    """int64 [n]: prompt and answer."""
    aux_nF: torch.Tensor
    """[n, 3 Ht]: the three hidden states that the head fuses, Ht wide each."""
    answer_at: int
    """Index of the first token of the answer, at least 1."""

    @property
    def region(self) -> range:
        """Positions p whose pair predicts token p + 2, where token p + 1 and token p + 2 belong to the answer."""
        return range(self.answer_at - 1, len(self.ids_n) - 2)


def unroll(
    head: Eagle3Head, embedding: torch.Tensor, sequence: Sequence, depth: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for j = 0..depth-1 the logits [m - j, Vd] and the token ids [m - j] that they should predict.

    Row i of depth j belongs to the i-th base position of the region. A region shorter than `depth` yields fewer items.
    """
    region = sequence.region
    m, first = len(region), region.start
    if m <= 0:
        return
    device = head.fc.weight.device
    ids_n = sequence.ids_n.to(device)
    fused_nH = head.fuse(sequence.aux_nF[: first + m].to(device, head.fc.weight.dtype))
    embeds_nH = embedding[ids_n[1 : first + m + 1]].to(fused_nH.dtype)
    positions_n = torch.arange(first + m, device=device)
    attention = _ChainAttention(head, embeds_nH, fused_nH, positions_n, first)
    hidden_mH = fused_nH[first:]
    for j in range(min(depth, m)):
        at = slice(first + j, first + m)
        attention.depth = j
        hidden_mH = head(embeds_nH[at], hidden_mH, positions_n[at], attention)
        yield head.logits(hidden_mH), ids_n[first + j + 2 : first + m + 2]
        # The next depth pairs this output with the next token.
        hidden_mH = hidden_mH[:-1]


class _ChainAttention:
    """Attention over the true pairs up to the base position, and over the head's own pairs, one per depth."""

    def __init__(
        self, head: Eagle3Head, embeds_nH: torch.Tensor, fused_nH: torch.Tensor, positions_n: torch.Tensor, first: int
    ) -> None:
        layer = head.midlayer
        heads, kv_heads, width = layer.self_attn.shape
        x_n2H = torch.cat([layer.input_layernorm(embeds_nH), layer.hidden_norm(fused_nH)], dim=-1)
        k_nGD = rotate(layer.self_attn.k_proj(x_n2H).view(-1, kv_heads, width), *head.angles(positions_n, x_n2H))
        v_nGD = layer.self_attn.v_proj(x_n2H).view(-1, kv_heads, width)
        self._groups, self._scale, self._first = heads // kv_heads, width**-0.5, first
        self._k_hnD, self._v_hnD = (self._spread(x).transpose(0, 1) for x in (k_nGD, v_nGD))
        self._chain: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.depth = 0

    def __call__(self, q_mhD: torch.Tensor, k_mGD: torch.Tensor, v_mGD: torch.Tensor) -> torch.Tensor:
        m = len(q_mhD)
        if self.depth:
            self._chain.append((self._spread(k_mGD), self._spread(v_mGD)))
        q_hmD = q_mhD.transpose(0, 1) * self._scale
        scores_hmn = q_hmD @ self._k_hnD.transpose(1, 2)
        base_m1 = self._first + torch.arange(m, device=q_mhD.device)[:, None]
        behind_mn = torch.arange(scores_hmn.shape[-1], device=q_mhD.device) > base_m1
        scores = [scores_hmn.masked_fill(behind_mn, -torch.inf)]
        # Row i of each depth belongs to base position i, so rows of all depths line up.
        scores += [(q_hmD * k_mhD[:m].transpose(0, 1)).sum(-1, keepdim=True) for k_mhD, _ in self._chain]
        share = torch.cat(scores, dim=-1).float().softmax(-1).to(q_mhD.dtype)
        n = scores_hmn.shape[-1]
        out_hmD = share[..., :n] @ self._v_hnD
        for i, (_, v_mhD) in enumerate(self._chain):
            out_hmD = out_hmD + share[..., n + i, None] * v_mhD[:m].transpose(0, 1)
        return out_hmD.transpose(0, 1).reshape(m, -1)

    def _spread(self, x_nGD: torch.Tensor) -> torch.Tensor:
        return x_nGD.repeat_interleave(self._groups, dim=1)
