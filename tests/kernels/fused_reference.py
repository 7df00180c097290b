"""The small operators of a decoder layer in plain torch, rounded where transformers' modules round."""

from __future__ import annotations

import torch

from kernels.fused import Activation, NormKind, RMSNorm


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    wide = x.float()
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
) -> torch.Tensor:
    """Return the values that `rotate` writes to `qkv`."""
    qkv, turned, width = qkv.clone(), cos.shape[1], sum(heads) * head_dim
    parts = qkv[:, :width].reshape(len(qkv), sum(heads), head_dim)
    if q_norm and k_norm:
        parts = torch.cat([rms_norm(parts[:, : heads[0]], q_norm), rms_norm(parts[:, heads[0] :], k_norm)], 1)
    x, rest = parts[..., :turned], parts[..., turned:]
    first, second = x.chunk(2, -1)
    x = x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    qkv[:, :width] = torch.cat([x, rest], -1).reshape(len(qkv), width)
    return qkv


def gated(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if act == Activation.SILU:
        return torch.nn.functional.silu(gate) * up
    if act == Activation.SWIGLU_OAI:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
