"""Mamba's mixers: version 2 of Bamba, Falcon-H1, Granite 4 and Nemotron-H, and version 1 of Jamba.

Invariant: as in short_convolutions.py. Not responsible for: the recurrences (see kernels/recurrent.py).

Shapes: N rows, W hidden size, I inner channels, C channels of the convolution, J numbers that control a row, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpu_engine.model.recurrent.mixer import RecurrentMixer
from gpu_engine.model.recurrent.rows import RecurrentForward, layer_of
from gpu_engine.model.recurrent.short_convolutions import activation_of, conv_of, floats
from kernels.recurrent import Gate, MatrixRecurrence, SelectiveScan
from kernels.recurrent_layer import MatrixMixer as NativeMixer
from kernels.recurrent_layer import Mixer


class MatrixMixer(RecurrentMixer):
    """Replaces the mixers of Mamba 2: a matrix of each head, and a norm around the gate or none."""

    scales_J: torch.Tensor | None

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = inner.in_proj, inner.out_proj
        self.layer_idx = int(inner.layer_idx)
        self.conv = conv_of(inner.conv1d, activation_of(inner.activation))
        width, of_keys = inner.intermediate_size, inner.n_groups * inner.ssm_state_size
        low, high = inner.time_step_limit
        self.heads = MatrixRecurrence(
            a_H=-floats(inner.A_log).exp(),
            bias_H=floats(inner.dt_bias),
            keys=inner.ssm_state_size,
            values=inner.head_dim,
            key_heads=inner.n_groups,
            q_at=width + of_keys,
            k_at=width,
            v_at=0,
            delta=False,
            skip_H=floats(inner.D),
            dt_limits=(float(low), float(high)),
        )
        self.parts = [width, width + 2 * of_keys, inner.num_heads]
        self.kind, self.norm_weight_I, self.eps, self.groups = _norm_of(inner)
        self.input_scale = float(getattr(inner, "ssm_in_multiplier", 1.0))
        scales: torch.Tensor | None = getattr(inner, "mup_vector", None)
        if scales is not None and not scales.is_meta and bool((scales == 1.0).all()):
            scales = None
        self.register_buffer("scales_J", None if scales is None else scales.flatten(), persistent=False)
        self.state_shapes = (self.conv.state_shape, self.heads.state_shape)
        self.pending_width = self.conv.state_shape[1] + self.heads.control_width

    def of_rows(self, x_NW: torch.Tensor, states: RecurrentForward | None) -> torch.Tensor:
        """[N, W] -> [N, W]; see `RecurrentMixer`."""
        kernels, memory, rows = layer_of(states, self.layer_idx)
        projected_NJ = self.in_proj(x_NW if self.input_scale == 1.0 else x_NW * self.input_scale)
        if self.scales_J is not None:
            projected_NJ = projected_NJ * self.scales_J
        gate_NI, x_NC, dt_NH = projected_NJ.split(self.parts, dim=1)
        (tail, matrix), pending = memory.states, memory.pending_SRW
        mixed = kernels.short_conv(self.conv, x_NC, rows, tail, pending, out_dtype=torch.float32, emits_redo=True)
        read_NI = kernels.matrix_recurrence(
            self.heads, mixed, dt_NH.float().contiguous(), rows, matrix, pending, saved_at=self.conv.state_shape[1]
        )
        normed_NI = kernels.gated_norm(
            read_NI, gate_NI, self.norm_weight_I, self.kind, eps=self.eps, groups=self.groups
        )
        out_NW: torch.Tensor = self.out_proj(normed_NI)
        return out_NW

    def native(self) -> tuple[nn.Module, Mixer, nn.Module] | None:
        """Return its parts; see `RecurrentMixer`. The native form has no scales."""
        if self.input_scale != 1.0 or self.scales_J is not None:
            return None
        width, channels, _ = self.parts
        mixer = NativeMixer(
            self.conv,
            self.heads,
            self.kind,
            self.norm_weight_I,
            self.eps,
            width,
            self.groups,
            x_at=width,
            gate_at=0,
            control_at=width + channels,
            outputs=sum(self.parts),
        )
        return self.in_proj, mixer, self.out_proj


def _norm_of(inner: Any) -> tuple[Gate, torch.Tensor | None, float, int]:
    """Return where a mixer's gate is, and its norm's weight, epsilon and groups."""
    if not hasattr(inner.norm, "weight"):
        return Gate.ONLY, None, 0.0, 1
    kind = Gate.AFTER_NORM if getattr(inner.norm, "norm_before_gate", False) else Gate.BEFORE_NORM
    return kind, floats(inner.norm.weight), float(inner.norm.variance_epsilon), int(inner.n_groups)


class ScanMixer(RecurrentMixer):
    """Replaces `JambaMambaMixer`: a scan over channels, with norms of what controls it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.in_proj, self.x_proj, self.dt_proj = inner.in_proj, inner.x_proj, inner.dt_proj
        self.out_proj = inner.out_proj
        self.dt_layernorm, self.b_layernorm = inner.dt_layernorm, inner.b_layernorm
        self.c_layernorm = inner.c_layernorm
        self.layer_idx = int(inner.layer_idx)
        self.conv = conv_of(inner.conv1d, activation_of(inner.activation))
        self.scan = SelectiveScan(-floats(inner.A_log).exp().T.contiguous(), floats(inner.D))
        self.parts = [inner.time_step_rank, inner.ssm_state_size, inner.ssm_state_size]
        self.state_shapes = (self.conv.state_shape, self.scan.state_shape)
        self.pending_width = self.conv.state_shape[1] + self.scan.pending_width

    def of_rows(self, x_NW: torch.Tensor, states: RecurrentForward | None) -> torch.Tensor:
        """[N, W] -> [N, W]; see `RecurrentMixer`."""
        kernels, memory, rows = layer_of(states, self.layer_idx)
        x_NI, gate_NI = self.in_proj(x_NW).chunk(2, dim=1)
        (tail, scanned), pending = memory.states, memory.pending_SRW
        x_MI = kernels.short_conv(self.conv, x_NI, rows, tail, pending, out_dtype=torch.float32, emits_redo=True)
        own_NI = x_MI[len(x_MI) - len(x_NI) :].to(x_NI.dtype)
        dt, b, c = self.x_proj(own_NI).split(self.parts, dim=1)
        dt_NI = self.dt_proj(self.dt_layernorm(dt))
        control_NJ = torch.cat([dt_NI, self.b_layernorm(b), self.c_layernorm(c)], dim=1).float()
        read_NI = kernels.selective_scan(
            self.scan, x_MI, control_NJ, rows, scanned, pending, saved_at=self.conv.state_shape[1]
        )
        gated_NI = kernels.gated_norm(read_NI, gate_NI, None, Gate.ONLY)
        out_NW: torch.Tensor = self.out_proj(gated_NI)
        return out_NW
