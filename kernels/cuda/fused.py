"""The small operators of a decoder layer on a GPU: residual + RMSNorm, per-head norm + rotary, activation * up.

As `kernels.fused`, one launch each. Invariant: a row's result depends only on that row, bit for bit: the blocks
follow from the model's sizes, never from the number of rows. Not responsible for: products, attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused_arguments import EVERYWHERE, Activation, NormKind, RMSNorm, check_rotate

ROUND_FIRST = tl.constexpr(NormKind.ROUND_THEN_SCALE.value)
ONE_PLUS = tl.constexpr(NormKind.ONE_PLUS_SCALE.value)
CENTRED = tl.constexpr(NormKind.CENTRED.value)
GELU = tl.constexpr(Activation.GELU_TANH.value)
_GATED_BLOCK = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def weighed(y: tl.tensor, weight: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Multiply fp32 normalised values by the weight as it was loaded; return fp32, to be rounded."""
    w = weight.to(tl.float32)
    if KIND == ROUND_FIRST:
        return y.to(weight.dtype).to(tl.float32) * w
    if KIND == ONE_PLUS:
        return y * (1.0 + w)
    return y * w


@triton.jit
def norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Grid (N,): add delta to a row, in place, and write the norm of the sum."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        more = tl.load(delta + row * delta_stride + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(x + row * x_stride + column, value, mask=inside)
    w = tl.load(weight + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    if KIND == CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, axis=0) / H, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / H + eps)
    tl.store(out + row * H + column, weighed(wide * inverse, w, KIND).to(value.dtype), mask=inside)


@triton.jit
def rotary_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    stride: tl.tensor,
    q_eps: tl.tensor,
    k_eps: tl.tensor,
    Q_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Grid (N, heads): one head of one row, in place."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = qkv + row * stride + head * D
    channel = tl.arange(0, BLOCK)
    inside = channel < D
    rotates = channel < R
    partner = tl.where(channel < R // 2, channel + R // 2, channel - R // 2)
    x = tl.load(at + channel, mask=inside, other=0.0)
    y = tl.load(at + partner, mask=rotates, other=0.0)
    # All threads have read both halves before one writes.
    tl.debug_barrier()
    if NORM:
        query = head < Q_HEADS
        eps = tl.where(query, q_eps, k_eps)
        q_here = tl.load(q_weight + channel, mask=inside, other=0.0)
        w = tl.where(query, q_here, tl.load(k_weight + channel, mask=inside, other=0.0))
        q_there = tl.load(q_weight + partner, mask=rotates, other=0.0)
        v = tl.where(query, q_there, tl.load(k_weight + partner, mask=rotates, other=0.0))
        wide = x.to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / D + eps)
        x = weighed(wide * inverse, w, KIND).to(x.dtype)
        y = weighed(y.to(tl.float32) * inverse, v, KIND).to(x.dtype)
    c = tl.load(cos + row * R + channel, mask=rotates, other=0.0).to(tl.float32)
    s = tl.load(sin + row * R + channel, mask=rotates, other=0.0).to(tl.float32)
    straight = (x.to(tl.float32) * c).to(x.dtype).to(tl.float32)
    across = (y.to(tl.float32) * s).to(x.dtype).to(tl.float32)
    rotated = tl.where(channel < R // 2, straight - across, straight + across).to(x.dtype)
    tl.store(at + channel, tl.where(rotates, rotated, x), mask=inside)


@triton.jit
def angles_kernel(
    positions: tl.tensor,
    cos_table: tl.tensor,
    sin_table: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    R: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N,): the rows of two tables at a position."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.maximum(tl.load(positions + row), 0).to(tl.int64) * R
    channel = tl.arange(0, BLOCK)
    inside = channel < R
    tl.store(cos + row * R + channel, tl.load(cos_table + at + channel, mask=inside), mask=inside)
    tl.store(sin + row * R + channel, tl.load(sin_table + at + channel, mask=inside), mask=inside)


@triton.jit
def activated(gate: tl.tensor, up: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """Return act(gate) * up of values that are rounded to the model's dtype, in that dtype."""
    g = gate.to(tl.float32)
    t = g
    if ACT == GELU:
        t = 1.5957691216057308 * (g + 0.044715 * g * g * g)
    active = (g * tl.sigmoid(t)).to(gate.dtype).to(tl.float32)
    return (active * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def gated_kernel(gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.tensor, ACT: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Grid (N, blocks of WIDTH): act(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + column, activated(gate, up, ACT), mask=inside)


def rms_norm(x_NH: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """As `kernels.fused.rms_norm`; fp16 is taken too."""
    return _norm(x_NH, None, norm)


def add_rms_norm(x_NH: torch.Tensor, delta_NH: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """As `kernels.fused.add_rms_norm`; fp16 is taken too."""
    return _norm(x_NH, delta_NH, norm)


def _norm(x_NH: torch.Tensor, delta_NH: torch.Tensor | None, norm: RMSNorm) -> torch.Tensor:
    added = x_NH if delta_NH is None else delta_NH
    assert x_NH.dim() == 2, x_NH.shape
    assert x_NH.shape == added.shape, (x_NH.shape, added.shape)
    assert x_NH.dtype in _DTYPES, x_NH.dtype
    assert x_NH.dtype == added.dtype == norm.weight_H.dtype, (x_NH.dtype, added.dtype, norm.weight_H.dtype)
    assert x_NH.stride(1) == added.stride(1) == 1
    assert norm.weight_H.shape == x_NH.shape[1:], (norm.weight_H.shape, x_NH.shape)
    N, H = x_NH.shape
    out_NH = torch.empty((N, H), dtype=x_NH.dtype, device=x_NH.device)
    block = triton.next_power_of_2(H)
    norm_kernel[(N,)](
        x_NH,
        added,
        norm.weight_H,
        out_NH,
        x_NH.stride(0),
        added.stride(0),
        norm.eps,
        H=H,
        BLOCK=block,
        ADD=delta_NH is not None,
        KIND=int(norm.kind),
        num_warps=min(16, max(1, block // 512)),
    )
    return out_NH


def rotate(
    qkv_NC: torch.Tensor,
    cos_NR: torch.Tensor,
    sin_NR: torch.Tensor,
    *,
    heads: tuple[int, int],
    head_dim: int,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
) -> None:
    """As `kernels.fused.rotate`; fp16 is taken too."""
    check_rotate(qkv_NC, cos_NR, sin_NR, heads=heads, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm)
    assert qkv_NC.dtype == cos_NR.dtype, (qkv_NC.dtype, cos_NR.dtype)
    assert qkv_NC.dtype in _DTYPES, qkv_NC.dtype
    rotary_kernel[(qkv_NC.shape[0], sum(heads))](
        qkv_NC,
        cos_NR,
        sin_NR,
        *(norm.weight_H if norm else cos_NR for norm in (q_norm, k_norm)),
        qkv_NC.stride(0),
        *(norm.eps if norm else 0.0 for norm in (q_norm, k_norm)),
        Q_HEADS=heads[0],
        D=head_dim,
        R=cos_NR.shape[1],
        BLOCK=triton.next_power_of_2(head_dim),
        NORM=q_norm is not None,
        KIND=int(q_norm.kind) if q_norm else 0,
        num_warps=1 if head_dim <= 128 else 2,
    )


def angles_at(
    positions_BP: torch.Tensor, cos_LR: torch.Tensor, sin_LR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.fused.angles_at`, in one launch."""
    assert positions_BP.dtype == torch.int32
    assert positions_BP.is_contiguous()
    assert cos_LR.shape == sin_LR.shape
    assert cos_LR.dtype == sin_LR.dtype
    assert cos_LR.is_contiguous()
    assert sin_LR.is_contiguous()
    N, R = positions_BP.numel(), cos_LR.shape[1]
    cos_NR, sin_NR = (torch.empty(N, R, dtype=cos_LR.dtype, device=cos_LR.device) for _ in range(2))
    block = triton.next_power_of_2(R)
    angles_kernel[(N,)](positions_BP, cos_LR, sin_LR, cos_NR, sin_NR, R, BLOCK=block, num_warps=1)
    return cos_NR, sin_NR


def gated(gate_up_NJ: torch.Tensor, act: Activation) -> torch.Tensor:
    """As `kernels.fused.gated`; fp16 is taken too."""
    assert act in EVERYWHERE, act
    assert gate_up_NJ.dtype in _DTYPES, gate_up_NJ.dtype
    assert gate_up_NJ.is_contiguous()
    N, J = gate_up_NJ.shape
    assert J % 2 == 0, J
    width = J // 2
    out_NI = torch.empty(N, width, dtype=gate_up_NJ.dtype, device=gate_up_NJ.device)
    grid = (N, -(-width // _GATED_BLOCK))
    gated_kernel[grid](gate_up_NJ, out_NI, width, ACT=int(act), BLOCK=_GATED_BLOCK, num_warps=4)
    return out_NI
