"""Arguments of the fused operators besides tensors, with their checks, on any device.

Invariant: the values of both enumerations are those of kernels/native/fused.h. Not responsible for: the operators
(see fused.py on a CPU, cuda/fused.py on a GPU).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class NormKind(enum.IntEnum):
    """Where an RMSNorm rounds to the model's dtype, and what its weight means, with the values of `fused.h`."""

    ROUND_THEN_SCALE = 0
    """Llama's: the normalised value is rounded, then multiplied."""
    SCALE_THEN_ROUND = 1
    """OLMo 2's: multiplied in fp32, then rounded."""
    ONE_PLUS_SCALE = 2
    """Gemma's: multiplied by 1 + weight in fp32, then rounded."""


class Activation(enum.IntEnum):
    """The function of the gate, with the values of `fused.h`."""

    SILU = 0
    GELU_TANH = 1
    SWIGLU_OAI = 2
    """gpt-oss's, of bounded numbers: (up + 1) * gate * sigmoid(1.702 * gate)."""


EVERYWHERE = (Activation.SILU, Activation.GELU_TANH)
"""The activations that every device has, and not only a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """The parts of an RMSNorm; the weight belongs to the model."""

    weight_H: torch.Tensor
    """In the model's dtype, contiguous."""
    eps: float
    kind: NormKind


def check_rotate(
    qkv_NC: torch.Tensor,
    cos_NR: torch.Tensor,
    sin_NR: torch.Tensor,
    *,
    heads: tuple[int, int],
    head_dim: int,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
) -> None:
    """Assert the shapes and dtypes that `rotate` takes, on any device."""
    assert qkv_NC.dtype == cos_NR.dtype == sin_NR.dtype, (qkv_NC.dtype, cos_NR.dtype, sin_NR.dtype)
    assert qkv_NC.stride(1) == 1, qkv_NC.stride()
    assert qkv_NC.shape[1] >= sum(heads) * head_dim, (qkv_NC.shape, heads, head_dim)
    assert cos_NR.shape == sin_NR.shape == (qkv_NC.shape[0], cos_NR.shape[1]), (cos_NR.shape, sin_NR.shape)
    assert cos_NR.is_contiguous()
    assert sin_NR.is_contiguous()
    assert cos_NR.shape[1] % 2 == 0, cos_NR.shape
    assert cos_NR.shape[1] <= head_dim, (cos_NR.shape, head_dim)
    assert (q_norm is None) == (k_norm is None)
    if q_norm and k_norm:
        assert q_norm.kind == k_norm.kind, (q_norm.kind, k_norm.kind)
        assert q_norm.weight_H.shape == k_norm.weight_H.shape == (head_dim,), q_norm.weight_H.shape
        assert q_norm.weight_H.dtype == k_norm.weight_H.dtype == qkv_NC.dtype, q_norm.weight_H.dtype
