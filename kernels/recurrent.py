"""Layers with a state on a CPU: a short convolution, a matrix of each head, and a scan over channels.

Invariant: a row has the same bits in any call, whatever comes with it, and whether it is committed, pending or taken
again (see recurrent_rows.py). Not responsible for: products and gates before and after (see
gpu_engine/model/recurrent/).

Shapes: L lanes, N rows of the forward, S places, R pending rows at most, W floats that are saved of a row; C channels
of a convolution, T taps; M = L * R + N rows of a buffer that begins with R rows of each lane that are taken again;
H heads, D keys and V values of a head; I channels of a scan, E states of a channel.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from kernels.library import address, native
from kernels.recurrent_rows import RecurrentRows

MAX_TAPS, MAX_KEYS, MAX_SCANNED = 8, 256, 64
"""The most that the kernels take: inputs of a convolution, keys of a head, states of a channel."""
_DTYPES = (torch.bfloat16, torch.float32)


class ConvActivation(IntEnum):
    """What follows a convolution."""

    NONE = 0
    SILU = 1


class Gate(IntEnum):
    """Where a gate is next to a norm."""

    ONLY = 0
    AFTER_NORM = 1
    BEFORE_NORM = 2


class RowsArgs(ctypes.Structure):
    """Mirror of `struct recurrent_rows`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("first", "place", "fresh", "redo", "commit")],
        *[(name, ctypes.c_int64) for name in ("lanes", "num_rows", "max_pending")],
    ]

    @classmethod
    def of(cls, rows: RecurrentRows, num_rows: int, max_pending: int) -> RowsArgs:
        """Return the rows of a call; the caller holds `rows`."""
        parts = (rows.first_L1, rows.state_L, rows.fresh_L, rows.redo_L, rows.commit_L)
        return cls(*[address(part) for part in parts], len(rows.state_L), num_rows, max_pending)


class ConvArgs(ctypes.Structure):
    """Mirror of `struct short_conv_args`."""

    _fields_ = [
        ("rows", RowsArgs),
        *[(name, ctypes.c_void_p) for name in ("x", "tail", "pending", "weight", "bias", "out")],
        *[(name, ctypes.c_int64) for name in ("x_stride", "pending_stride", "channels", "taps")],
        *[(name, ctypes.c_int32) for name in ("act", "bf16", "out_bf16", "emits_redo")],
    ]

    def use(self, conv: ShortConv) -> None:
        """Set what is the same in every call. The convolution outlives the arguments."""
        self.weight, self.bias = address(conv.weight_TC), None if conv.bias_C is None else address(conv.bias_C)
        (self.taps, self.channels), self.act = conv.weight_TC.shape, conv.act


class MatrixArgs(ctypes.Structure):
    """Mirror of `struct matrix_recurrence_args`."""

    _fields_ = [
        ("rows", RowsArgs),
        *[(name, ctypes.c_void_p) for name in ("mixed", "control", "state", "pending", "a", "bias", "skip", "out")],
        *[(name, ctypes.c_int64) for name in ("mixed_stride", "pending_stride", "q_at", "k_at", "v_at")],
        *[(name, ctypes.c_int64) for name in ("heads", "key_heads", "keys", "values")],
        *[(name, ctypes.c_float) for name in ("dt_min", "dt_max", "q_scale", "eps")],
        ("delta", ctypes.c_int32),
    ]

    def use(self, heads: MatrixRecurrence) -> None:
        """Set what is the same in every call. The heads outlive the arguments."""
        self.a, self.bias = address(heads.a_H), address(heads.bias_H)
        self.skip = None if heads.skip_H is None else address(heads.skip_H)
        self.q_at, self.k_at, self.v_at = heads.q_at, heads.k_at, heads.v_at
        (self.heads, self.keys, self.values), self.key_heads = heads.state_shape, heads.key_heads
        (self.dt_min, self.dt_max), self.eps, self.delta = heads.dt_limits, heads.eps, heads.delta
        self.q_scale = heads.keys**-0.5 if heads.delta else 1.0


class _ScanArgs(ctypes.Structure):
    """Mirror of `struct selective_scan_args`."""

    _fields_ = [
        ("rows", RowsArgs),
        *[(name, ctypes.c_void_p) for name in ("x", "control", "state", "pending", "a", "skip", "out")],
        *[(name, ctypes.c_int64) for name in ("pending_stride", "channels", "states")],
    ]


class GatedNormArgs(ctypes.Structure):
    """Mirror of `struct gated_norm_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "gate", "weight", "out")],
        *[(name, ctypes.c_int64) for name in ("rows", "width", "gate_stride", "per", "groups")],
        ("eps", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("kind", "bf16")],
    ]


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    """A causal convolution of each channel over its last T inputs. float32, contiguous."""

    weight_TC: torch.Tensor
    """The last row is of the token itself."""
    bias_C: torch.Tensor | None = None
    act: ConvActivation = ConvActivation.NONE

    def __post_init__(self) -> None:
        taps, channels = self.weight_TC.shape
        if not 2 <= taps <= MAX_TAPS:
            raise ValueError(f"a convolution over {taps} inputs: 2 to {MAX_TAPS} are supported")
        _check_floats(self.weight_TC, (taps, channels))
        if self.bias_C is not None:
            _check_floats(self.bias_C, (channels,))

    @property
    def state_shape(self) -> tuple[int, int]:
        """The last inputs, [T - 1, C]."""
        return len(self.weight_TC) - 1, self.weight_TC.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class MatrixRecurrence:
    """A matrix [D, V] of each head: S := decay S + k d, y = q S + skip v, with dt = softplus(raw + bias), decay =
    exp(dt a). float32, contiguous.

    With `delta` (gated delta rule), q and k are normed and d = sigmoid(b) (v - decay k S); else (Mamba 2) d = dt v.
    """

    a_H: torch.Tensor
    """Negative."""
    bias_H: torch.Tensor
    keys: int
    values: int
    key_heads: int
    """Heads of queries and keys, each of which serves as many heads one after the other."""
    q_at: int
    """The column of the first query in a row of the convolution's output."""
    k_at: int
    v_at: int
    delta: bool
    skip_H: torch.Tensor | None = None
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    eps: float = 1e-6
    """Of the norms of q and k."""

    def __post_init__(self) -> None:
        heads = len(self.a_H)
        if self.keys > MAX_KEYS:
            raise ValueError(f"heads of {self.keys} keys: at most {MAX_KEYS} are supported")
        assert heads % self.key_heads == 0, (heads, self.key_heads)
        for part in (self.a_H, self.bias_H, *([] if self.skip_H is None else [self.skip_H])):
            _check_floats(part, (heads,))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[H, D, V]."""
        return len(self.a_H), self.keys, self.values

    @property
    def columns(self) -> int:
        """Columns of the convolution's output that are read."""
        of_keys = max(self.q_at, self.k_at) + self.key_heads * self.keys
        return max(of_keys, self.v_at + len(self.a_H) * self.values)

    @property
    def control_width(self) -> int:
        """Floats that control a row: dt of each head, and b of each for the delta rule."""
        return len(self.a_H) * (2 if self.delta else 1)


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveScan:
    """E states of each channel: s := exp(dt a) s + dt b x, y = sum of c s + skip x, with dt = softplus(raw). float32,
    contiguous."""

    a_EI: torch.Tensor
    """Negative."""
    skip_I: torch.Tensor

    def __post_init__(self) -> None:
        states, channels = self.a_EI.shape
        if states > MAX_SCANNED:
            raise ValueError(f"a scan with {states} states a channel: at most {MAX_SCANNED} are supported")
        _check_floats(self.a_EI, (states, channels))
        _check_floats(self.skip_I, (channels,))

    @property
    def state_shape(self) -> tuple[int, int]:
        """[E, I]."""
        return self.a_EI.shape[0], self.a_EI.shape[1]

    @property
    def control_width(self) -> int:
        """Floats that control a row: dt of each channel, b, c."""
        return self.a_EI.shape[1] + 2 * len(self.a_EI)

    @property
    def pending_width(self) -> int:
        """The same without c, which no state depends on."""
        return self.a_EI.shape[1] + len(self.a_EI)


def short_conv(
    conv: ShortConv,
    x_NC: torch.Tensor,
    rows: RecurrentRows,
    tail_STC: torch.Tensor,
    pending_SRW: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    emits_redo: bool = False,
) -> torch.Tensor:
    """Return the convolution of each row, contiguous: [N, C], or with `emits_redo` [M, C].

    `x_NC` bfloat16 or float32; its rows may be strided. Of a pending row, the first C floats are saved.
    """
    check_conv(conv, x_NC, tail_STC, pending_SRW)
    assert x_NC.dtype in _DTYPES, x_NC.dtype
    assert out_dtype in _DTYPES, out_dtype
    C = conv.state_shape[1]
    N, (_, R, W) = len(x_NC), pending_SRW.shape
    out = torch.empty(N + (len(rows.state_L) * R if emits_redo else 0), C, dtype=out_dtype)
    args = ConvArgs(RowsArgs.of(rows, N, R), address(x_NC), address(tail_STC), address(pending_SRW))
    args.use(conv)
    args.out, args.x_stride, args.pending_stride = address(out), x_NC.stride(0), W
    args.bf16, args.out_bf16 = x_NC.dtype == torch.bfloat16, out_dtype == torch.bfloat16
    args.emits_redo = emits_redo
    native().lockstep_short_conv(ctypes.byref(args))
    return out


def matrix_recurrence(
    heads: MatrixRecurrence,
    mixed_MC: torch.Tensor,
    control_NJ: torch.Tensor,
    rows: RecurrentRows,
    state_SHDV: torch.Tensor,
    pending_SRW: torch.Tensor,
    *,
    saved_at: int,
) -> torch.Tensor:
    """Return the output of each row, [N, H * V] float32.

    `mixed_MC` is the output of a convolution that emits the rows which are taken again. `control_NJ`: dt of each head
    before its bias, then b of each for the delta rule; it is saved at the column `saved_at` of a pending row. float32,
    contiguous.
    """
    check_matrix(heads, mixed_MC, control_NJ, rows, state_SHDV, pending_SRW, saved_at)
    H, _, V = heads.state_shape
    N, (_, R, W) = len(control_NJ), pending_SRW.shape
    out = torch.empty(N, H * V)
    args = MatrixArgs(RowsArgs.of(rows, N, R), address(mixed_MC), address(control_NJ), address(state_SHDV))
    args.use(heads)
    args.pending, args.out = address(pending_SRW) + 4 * saved_at, address(out)
    args.mixed_stride, args.pending_stride = mixed_MC.shape[1], W
    native().lockstep_matrix_recurrence(ctypes.byref(args))
    return out


def selective_scan(
    scan: SelectiveScan,
    x_MI: torch.Tensor,
    control_NJ: torch.Tensor,
    rows: RecurrentRows,
    state_SEI: torch.Tensor,
    pending_SRW: torch.Tensor,
    *,
    saved_at: int,
) -> torch.Tensor:
    """Return the output of each row, [N, I] float32.

    `x_MI` is the output of a convolution that emits the rows which are taken again. `control_NJ`: dt of each channel
    before its softplus, then b, then c; dt and b are saved at the column `saved_at` of a pending row. float32,
    contiguous.
    """
    E, I = scan.state_shape  # noqa: E741
    check_scan(scan, x_MI, control_NJ, rows, state_SEI, pending_SRW, saved_at)
    N, (_, R, W) = len(control_NJ), pending_SRW.shape
    out = torch.empty(N, I)
    args = _ScanArgs(
        RowsArgs.of(rows, N, R),
        *[address(part) for part in (x_MI, control_NJ, state_SEI)],
        address(pending_SRW) + 4 * saved_at,
        *[address(part) for part in (scan.a_EI, scan.skip_I, out)],
        *(W, I, E),
    )
    native().lockstep_selective_scan(ctypes.byref(args))
    return out


def gated_norm(
    x_NV: torch.Tensor,
    gate_PG: torch.Tensor,
    weight_V: torch.Tensor | None,
    kind: Gate,
    *,
    eps: float = 0.0,
    groups: int = 1,
) -> torch.Tensor:
    """Return the gated, normed rows, [N, V] contiguous in the gate's dtype.

    `x_NV` float32, contiguous. A row of the gate has the gates of N / P rows one after the other, and may be strided.
    Each of the `groups` of a row has a norm of its own. `weight_V` float32; None: `kind` is Gate.ONLY.
    """
    check_gated_norm(x_NV, gate_PG, weight_V, kind, groups)
    assert gate_PG.dtype in _DTYPES, gate_PG.dtype
    (N, V), P = x_NV.shape, len(gate_PG)
    out_NV = torch.empty(N, V, dtype=gate_PG.dtype)
    args = GatedNormArgs(
        address(x_NV),
        address(gate_PG),
        None if weight_V is None else address(weight_V),
        address(out_NV),
        *(N, V, gate_PG.stride(0), N // max(P, 1), groups),
        eps,
        kind,
        gate_PG.dtype == torch.bfloat16,
    )
    native().lockstep_gated_norm(ctypes.byref(args))
    return out_NV


def check_conv(conv: ShortConv, x_NC: torch.Tensor, tail_STC: torch.Tensor, pending_SRW: torch.Tensor) -> None:
    """Assert what `short_conv` takes on every device."""
    assert x_NC.shape[1] == conv.state_shape[1], x_NC.shape
    assert x_NC.stride(1) == 1, x_NC.stride()
    check_conv_memory(conv, tail_STC, pending_SRW)


def check_conv_memory(conv: ShortConv, tail_STC: torch.Tensor, pending_SRW: torch.Tensor) -> None:
    """Assert the shapes of a convolution's memory."""
    T, C = conv.weight_TC.shape
    S, R, W = pending_SRW.shape
    _check_floats(tail_STC, (S, T - 1, C))
    _check_floats(pending_SRW, (S, R, W))
    assert C <= W, (C, W)


def check_matrix(
    heads: MatrixRecurrence,
    mixed_MC: torch.Tensor,
    control_NJ: torch.Tensor,
    rows: RecurrentRows,
    state_SHDV: torch.Tensor,
    pending_SRW: torch.Tensor,
    saved_at: int,
) -> None:
    """Assert what `matrix_recurrence` takes on every device."""
    N, R = len(control_NJ), pending_SRW.shape[1]
    _check_floats(mixed_MC, (len(rows.state_L) * R + N, mixed_MC.shape[1]))
    _check_floats(control_NJ, (N, heads.control_width))
    check_matrix_memory(heads, state_SHDV, pending_SRW, saved_at)
    assert heads.columns <= mixed_MC.shape[1], mixed_MC.shape


def check_matrix_memory(
    heads: MatrixRecurrence, state_SHDV: torch.Tensor, pending_SRW: torch.Tensor, saved_at: int
) -> None:
    """Assert the shapes of the memory of matrices."""
    S, R, W = pending_SRW.shape
    _check_floats(state_SHDV, (S, *heads.state_shape))
    _check_floats(pending_SRW, (S, R, W))
    assert saved_at + heads.control_width <= W, (saved_at, W)


def check_scan(
    scan: SelectiveScan,
    x_MI: torch.Tensor,
    control_NJ: torch.Tensor,
    rows: RecurrentRows,
    state_SEI: torch.Tensor,
    pending_SRW: torch.Tensor,
    saved_at: int,
) -> None:
    """Assert what `selective_scan` takes on every device."""
    E, I = scan.state_shape  # noqa: E741
    N, S, R, W = len(control_NJ), *pending_SRW.shape
    _check_floats(x_MI, (len(rows.state_L) * R + N, I))
    _check_floats(control_NJ, (N, scan.control_width))
    _check_floats(state_SEI, (S, E, I))
    _check_floats(pending_SRW, (S, R, W))
    assert saved_at + scan.pending_width <= W, (saved_at, W)


def check_gated_norm(
    x_NV: torch.Tensor, gate_PG: torch.Tensor, weight_V: torch.Tensor | None, kind: Gate, groups: int
) -> None:
    """Assert what `gated_norm` takes on every device."""
    (N, V), P = x_NV.shape, len(gate_PG)
    _check_floats(x_NV, (N, V))
    assert gate_PG.stride(1) == 1, gate_PG.stride()
    assert P * gate_PG.shape[1] == N * V, (gate_PG.shape, x_NV.shape)
    assert V % groups == 0, (V, groups)
    assert (weight_V is None) == (kind is Gate.ONLY), kind
    if weight_V is not None:
        _check_floats(weight_V, (V,))


def _check_floats(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert tensor.dtype == torch.float32, tensor.dtype
    assert tensor.is_contiguous()
    assert tensor.shape == shape, (tensor.shape, shape)


class RecurrentKernels(Protocol):
    """The functions of this module, which kernels/cuda/recurrent.py has for a GPU."""

    def short_conv(
        self,
        conv: ShortConv,
        x_NC: torch.Tensor,
        rows: RecurrentRows,
        tail_STC: torch.Tensor,
        pending_SRW: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        emits_redo: bool = False,
    ) -> torch.Tensor:
        """See `short_conv`."""

    def matrix_recurrence(
        self,
        heads: MatrixRecurrence,
        mixed_MC: torch.Tensor,
        control_NJ: torch.Tensor,
        rows: RecurrentRows,
        state_SHDV: torch.Tensor,
        pending_SRW: torch.Tensor,
        *,
        saved_at: int,
    ) -> torch.Tensor:
        """See `matrix_recurrence`."""

    def selective_scan(
        self,
        scan: SelectiveScan,
        x_MI: torch.Tensor,
        control_NJ: torch.Tensor,
        rows: RecurrentRows,
        state_SEI: torch.Tensor,
        pending_SRW: torch.Tensor,
        *,
        saved_at: int,
    ) -> torch.Tensor:
        """See `selective_scan`."""

    def gated_norm(
        self,
        x_NV: torch.Tensor,
        gate_PG: torch.Tensor,
        weight_V: torch.Tensor | None,
        kind: Gate,
        *,
        eps: float = 0.0,
        groups: int = 1,
    ) -> torch.Tensor:
        """See `gated_norm`."""
