"""A draft head over a whole answer at once, several drafts deep: what EAGLE-3 calls training-time test.

At depth j the pair at position p is (the head's own output of depth j - 1 at p - 1, token p + 1), as it will be when
draft j is made in service; its attention sees true pairs up to p - j and the chain's own behind them. So the logits at
depth j are those of draft j after j right drafts, for every position of the answer at the same time.

One invariant: nothing at depth j of base position b = p - j depends on hidden states behind b. Not here: losses.

Shapes: n tokens of a sequence, m positions of the answer's region, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpu_engine.drafters.eagle3_head import Eagle3Head, rotate


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt with the target's answer, and what the target computed along it."""

    ids_n: torch.Tensor
    """int64 [n]: prompt and answer."""
    aux_nF: torch.Tensor
    """[n, 3 Ht]: the hidden states that the head fuses."""
    answer_at: int
    """Index of the first token of the answer, at least 1."""

    @property
    def region(self) -> range:
        """Positions p whose pair predicts a token of the answer, number p + 2, with token p + 1 of the answer known."""
        return range(self.answer_at - 1, len(self.ids_n) - 2)


def unroll(
    head: Eagle3Head, embedding: torch.Tensor, sequence: Sequence, depth: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for j = 0..depth-1 the logits [m - j, Vd] and the token ids [m - j] that they are to predict.

    Row i of depth j belongs to the i-th base position of the region; a region shorter than the depth yields fewer.
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
        # The pair one further on takes this output.
        hidden_mH = hidden_mH[:-1]


class _ChainAttention:
    """True pairs as far as the base position, then the chain's own, one a depth."""

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
        # Row i of the chain's depth d holds base position i: the rows line up, and later bases fall off the end.
        scores += [(q_hmD * k_mhD[:m].transpose(0, 1)).sum(-1, keepdim=True) for k_mhD, _ in self._chain]
        share = torch.cat(scores, dim=-1).float().softmax(-1).to(q_mhD.dtype)
        n = scores_hmn.shape[-1]
        out_hmD = share[..., :n] @ self._v_hnD
        for i, (_, v_mhD) in enumerate(self._chain):
            out_hmD = out_hmD + share[..., n + i, None] * v_mhD[:m].transpose(0, 1)
        return out_hmD.transpose(0, 1).reshape(m, -1)

    def _spread(self, x_nGD: torch.Tensor) -> torch.Tensor:
        return x_nGD.repeat_interleave(self._groups, dim=1)
