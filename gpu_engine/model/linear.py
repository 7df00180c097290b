"""Linear layers with the interface of `nn.Linear`: oneDNN's prepacked products on a CPU, our kernel for few rows on a
GPU.

Packing once saves the reorder that a plain product does at every call (2x per step, measured in docs/log/).
Invariant: a row's result has the same bits for any number of rows; oneDNN guarantees that from two rows on, so one row
is doubled; on a GPU it holds up to 16 rows, in the 16-bit types. Not responsible for:
weights in blocks (see quantised/linear.py), weights of 8 bits on a GPU (see quantised/scaled.py).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_engine.model.quantised.linear import BlockLinear, joined_blocks
from gpu_engine.model.quantised.scaled import ScaledLinear, joined_scaled
from gpu_engine.model.recording import distance
from kernels.fused_arguments import Activation

log = logging.getLogger(__name__)

_ROUNDING = 1e-2
"""Largest relative distance of two products in a 16-bit type that counts as equal."""
_ROWS_HINT = 8
"""Rows that the packed layout is tuned for: a verify step of one sequence."""


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight in oneDNN's own layout. Holds no reference to the original weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().contiguous()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; [..., in_features] -> [..., out_features]."""
        if x.numel() == self.in_features:
            pair = torch.cat([x.reshape(1, -1)] * 2)
            y = self._product(pair, self.packed, self.bias, "none", [], "")
            single: torch.Tensor = y[:1].reshape(*x.shape[:-1], self.out_features)
            return single
        out: torch.Tensor = self._product(x, self.packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        """Name the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


class SkinnyLinear(nn.Module):
    """`nn.Linear` on a GPU. Shares the weight; our kernel multiplies up to 16 rows, cuBLAS more."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from kernels.cuda.fused import gated  # a CPU install has no Triton
        from kernels.cuda.skinny import MAX_ROWS, skinny_gated, skinny_linear

        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, _bias(linear)
        self._most, self._product, self._product_gated, self._gated = MAX_ROWS, skinny_linear, skinny_gated, gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; [..., in_features] -> [..., out_features]."""
        rows = x.numel() // self.in_features
        if not 0 < rows <= self._most:
            return nn.functional.linear(x, self.weight, self.bias)
        out_MN = self._product(x.reshape(rows, self.in_features), self.weight, self.bias)
        return out_MN.view(*x.shape[:-1], self.out_features)

    def gated(self, x_NK: torch.Tensor, act: Activation) -> torch.Tensor:
        """Return act(gate) * up of a product whose outputs are gate and then up: in one launch for few rows."""
        if not 0 < len(x_NK) <= self._most:
            return self._gated(self(x_NK), act)
        return self._product_gated(x_NK, self.weight, act, self.bias)

    def gates_in_one(self, act: Activation) -> bool:
        """Return whether `gated` gives the numbers of the two kernels. Each kind of matrix is compared once."""
        return _gates_agree(self.weight.shape, self.weight.dtype, self.weight.device, self.bias is not None, act)

    def gates_apart(self, x_NK: torch.Tensor, act: Activation) -> torch.Tensor:
        """Return the same from two launches."""
        return self._gated(self(x_NK), act)

    def extra_repr(self) -> str:
        """Name the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}, skinny"


def skinny(linear: nn.Linear) -> nn.Module:
    """Return the same product with our kernel for few rows, where that takes it and agrees; else `linear`."""
    weight = linear.weight
    suits = weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
    if not suits or weight.shape[1] % 8:
        return linear
    return (
        SkinnyLinear(linear) if _agrees(weight.shape, weight.dtype, weight.device, linear.bias is not None) else linear
    )


@functools.cache
def _gates_agree(shape: torch.Size, dtype: torch.dtype, device: torch.device, biased: bool, act: Activation) -> bool:
    made = SkinnyLinear(nn.Linear(shape[1], shape[0], bias=biased, device=device, dtype=dtype).requires_grad_(False))
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        far = distance(made.gated(x, act), made.gates_apart(x, act))
    except Exception as error:  # of the compiler, as above
        kind = type(error).__name__
        log.warning("products of %s and their activation are two kernels: %s: %s", tuple(shape), kind, error)
        return False
    if far > _ROUNDING:
        log.warning("products of %s and their activation are two kernels: one is %.1e away", tuple(shape), far)
    return far <= _ROUNDING


@functools.cache
def _agrees(shape: torch.Size, dtype: torch.dtype, device: torch.device, biased: bool) -> bool:
    """Compare the kernel with cuBLAS once for every kind of matrix: it is compiled for that."""
    made = nn.Linear(shape[1], shape[0], bias=biased, device=device, dtype=dtype).requires_grad_(False)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        far = distance(SkinnyLinear(made)(x), made(x))
    except Exception as error:  # of the compiler: a kernel that does not build must not end the start
        log.warning("products of %s go to cuBLAS: %s: %s", tuple(shape), type(error).__name__, error)
        return False
    if far > _ROUNDING:
        log.warning("products of %s go to cuBLAS: ours are %.1e away", tuple(shape), far)
    return far <= _ROUNDING


def thin_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of a model on a GPU in place, where `skinny` is better; return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (better := skinny(child)) is not child:
                setattr(parent, name, better)
                count += 1
    return count


def replace_conv1d(model: nn.Module) -> int:
    """Replace every `Conv1D` of GPT-2's families, an `nn.Linear` with a transposed weight, by that; return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not Conv1D:
                continue
            linear = nn.Linear(child.nx, child.nf, device="meta")
            linear.weight = nn.Parameter(child.weight.detach().T.contiguous(), requires_grad=False)
            linear.bias = nn.Parameter(child.bias.detach(), requires_grad=False)
            setattr(parent, name, linear)
            count += 1
    return count


def can_pack() -> bool:
    """Return whether torch has oneDNN's prepacked products."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


Product = nn.Linear | BlockLinear | ScaledLinear


def joined(linears: Sequence[Product]) -> nn.Module:
    """Return one product for several of the same input, outputs side by side, in the form that suits its device.

    Holds a copy of the weights. Raises ValueError when inputs or biases differ in kind.
    """
    over_blocks = [item for item in linears if isinstance(item, BlockLinear)]
    scaled = [item for item in linears if isinstance(item, ScaledLinear)]
    if len(over_blocks) not in (0, len(linears)) or len(scaled) not in (0, len(linears)):
        raise ValueError(f"products of different kinds: {list(linears)}")
    if over_blocks:
        return joined_blocks(over_blocks)
    if scaled:
        return joined_scaled(scaled)
    return _joined_floats([item for item in linears if isinstance(item, nn.Linear)])


def _joined_floats(linears: Sequence[nn.Linear]) -> nn.Module:
    first, biases = linears[0], [_bias(item) for item in linears]
    given = [bias for bias in biases if bias is not None]
    if any(item.in_features != first.in_features for item in linears) or len(given) not in (0, len(linears)):
        raise ValueError(f"products with different inputs or biases: {list(linears)}")
    if len(linears) == 1:
        whole = first
    else:
        whole = nn.Linear(first.in_features, sum(item.out_features for item in linears), device="meta")
        whole.weight = nn.Parameter(torch.cat(tuple(item.weight for item in linears)), requires_grad=False)
        bias = nn.Parameter(torch.cat(given), requires_grad=False) if given else None
        whole.register_parameter("bias", bias)
    return PackedLinear(whole) if first.weight.device.type == "cpu" and can_pack() else skinny(whole)


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return linear.bias


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of a CPU model in place; return how many. A no-op where oneDNN is not built in."""
    if not can_pack():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)
