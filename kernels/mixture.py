"""Mixtures of experts over block-quantised weights in one native call, on a CPU.

Invariant: a row depends only on itself, bit for bit, whatever else is in the call. The weights of an expert are read
once for all rows that chose it, and only if one did. Not responsible for: the choice of experts, which is the model's
own router's, or that of a whole native forward (see forward.py).

Shapes: N rows, H hidden size, I inner size of an expert, E experts, k experts of a row.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.blocks import BLOCK, BlockWeightsArgs, PackedBlocks
from kernels.fused_arguments import Activation
from kernels.library import native


@dataclass(frozen=True, slots=True, eq=False)
class GatedBlock:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) with an activation that has no gate."""

    gate_up: PackedBlocks
    """The gate's outputs, if there is one, then those of up."""
    down: PackedBlocks


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What a row makes of its router's outputs: the experts with the highest shares, and their weights.

    Source: see kernels/native/experts.h.
    """

    chosen: int
    """Experts of a row."""
    renormalises: bool
    """The weights of the chosen ones are divided by their sum."""
    of_sigmoid: bool = False
    """Shares are the sigmoid of the outputs, and not their softmax."""
    correction_E: torch.Tensor | None = None
    """float32, contiguous: added to the shares for the choice, not to weights; None: there is no correction."""
    scale: float = 1.0
    """Multiplies the weights."""
    scales_E: torch.Tensor | None = None
    """float32, contiguous: multiplies the weights of each expert; None: nothing does."""
    groups: int = 1
    """Groups of experts with neighbouring numbers; 1: there are none."""
    kept: int = 1
    """The groups from which a row takes experts: the highest ones."""
    by_two: bool = False
    """A group counts as much as its two highest experts together, and not as its highest."""

    def __call__(self, outputs_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights, float32 [N, k], and the experts, int64 [N, k], in the order of the choice."""
        shares_NE = outputs_NE.float().sigmoid() if self.of_sigmoid else outputs_NE.float().softmax(-1)
        keys_NE = shares_NE if self.correction_E is None else shares_NE + self.correction_E
        if self.groups > 1:
            keys_NGe = keys_NE.unflatten(1, (self.groups, -1))
            kept_Nn = keys_NGe.topk(1 + self.by_two).values.sum(-1).topk(self.kept).indices
            barred_NG = torch.ones(keys_NGe.shape[:2], dtype=torch.bool).scatter(1, kept_Nn, False)
            keys_NE = keys_NGe.masked_fill(barred_NG[..., None], float("-inf")).flatten(1)
        chosen_Nk = keys_NE.topk(self.chosen).indices
        weights_Nk = shares_NE.gather(1, chosen_Nk)
        if self.renormalises:
            weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
        scales = self.scale if self.scales_E is None else self.scale * self.scales_E[chosen_Nk]
        return weights_Nk * scales, chosen_Nk


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The weighted sum of a row's experts, and of one that every row takes; see kernels/native/experts.h."""

    experts: tuple[GatedBlock, ...]
    router_EH: torch.Tensor
    """bfloat16 or float32, contiguous."""
    choice: Choice
    router_bias_E: torch.Tensor | None = None
    """float32, contiguous; None: the router has none."""
    shared: GatedBlock | None = None
    """The expert that every row takes, which may have another inner size; None: there is none."""
    shared_gate_H: torch.Tensor | None = None
    """float32, contiguous: the weight of the shared expert is the sigmoid of its product with a row; None: it is 1."""


MOST_GROUPS = 64
"""Of experts."""


def check_blocks(blocks: Sequence[GatedBlock], H: int, act: Activation) -> None:
    """Assert that blocks have the same shapes, and the native code's."""
    for block in blocks:
        inner = blocks[0].down.num_inputs
        assert inner % BLOCK == 0, inner
        shapes = [(part.num_inputs, part.num_outputs) for part in (block.gate_up, block.down)]
        assert shapes == [(H, inner * (1 + act.has_gate)), (inner, H)], shapes


def _weights_of(experts: Sequence[GatedBlock]) -> tuple[ctypes.Array[BlockWeightsArgs], ...]:
    """Return the products gate_up of all experts, and their products down. The experts outlive them."""
    of_experts = BlockWeightsArgs * len(experts)
    return tuple(of_experts(*(getattr(each, name).args for each in experts)) for name in ("gate_up", "down"))


class RoutedArgs(ctypes.Structure):
    """Mirror of `struct mixture`."""

    _fields_ = [
        *[(name, ctypes.POINTER(BlockWeightsArgs)) for name in ("gate_up", "down")],
        *[(name, ctypes.c_void_p) for name in ("router", "router_bias", "correction", "scales", "shared_gate")],
        ("scale", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("of_sigmoid", "renormalises", "router_bf16")],
        *[(name, ctypes.c_int32) for name in ("groups", "kept", "by_two")],
    ]

    @classmethod
    def of(cls, mixture: Mixture) -> RoutedArgs:
        """Return the arguments; the mixture outlives them."""
        choice, router_EH = mixture.choice, mixture.router_EH
        vectors = (mixture.router_bias_E, choice.correction_E, choice.scales_E, mixture.shared_gate_H)
        addresses = (None if vector is None else vector.data_ptr() for vector in vectors)
        numbers = (choice.scale, choice.of_sigmoid, choice.renormalises, router_EH.dtype == torch.bfloat16)
        groups = (choice.groups, choice.kept, choice.by_two)
        return cls(*_weights_of(mixture.experts), router_EH.data_ptr(), *addresses, *numbers, *groups)


class _MixtureArgs(ctypes.Structure):
    """Mirror of `struct mixture_args`."""

    _fields_ = [
        *[(name, ctypes.POINTER(BlockWeightsArgs)) for name in ("gate_up", "down")],
        *[(name, ctypes.c_void_p) for name in ("x", "out", "experts", "weights", "scratch")],
        *[(name, ctypes.c_int64) for name in ("num_experts", "chosen", "inner", "has_shared", "rows", "hidden")],
        *[(name, ctypes.c_int32) for name in ("act", "bf16")],
    ]


class Scratch:
    """Memory of one native call at a time, which the mixtures of a model share. It only grows, up to that of some
    hundred rows: the call computes its rows in parts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the call that uses the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, num_bytes: int) -> int:
        """Return the address of so many bytes, on a 64-byte boundary, until the next call."""
        if self._memory.numel() < num_bytes + 64:
            self._memory = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return (self._memory.data_ptr() + 63) // 64 * 64


class MixtureProducts:
    """The experts of one mixture, for rows whose experts are chosen. For any thread, one at a time.

    Args:
        experts: blocks of equal shapes.
        act: between an expert's products.
        scratch: shared with other mixtures.
    """

    def __init__(self, experts: Sequence[GatedBlock], act: Activation, scratch: Scratch) -> None:
        self._experts, self._hidden = tuple(experts), experts[0].gate_up.num_inputs
        check_blocks(experts, self._hidden, act)
        self._args = _MixtureArgs(*_weights_of(self._experts), act=act)
        self._args.num_experts, self._args.hidden = len(experts), self._hidden
        self._args.inner = experts[0].down.num_inputs
        self._scratch = scratch

    def __call__(self, x_NH: torch.Tensor, chosen_Nk: torch.Tensor, weights_Nk: torch.Tensor) -> torch.Tensor | None:
        """Return the weighted sum of each row's experts in the order of its choice, [N, H]; None where a number in
        `chosen_Nk` is no expert's.

        `x_NH` is contiguous, in bfloat16 or float32, and so is the result. `chosen_Nk` has integers, `weights_Nk`
        floats.
        """
        assert x_NH.dtype in (torch.bfloat16, torch.float32), x_NH.dtype
        assert x_NH.device.type == "cpu", x_NH.device
        assert x_NH.is_contiguous()
        assert x_NH.shape[1] == self._hidden, x_NH.shape
        assert chosen_Nk.shape == weights_Nk.shape == (len(x_NH), chosen_Nk.shape[1]), chosen_Nk.shape
        chosen_Nk, weights_Nk = chosen_Nk.to(torch.int32).contiguous(), weights_Nk.float().contiguous()
        out_NH = torch.empty_like(x_NH)
        with self._scratch.lock:
            args, library = self._args, native()
            args.rows, args.chosen, args.bf16 = *chosen_Nk.shape, x_NH.dtype == torch.bfloat16
            args.x, args.out = x_NH.data_ptr(), out_NH.data_ptr()
            args.experts, args.weights = chosen_Nk.data_ptr(), weights_Nk.data_ptr()
            library.lockstep_mixture_scratch.restype = ctypes.c_int64
            args.scratch = self._scratch.of(library.lockstep_mixture_scratch(ctypes.byref(args)))
            return out_NH if library.lockstep_mixture(ctypes.byref(args)) else None

    def __repr__(self) -> str:
        return f"<MixtureProducts of {len(self._experts)} experts, hidden {self._hidden}>"
