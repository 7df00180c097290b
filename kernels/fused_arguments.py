"""Arguments of the fused operators besides tensors, with their checks, on any device.

Invariant: the values of both enumerations are those of kernels/native/fused.h. Not responsible for: the operators
(see fused.py on a CPU, cuda/fused.py on a GPU).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class NormKind(enum.IntEnum):
    """Where a norm rounds to the model's dtype, and what its weight means, with the values of `fused.h`."""

    ROUND_THEN_SCALE = 0
    """Llama's: the normalised value is rounded, then multiplied."""
    SCALE_THEN_ROUND = 1
    """OLMo 2's: multiplied in fp32, then rounded."""
    ONE_PLUS_SCALE = 2
    """Gemma's: multiplied by 1 + weight in fp32, then rounded."""
    CENTRED = 3
    """Cohere's, a LayerNorm without a bias: the mean is taken off, then as OLMo 2's."""


class Activation(enum.IntEnum):
    """The function of the gate, with the values of `fused.h`."""

    SILU = 0
    GELU_TANH = 1
    SWIGLU_OAI = 2
    """gpt-oss's, of bounded numbers: (up + 1) * gate * sigmoid(1.702 * gate)."""
    RELU_SQUARED = 3
    """max(up, 0) ** 2, without a gate (Nemotron, Arcee)."""

    @property
    def has_gate(self) -> bool:
        """Whether a block's first product gives a gate before what it multiplies."""
        return self is not Activation.RELU_SQUARED


EVERYWHERE = (Activation.SILU, Activation.GELU_TANH)
"""The activations with a gate that every device has, and not only a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """The parts of an RMSNorm; the weight belongs to the model."""

    weight_H: torch.Tensor
    """In the model's dtype, contiguous."""
    eps: float
    kind: NormKind


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How queries and keys are rotated and normed. The defaults are Llama's and Qwen 3's; a GPU has no others."""

    neighbours: bool = False
    """Channels 2 i and 2 i + 1 of a head are a pair, and not i and i + R / 2."""
    whole_norms: bool = False
    """A norm is of all query heads, or of all key heads, as one vector (OLMo 2)."""
    norms_last: bool = False
    """The norms come after the rotation (HunYuan)."""


LLAMA_HEADS = HeadForm()


class KeyValues(enum.IntEnum):
    """Where the keys and values of an attention come from, with the values of `forward.h`."""

    OWN = 0
    """The joined product gives queries, keys and values."""
    FROM_KEYS = 1
    """It gives queries and keys; the values are the keys before their norm and rotation (Gemma 4 31B)."""
    SHARED = 2
    """It gives queries; an earlier layer has stored the keys and values (Gemma 4 E2B)."""

    def product_heads(self, heads: tuple[int, int]) -> int:
        """Return the heads that the joined product gives. `heads`: query heads and KV heads."""
        return heads[0] + (2 - self) * heads[1]


@dataclass(frozen=True, slots=True)
class StreamScales:
    """What a model multiplies its numbers by."""

    input: float = 1.0
    """The input of the first layer."""
    residual: float = 1.0
    """What a layer adds to the residual stream."""
    logits: float = 1.0
    """The outputs of the head."""


UNSCALED = StreamScales()


def check_rotate(
    qkv_NC: torch.Tensor,
    cos_NR: torch.Tensor,
    sin_NR: torch.Tensor,
    *,
    heads: tuple[int, int],
    head_dim: int,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    v_norm: RMSNorm | None = None,
    form: HeadForm = LLAMA_HEADS,
) -> None:
    """Assert the shapes and dtypes that `rotate` takes, on any device."""
    assert cos_NR.dtype == sin_NR.dtype, (cos_NR.dtype, sin_NR.dtype)
    assert cos_NR.dtype in (qkv_NC.dtype, torch.float32), (qkv_NC.dtype, cos_NR.dtype)
    assert qkv_NC.stride(1) == 1, qkv_NC.stride()
    assert qkv_NC.shape[1] >= sum(heads) * head_dim, (qkv_NC.shape, heads, head_dim)
    assert cos_NR.shape == sin_NR.shape == (qkv_NC.shape[0], cos_NR.shape[1]), (cos_NR.shape, sin_NR.shape)
    assert cos_NR.is_contiguous()
    assert sin_NR.is_contiguous()
    assert cos_NR.shape[1] % 2 == 0, cos_NR.shape
    assert cos_NR.shape[1] <= head_dim, (cos_NR.shape, head_dim)
    assert (q_norm is None) == (k_norm is None) or heads[1] == 0
    assert v_norm is None or qkv_NC.shape[1] >= (heads[0] + 2 * heads[1]) * head_dim, (qkv_NC.shape, heads, head_dim)
    sizes = [head_dim * number if form.whole_norms else head_dim for number in heads]
    with_none = zip((q_norm, k_norm, v_norm), (*sizes, head_dim), strict=True)
    norms = [(norm, size) for norm, size in with_none if norm is not None]
    for norm, size in norms:
        assert norm.kind == norms[0][0].kind, [each.kind for each, _ in norms]
        assert norm.kind != NormKind.CENTRED, "norms of heads have no mean to take off"
        assert norm.weight_H.shape == (size,), (norm.weight_H.shape, size)
        assert norm.weight_H.dtype == qkv_NC.dtype, norm.weight_H.dtype
