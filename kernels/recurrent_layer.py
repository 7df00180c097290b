"""A recurrent layer of a native forward: what it computes between its first and its last product.

Invariant: as in recurrent.py, whose loops these are; everything is float32. Not responsible for: the forward (see
forward.py), the memory of states (see gpu_engine/model/recurrent/rows.py).

Shapes: N rows, S places, R pending rows at most, W floats that are saved of a row; C channels of a convolution, J
numbers that control a row, G inputs of the last product, O outputs of the first one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.blocks import BlockWeightsArgs, PackedBlocks
from kernels.library import address
from kernels.recurrent import (
    ConvArgs,
    Gate,
    GatedNormArgs,
    MatrixArgs,
    MatrixRecurrence,
    RowsArgs,
    ShortConv,
    check_conv_memory,
    check_matrix_memory,
)
from kernels.recurrent_rows import RecurrentRows


class LayerMemory(Protocol):
    """The memory of a layer's states; all of it is float32 and contiguous."""

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """[S, ...] each: the last inputs of the convolution, and the matrices where the layer has some."""

    @property
    def pending_SRW(self) -> torch.Tensor:
        """Of a pending row: the input of the convolution, then what controls the row."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedConv:
    """after * conv(before * x), where the first product gives before, after and x."""

    conv: ShortConv

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(O, C of a convolution before matrices, J, G)."""
        C = self.conv.state_shape[1]
        return 3 * C, 0, 0, C


@dataclass(frozen=True, slots=True, eq=False)
class MatrixMixer:
    """A convolution, a matrix of each head, and a gated norm of what they read."""

    conv: ShortConv
    heads: MatrixRecurrence
    gate: Gate
    norm_weight: torch.Tensor | None
    """float32, contiguous: of the width of the norm. None: `gate` is Gate.ONLY."""
    eps: float
    width: int
    """Numbers of a norm: a divisor of G."""
    groups: int
    """Parts of the width with a norm of their own."""
    x_at: int
    """The column of the convolution's first input in the outputs of the first product."""
    gate_at: int
    """The column of the gate there."""
    control_at: int
    """The column there of what controls a row; not used with `control`."""
    outputs: int
    """O."""
    control: PackedBlocks | None = None
    """The product that gives what controls a row. None: the first one does."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(O, C, J, G)."""
        H, _, V = self.heads.state_shape
        return self.outputs, self.conv.state_shape[1], self.heads.control_width, H * V

    def check(self, num_inputs: int) -> None:
        """Assert what the native code relies on; `num_inputs`: of the layer's first product."""
        O, C, J, G = self.sizes  # noqa: E741
        assert self.heads.columns <= C, (self.heads.columns, C)
        assert 0 <= self.x_at <= O - C, (self.x_at, self.sizes)
        assert 0 <= self.gate_at <= O - G, (self.gate_at, self.sizes)
        if self.control is None:
            assert 0 <= self.control_at <= O - J, (self.control_at, self.sizes)
        else:
            assert (self.control.num_inputs, self.control.num_outputs) == (num_inputs, J), self.control
        assert G % self.width == self.width % self.groups == 0, (G, self.width, self.groups)
        assert (self.norm_weight is None) == (self.gate is Gate.ONLY), self.gate
        if (weight := self.norm_weight) is not None:
            assert weight.shape == (self.width,), weight.shape
            assert weight.dtype == torch.float32, weight.dtype
            assert weight.is_contiguous()


Mixer = GatedConv | MatrixMixer


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """output(mixer(first(x)))."""

    first: PackedBlocks
    mixer: Mixer
    output: PackedBlocks

    def check(self, hidden: int) -> None:
        """Assert what the native code relies on; `hidden`: of the model."""
        outputs, _, _, read = self.mixer.sizes
        if isinstance(self.mixer, MatrixMixer):
            self.mixer.check(hidden)
        shapes = [(part.num_inputs, part.num_outputs) for part in (self.first, self.output)]
        assert shapes == [(hidden, outputs), (read, hidden)], shapes


class RecurrentLayerArgs(ctypes.Structure):
    """Mirror of `struct recurrent_layer`."""

    _fields_ = [
        *[(name, BlockWeightsArgs) for name in ("first", "output")],
        ("conv", ConvArgs),
        ("matrix", MatrixArgs),
        ("norm", GatedNormArgs),
        ("control", BlockWeightsArgs),
        *[(name, ctypes.c_int64) for name in ("x_at", "gate_at", "control_at")],
        ("kind", ctypes.c_int32),
    ]

    @classmethod
    def of(cls, recurrence: Recurrence) -> RecurrentLayerArgs:
        """Return the arguments that no call changes. The recurrence outlives them."""
        args, mixer = cls(recurrence.first.args, recurrence.output.args), recurrence.mixer
        args.conv.use(mixer.conv)
        if isinstance(mixer, MatrixMixer):
            args.kind = 1
            args.conv.emits_redo = True
            args.matrix.use(mixer.heads)
            args.x_at, args.gate_at, args.control_at = mixer.x_at, mixer.gate_at, mixer.control_at
            if mixer.control is not None:
                args.control = mixer.control.args
            norm = args.norm
            norm.weight = None if mixer.norm_weight is None else address(mixer.norm_weight)
            norm.width, norm.groups, norm.eps, norm.kind = mixer.width, mixer.groups, mixer.eps, mixer.gate
        return args

    def use_memory(self, mixer: Mixer, memory: LayerMemory) -> None:
        """Point the arguments at the memory of the layer's states, which outlives them."""
        pending = memory.pending_SRW
        check_conv_memory(mixer.conv, memory.states[0], pending)
        self.conv.tail, self.conv.pending = address(memory.states[0]), address(pending)
        self.conv.pending_stride = self.matrix.pending_stride = pending.shape[2]
        if isinstance(mixer, MatrixMixer):
            saved_at = mixer.conv.state_shape[1]
            check_matrix_memory(mixer.heads, memory.states[1], pending, saved_at)
            self.matrix.state, self.matrix.pending = address(memory.states[1]), address(pending) + 4 * saved_at


class RecurrentSizesArgs(ctypes.Structure):
    """Mirror of `struct recurrent_sizes`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("projected", "mixed", "control", "read", "beside")]


class RecurrentLayers:
    """The recurrent layers of a forward, whose sizes are equal.

    Args:
        recurrences: in the order of the layers.
    """

    def __init__(self, recurrences: Sequence[Recurrence]) -> None:
        self._mixers = mixers = tuple(each.mixer for each in recurrences)
        self._args = [RecurrentLayerArgs.of(each) for each in recurrences]
        self._memory: Sequence[LayerMemory] | None = None
        self._rows: RecurrentRows | None = None
        """The last call's, held so that its tensors keep their addresses."""
        self.max_pending = 0
        assert len({mixer.sizes for mixer in mixers}) <= 1, [mixer.sizes for mixer in mixers]
        self.sizes = mixers[0].sizes if mixers else (0, 0, 0, 0)
        assert all(size % 16 == 0 for size in self.sizes[3:]), self.sizes

    def address_of(self, number: int) -> int:
        """Return where the arguments of one of these layers are."""
        return ctypes.addressof(self._args[number])

    def use(self, memory: Sequence[LayerMemory], rows: RecurrentRows, num_rows: int) -> RowsArgs:
        """Point the layers at their memory, unless it is that of the last call; return the lanes of a call."""
        assert len(memory) == len(self._args), (len(memory), len(self._args))
        if memory is not self._memory:
            for args, mixer, own in zip(self._args, self._mixers, memory, strict=True):
                args.use_memory(mixer, own)
            (self.max_pending,) = {own.pending_SRW.shape[1] for own in memory}
            self._memory = memory
        self._rows = rows
        return RowsArgs.of(rows, num_rows, self.max_pending)

    def __repr__(self) -> str:
        return f"<RecurrentLayers: {len(self._args)} of {self.sizes[0]} outputs>"
