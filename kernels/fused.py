"""The small operators of a decoder layer: residual + RMSNorm, per-head norm + rotary, activation * up.

Invariant: a row's result depends only on that row, bit for bit, and is rounded where transformers' modules round.
Shapes: N rows, H hidden size, I inner size of a gated block, D head size, R rotated channels of a head, C columns of
a joined q, k, v product. Not responsible for: products, attention, and the choice of modules
(see gpu_engine/model/fusion.py).
"""

from __future__ import annotations

import ctypes

import torch

from kernels.fused_arguments import LLAMA_HEADS, Activation, HeadForm, NormKind, RMSNorm, check_rotate
from kernels.library import native

__all__ = [
    "Activation",
    "HeadForm",
    "NormKind",
    "RMSNorm",
    "RotaryArgs",
    "add_rms_norm",
    "angles_at",
    "check_rotate",
    "gated",
    "rms_norm",
    "rotate",
]

_DTYPES = (torch.bfloat16, torch.float32)


class _NormArgs(ctypes.Structure):
    """Mirror of `struct rms_norm_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "delta", "weight", "out")],
        *[(name, ctypes.c_int64) for name in ("rows", "width", "x_stride", "delta_stride")],
        ("eps", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("kind", "bf16")],
    ]


class RotaryArgs(ctypes.Structure):
    """Mirror of `struct rotary_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "q_weight", "k_weight", "v_weight")],
        *[(name, ctypes.c_int64) for name in ("rows", "stride", "q_heads", "k_heads", "head_dim", "rotated")],
        *[(name, ctypes.c_float) for name in ("q_eps", "k_eps", "v_eps")],
        *[(name, ctypes.c_int32) for name in ("kind", "bf16", "angles_bf16")],
        *[(name, ctypes.c_int32) for name in ("neighbours", "whole_norms", "norms_last")],
    ]

    @classmethod
    def of(
        cls,
        heads: tuple[int, int],
        head_dim: int,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        v_norm: RMSNorm | None = None,
        form: HeadForm = LLAMA_HEADS,
    ) -> RotaryArgs:
        """Return the arguments that are the same in every call. The caller owns the norms' weights and outlives
        them."""
        args = cls(q_heads=heads[0], k_heads=heads[1], head_dim=head_dim)
        args.neighbours, args.whole_norms, args.norms_last = form.neighbours, form.whole_norms, form.norms_last
        for part, norm in (("q", q_norm), ("k", k_norm), ("v", v_norm)):
            if norm is not None:
                setattr(args, f"{part}_weight", norm.weight_H.data_ptr())
                setattr(args, f"{part}_eps", norm.eps)
                args.kind = norm.kind
        return args


class _GatedArgs(ctypes.Structure):
    """Mirror of `struct gated_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("gate_up", "out")],
        *[(name, ctypes.c_int64) for name in ("rows", "width")],
        *[(name, ctypes.c_int32) for name in ("act", "bf16")],
    ]


def rms_norm(x_NH: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """Return the norm of each row, [N, H] contiguous; rows of x may be strided."""
    if x_NH.device.type != "cpu":
        from kernels.cuda import fused as device  # a CPU install has no Triton

        return device.rms_norm(x_NH, norm)
    assert x_NH.dim() == 2, x_NH.shape
    assert x_NH.dtype in _DTYPES, x_NH.dtype
    assert x_NH.stride(1) == 1, x_NH.stride()
    assert norm.weight_H.shape == x_NH.shape[1:], (norm.weight_H.shape, x_NH.shape)
    assert norm.weight_H.dtype == x_NH.dtype, norm.weight_H.dtype
    (N, H), out_NH = x_NH.shape, torch.empty(x_NH.shape, dtype=x_NH.dtype)
    pointers = (x_NH.data_ptr(), 0, norm.weight_H.data_ptr(), out_NH.data_ptr())
    args = _NormArgs(*pointers, N, H, x_NH.stride(0), 0, norm.eps, norm.kind, x_NH.dtype == torch.bfloat16)
    native().lockstep_rms_norm(ctypes.byref(args))
    return out_NH


def add_rms_norm(x_NH: torch.Tensor, delta_NH: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """Add delta to x in place and return the norm of the sum, [N, H] contiguous; the sum is rounded first."""
    if x_NH.device.type != "cpu":
        from kernels.cuda import fused as device  # a CPU install has no Triton

        return device.add_rms_norm(x_NH, delta_NH, norm)
    assert x_NH.shape == delta_NH.shape, (x_NH.shape, delta_NH.shape)
    assert x_NH.dtype == delta_NH.dtype == norm.weight_H.dtype, (x_NH.dtype, delta_NH.dtype, norm.weight_H.dtype)
    assert x_NH.dtype in _DTYPES, x_NH.dtype
    assert x_NH.stride(1) == delta_NH.stride(1) == 1
    assert norm.weight_H.shape == x_NH.shape[1:], (norm.weight_H.shape, x_NH.shape)
    (N, H), out_NH = x_NH.shape, torch.empty(x_NH.shape, dtype=x_NH.dtype)
    pointers = (x_NH.data_ptr(), delta_NH.data_ptr(), norm.weight_H.data_ptr(), out_NH.data_ptr())
    strides = (x_NH.stride(0), delta_NH.stride(0))
    args = _NormArgs(*pointers, N, H, *strides, norm.eps, norm.kind, x_NH.dtype == torch.bfloat16)
    native().lockstep_rms_norm(ctypes.byref(args))
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
    v_norm: RMSNorm | None = None,
    form: HeadForm = LLAMA_HEADS,
) -> None:
    """Norm (where given) and rotate the query and key heads of `qkv_NC` in place; norm the value heads after them,
    which are unchanged without `v_norm`.

    `heads` is (query heads, key heads), which are the first columns of a row. Channels i and i + R / 2 of a head are a
    pair, or neighbours by `form`: angles i and i + R / 2 are of the two channels of pair i. Channels from R on are not
    rotated. `cos_NR` and `sin_NR` are contiguous, and in the model's dtype; on a CPU they may be float32, and the
    rotation is rounded once then.
    """
    if qkv_NC.device.type != "cpu":
        assert form == LLAMA_HEADS, form
        from kernels.cuda import fused as device  # a CPU install has no Triton

        assert v_norm is None
        device.rotate(qkv_NC, cos_NR, sin_NR, heads=heads, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm)
        return
    norms = {"q_norm": q_norm, "k_norm": k_norm, "v_norm": v_norm}
    check_rotate(qkv_NC, cos_NR, sin_NR, heads=heads, head_dim=head_dim, **norms, form=form)
    assert qkv_NC.dtype in _DTYPES, qkv_NC.dtype
    args = RotaryArgs.of(heads, head_dim, **norms, form=form)
    args.qkv, args.cos, args.sin = qkv_NC.data_ptr(), cos_NR.data_ptr(), sin_NR.data_ptr()
    args.rows, args.stride, args.rotated = qkv_NC.shape[0], qkv_NC.stride(0), cos_NR.shape[1]
    args.bf16, args.angles_bf16 = qkv_NC.dtype == torch.bfloat16, cos_NR.dtype == torch.bfloat16
    native().lockstep_rotary(ctypes.byref(args))


def angles_at(
    positions_BP: torch.Tensor, cos_LR: torch.Tensor, sin_LR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of two tables at int32 positions, [N, R] each, contiguous; padding (negative) has those of 0."""
    if positions_BP.device.type != "cpu":
        from kernels.cuda import fused as device  # a CPU install has no Triton

        return device.angles_at(positions_BP, cos_LR, sin_LR)
    places_N = positions_BP.view(-1).clamp(min=0)
    return torch.nn.functional.embedding(places_N, cos_LR), torch.nn.functional.embedding(places_N, sin_LR)


def gated(gate_up_NJ: torch.Tensor, act: Activation) -> torch.Tensor:
    """Return act(gate) * up, [N, I] contiguous, of rows that hold gate and then up: J = 2 I. See `Activation`.

    Without a gate the rows hold what the activation takes: J = I.
    """
    if not act.has_gate:
        return gate_up_NJ.relu().square_()
    if gate_up_NJ.device.type != "cpu":
        from kernels.cuda import fused as device  # a CPU install has no Triton

        return device.gated(gate_up_NJ, act)
    assert gate_up_NJ.dtype in _DTYPES, gate_up_NJ.dtype
    assert gate_up_NJ.is_contiguous()
    N, J = gate_up_NJ.shape
    assert J % 2 == 0, J
    out_NI = torch.empty(N, J // 2, dtype=gate_up_NJ.dtype)
    args = _GatedArgs(gate_up_NJ.data_ptr(), out_NI.data_ptr(), N, J // 2, act, gate_up_NJ.dtype == torch.bfloat16)
    native().lockstep_gated(ctypes.byref(args))
    return out_NI
