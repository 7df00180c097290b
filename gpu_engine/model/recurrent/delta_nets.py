"""The gated delta nets of Qwen 3 Next and Qwen 3.5: a convolution, a matrix of each head, and a gated norm.

Invariant: as in short_convolutions.py. Not responsible for: the recurrence (see kernels/recurrent.py).

Shapes: N rows, W hidden size, H value heads, V values of a head, C channels of the convolution, J numbers that control
a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpu_engine.model.fused_layers import Sources
from gpu_engine.model.linear import joined
from gpu_engine.model.quantised.linear import BlockLinear
from gpu_engine.model.recurrent.mixer import RecurrentMixer
from gpu_engine.model.recurrent.rows import RecurrentForward, layer_of
from gpu_engine.model.recurrent.short_convolutions import activation_of, conv_of, floats
from kernels.recurrent import Gate, MatrixRecurrence
from kernels.recurrent_layer import MatrixMixer, Mixer

_JOINED = {"qkvz": ("in_proj_qkv", "in_proj_z"), "control": ("in_proj_a", "in_proj_b")}
"""By a joined product: its parts."""


class DeltaNet(RecurrentMixer):
    """Replaces `Qwen3_5GatedDeltaNet` and the one of its mixtures, which have a product each for what a row brings."""

    names: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def __init__(self, inner: Any) -> None:
        super().__init__()
        for name in (*self.names, "out_proj"):
            self.add_module(name, getattr(inner, name))
        self.layer_idx = int(inner.layer_idx)
        self.conv = conv_of(inner.conv1d, activation_of(inner.activation))
        self.heads = MatrixRecurrence(
            a_H=-floats(inner.A_log).exp(),
            bias_H=floats(inner.dt_bias),
            keys=inner.head_k_dim,
            values=inner.head_v_dim,
            key_heads=inner.num_k_heads,
            q_at=0,
            k_at=inner.key_dim,
            v_at=2 * inner.key_dim,
            delta=True,
        )
        self.norm_weight_V, self.eps = floats(inner.norm.weight), float(inner.norm.variance_epsilon)
        self.state_shapes = (self.conv.state_shape, self.heads.state_shape)
        self.pending_width = self.conv.state_shape[1] + self.heads.control_width

    def project(self, x_NW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what rows bring: queries, keys and values [N, C], gates [N, H * V], and a and b of each head
        [N, J]."""
        own: Any = self
        control_NJ = torch.cat([own.in_proj_a(x_NW), own.in_proj_b(x_NW)], dim=1).float()
        return own.in_proj_qkv(x_NW), own.in_proj_z(x_NW), control_NJ

    def of_rows(self, x_NW: torch.Tensor, states: RecurrentForward | None) -> torch.Tensor:
        """[N, W] -> [N, W]; see `RecurrentMixer`."""
        kernels, memory, rows = layer_of(states, self.layer_idx)
        qkv_NC, gate_NG, control_NJ = self.project(x_NW)
        (tail, matrix), pending = memory.states, memory.pending_SRW
        mixed = kernels.short_conv(self.conv, qkv_NC, rows, tail, pending, out_dtype=torch.float32, emits_redo=True)
        read_NG = kernels.matrix_recurrence(
            self.heads, mixed, control_NJ, rows, matrix, pending, saved_at=self.conv.state_shape[1]
        )
        of_heads = read_NG.view(-1, self.heads.values)
        normed = kernels.gated_norm(of_heads, gate_NG, self.norm_weight_V, Gate.AFTER_NORM, eps=self.eps)
        out_NW: torch.Tensor = self.out_proj(normed.view(len(x_NW), -1))  # type: ignore[operator]
        return out_NW


class JoinedDeltaNet(DeltaNet):
    """The same with one product for queries, keys, values and gates, and one for what controls a row. Raises ValueError
    for products of different kinds."""

    def __init__(self, inner: DeltaNet) -> None:
        RecurrentMixer.__init__(self)
        parts: dict[str, list[Any]] = {
            name: [inner.get_submodule(part) for part in names] for name, names in _JOINED.items()
        }
        self.qkvz, self.control = joined(parts["qkvz"]), joined(parts["control"])
        self.out_proj = inner.out_proj
        self.layer_idx, self.conv, self.heads = inner.layer_idx, inner.conv, inner.heads
        self.norm_weight_V, self.eps = inner.norm_weight_V, inner.eps
        self.state_shapes, self.pending_width = inner.state_shapes, inner.pending_width
        own: Any = inner
        self.sources: Sources = {
            name: tuple((part, int(getattr(own, part).out_features)) for part in names)
            for name, names in (*_JOINED.items(), ("out_proj", ("out_proj",)))
        }

    def products(self) -> list[tuple[str, nn.Module]]:
        """Return the products by name, in the order of their use."""
        return [(name, self.get_submodule(name)) for name in self.sources]

    def replace_product(self, name: str, product: nn.Module) -> None:
        """Multiply by `product` instead of the one of that name."""
        setattr(self, name, product)

    def project(self, x_NW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the same."""
        channels, control_NJ = self.conv.state_shape[1], self.control(x_NW).float()
        qkvz_NO = self.qkvz(x_NW)
        return qkvz_NO[:, :channels], qkvz_NO[:, channels:], control_NJ.contiguous()

    def native(self) -> tuple[nn.Module, Mixer, nn.Module] | None:
        """Return its parts; see `RecurrentMixer`."""
        if not isinstance(self.control, BlockLinear):
            return None
        heads, _, values = self.heads.state_shape
        channels = self.conv.state_shape[1]
        mixer = MatrixMixer(
            self.conv,
            self.heads,
            Gate.AFTER_NORM,
            self.norm_weight_V,
            self.eps,
            values,
            groups=1,
            x_at=0,
            gate_at=channels,
            control_at=0,
            outputs=channels + heads * values,
            control=self.control.packed,
        )
        return self.qkvz, mixer, self.out_proj  # type: ignore[return-value]


class GroupedDeltaNet(DeltaNet):
    """Replaces `Qwen3NextGatedDeltaNet`, whose products bring everything of a key head side by side."""

    names = ("in_proj_qkvz", "in_proj_ba")

    def project(self, x_NW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the same, in the order of the heads."""
        own: Any = self
        heads, keys, values = self.heads.state_shape
        groups, N = self.heads.key_heads, len(x_NW)
        each = heads // groups
        parts = own.in_proj_qkvz(x_NW).view(N, groups, -1).split([keys, keys, each * values, each * values], dim=2)
        q, k, v, gate_NG = (part.reshape(N, -1) for part in parts)
        b, a = (part.reshape(N, -1) for part in own.in_proj_ba(x_NW).view(N, groups, -1).split([each, each], dim=2))
        return torch.cat([q, k, v], dim=1), gate_NG, torch.cat([a, b], dim=1).float()
