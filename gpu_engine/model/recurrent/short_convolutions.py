"""LFM 2's layers: a short convolution between two gates.

Invariant: the module has the products of the one that it replaces under their own names, so whatever quantises, packs
or adapts them finds them. Not responsible for: the convolution (see kernels/recurrent.py).

Shapes: N rows, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpu_engine.model.recurrent.mixer import RecurrentMixer
from gpu_engine.model.recurrent.rows import RecurrentForward, layer_of
from kernels.recurrent import ConvActivation, ShortConv
from kernels.recurrent_layer import GatedConv, Mixer


class GatedShortConv(RecurrentMixer):
    """Replaces `Lfm2ShortConv` and `Lfm2MoeShortConv`."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = inner.in_proj, inner.out_proj
        self.layer_idx = int(inner.layer_idx)
        self.conv = conv_of(inner.conv)
        self.state_shapes = (self.conv.state_shape,)
        self.pending_width = self.conv.state_shape[1]

    def of_rows(self, x_NH: torch.Tensor, states: RecurrentForward | None) -> torch.Tensor:
        """[N, H] -> [N, H]; see `RecurrentMixer`."""
        kernels, memory, rows = layer_of(states, self.layer_idx)
        before, after, x = self.in_proj(x_NH).chunk(3, dim=-1)
        (tail_STC,) = memory.states
        out_NC = kernels.short_conv(self.conv, before * x, rows, tail_STC, memory.pending_SRW, out_dtype=x.dtype)
        out_NH: torch.Tensor = self.out_proj(after * out_NC)
        return out_NH

    def native(self) -> tuple[nn.Module, Mixer, nn.Module]:
        """Return its parts; see `RecurrentMixer`."""
        return self.in_proj, GatedConv(self.conv), self.out_proj


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
