"""LFM 2's layers: a short convolution between two gates.

Invariant: the module has the products of the one that it replaces under their own names, so whatever quantises, packs
or adapts them finds them. Not responsible for: the convolution (see kernels/recurrent.py).

Shapes: B sequences, P positions of each, H hidden size, N = B * P rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpu_engine.model.attention import context_of_forward
from gpu_engine.model.recurrent.rows import layer_of
from kernels.recurrent import ConvActivation, ShortConv


class GatedShortConv(nn.Module):
    """Replaces `Lfm2ShortConv` and `Lfm2MoeShortConv`."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = inner.in_proj, inner.out_proj
        self.layer_idx = int(inner.layer_idx)
        self.conv = conv_of(inner.conv)
        self.state_shapes = (self.conv.state_shape,)
        self.pending_width = self.conv.state_shape[1]

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Return the layer's output, [B, P, H] like its input."""
        kernels, states, rows = layer_of(context_of_forward().recurrent, self.layer_idx)
        before, after, x = self.in_proj(hidden_states).flatten(0, 1).chunk(3, dim=-1)
        (tail_STC,) = states.states
        out_NC = kernels.short_conv(self.conv, before * x, rows, tail_STC, states.pending_SRW, out_dtype=x.dtype)
        out: torch.Tensor = self.out_proj((after * out_NC).view(*hidden_states.shape[:2], -1))
        return out


def floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter in float32, contiguous."""
    return tensor.detach().float().contiguous()


def activation_of(name: str) -> ConvActivation:
    """Return what follows a convolution, by transformers' name. Raises ValueError."""
    if name not in ("silu", "swish"):
        raise ValueError(f"a convolution with the activation {name}, and only silu is supported")
    return ConvActivation.SILU


def conv_of(inner: nn.Conv1d, act: ConvActivation = ConvActivation.NONE) -> ShortConv:
    """Return the convolution of each channel by its own weights, in float32. Raises ValueError."""
    if not inner.groups == inner.in_channels == inner.out_channels:
        raise ValueError(f"a convolution across channels: {inner}")
    bias: torch.Tensor | None = inner.bias
    return ShortConv(floats(inner.weight[:, 0].T), None if bias is None else floats(bias), act)
