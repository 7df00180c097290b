"""The small operators of a decoder layer in plain torch, rounded where transformers' modules round."""

from __future__ import annotations

import torch

from kernels.fused import Activation, HeadForm, NormKind, RMSNorm
from kernels.fused_arguments import LLAMA_HEADS


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    wide = x.float()
    if norm.kind == NormKind.CENTRED:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.kind == NormKind.ROUND_THEN_SCALE:
        return norm.weight_H * wide.to(x.dtype)
    weight = norm.weight_H.float() + (norm.kind == NormKind.ONE_PLUS_SCALE)
    return (wide * weight).to(x.dtype)


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    head_dim: int,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    form: HeadForm = LLAMA_HEADS,
    v_norm: RMSNorm | None = None,
) -> torch.Tensor:
    """Return the values that `rotate` writes to `qkv`."""
    qkv, turned, width = qkv.clone(), cos.shape[1], sum(heads) * head_dim

    def normed(parts: torch.Tensor) -> torch.Tensor:
        if not q_norm or not k_norm:
            return parts
        both = parts[:, : heads[0]], parts[:, heads[0] :]
        if form.whole_norms:
            both = both[0].flatten(1), both[1].flatten(1)
        q, k = rms_norm(both[0], q_norm), rms_norm(both[1], k_norm)
        return torch.cat([q, k], 1).reshape(parts.shape)

    parts = qkv[:, :width].reshape(len(qkv), sum(heads), head_dim)
    if not form.norms_last:
        parts = normed(parts)
    x, rest = parts[..., :turned], parts[..., turned:]
    first, second = (x[..., ::2], x[..., 1::2]) if form.neighbours else x.chunk(2, -1)
    (c1, c2), (s1, s2) = cos[:, None].chunk(2, -1), sin[:, None].chunk(2, -1)
    pair = first * c1 - second * s1, second * c2 + first * s2
    x = (torch.stack(pair, -1).flatten(-2) if form.neighbours else torch.cat(pair, -1)).to(qkv.dtype)
    parts = torch.cat([x, rest], -1)
    qkv[:, :width] = (normed(parts) if form.norms_last else parts).reshape(len(qkv), width)
    if v_norm:
        values = qkv[:, width : width + heads[1] * head_dim]
        values.copy_(rms_norm(values.reshape(len(qkv), heads[1], head_dim), v_norm).flatten(1))
    return qkv


def gated(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if act == Activation.SILU:
        return torch.nn.functional.silu(gate) * up
    if act == Activation.SWIGLU_OAI:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
