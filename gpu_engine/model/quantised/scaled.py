"""Linear layers over weights of 8 bits with a scale for each output: torch's scaled products, for a GPU.

The inputs get a scale for each row as they come (dynamic, per token). FP8 is `torch._scaled_mm`, which sums in fp32;
int8 is `torch._int_mm`, whose sums are exact. Invariant: a row's result has the same bits for any number of rows up to
16, and with int8 for any number at all. No product is used before
it was compared with its matrix. Not responsible for: which products are replaced (see choice.py), the kernels around a
product (see kernels/cuda/scaled.py).

Shapes: M rows, L rows with padding, K inputs, N outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from gpu_engine.model.quantised.matrices import ScaledRows
from gpu_engine.model.recording import distance

log = logging.getLogger(__name__)

_STEP = 16
"""Rows are padded to a multiple, so that up to 16 rows are one shape of a product: torch chooses a kernel by shape.
Inputs and outputs must be multiples of it as well."""
_KERNEL = 6e-2
"""Largest relative distance of a product that inputs of 8 bits explain."""


class _Numbers(NamedTuple):
    dtype: torch.dtype
    most: float
    """The largest number."""
    capability: tuple[int, int]
    """The least compute capability of a device that multiplies it."""
    least_rows: int


class ScaledKind(Enum):
    """A type of weights and of inputs. The value is that of the setting `quantization`."""

    INT8 = "int8"
    FP8 = "fp8"

    @property
    def numbers(self) -> _Numbers:
        """`_int_mm` takes more than 16 rows on a GPU."""
        if self is ScaledKind.INT8:
            return _Numbers(torch.int8, 127.0, (8, 0), 2 * _STEP)
        return _Numbers(torch.float8_e4m3fn, 448.0, (8, 9), _STEP)

    @classmethod
    def of(cls, rows: ScaledRows) -> ScaledKind:
        """Return the kind of a matrix."""
        return next(kind for kind in cls if kind.numbers.dtype == rows.values_NK.dtype)


def why_not_scaled(
    kind: ScaledKind,
    device: torch.device,
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
) -> str | None:
    """Return why a CUDA device does not multiply the kind, or None where it does. Tries a small product."""
    least, have = kind.numbers.capability, capability_of(device)
    if have < least:
        need = f"{kind.value} needs a GPU of compute capability {least[0]}.{least[1]}"
        return f"{need}, and {device} has {have[0]}.{have[1]}"
    x = torch.eye(2 * _STEP, dtype=torch.bfloat16, device=device)
    try:
        ScaledLinear(rounded_rows(x, kind), None)(x)
    except RuntimeError as error:
        return f"{kind.value} products fail on {device}: {str(error).splitlines()[0]}"
    return None


class ScaledLinear(nn.Module):
    """`nn.Linear` over rows of 8 bits, on the device of `rows`.

    Args:
        rows: the matrix, [out_features, in_features].
        bias: [out_features] or None.
    """

    values_NK: torch.Tensor
    scales_1N: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, rows: ScaledRows, bias: torch.Tensor | None) -> None:
        super().__init__()
        from kernels.cuda.scaled import quantise_rows, rescale  # a CPU install has no Triton

        self.out_features, self.in_features = rows.values_NK.shape
        self.kind = ScaledKind.of(rows)
        self.register_buffer("values_NK", rows.values_NK.contiguous(), persistent=False)
        self.register_buffer("scales_1N", rows.scales_N.float().reshape(1, -1).contiguous(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self._quantise_rows, self._rescale = quantise_rows, rescale

    @property
    def rows(self) -> ScaledRows:
        """The matrix."""
        return ScaledRows(self.values_NK, self.scales_1N[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; [..., in_features] -> [..., out_features], in the type of x."""
        x_MK = x.reshape(-1, self.in_features)
        M, (dtype, _, _, least_rows) = len(x_MK), self.kind.numbers
        if M == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        values_LK, scales_L1 = self._quantise_rows(x_MK, dtype, max(least_rows, -(-M // _STEP) * _STEP))
        weight_KN = self.values_NK.t()
        if self.kind is ScaledKind.INT8:
            sums_LN = torch._int_mm(values_LK, weight_KN)
            out_MN = self._rescale(sums_LN, scales_L1, self.scales_1N[0], self.bias, M, x.dtype)
        else:
            scales = (scales_L1, self.scales_1N)
            out_MN = torch._scaled_mm(values_LK, weight_KN, *scales, bias=self.bias, out_dtype=x.dtype)[:M]
        return out_MN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Name the shape and the kind."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind.value}"


def joined_scaled(products: Sequence[ScaledLinear]) -> ScaledLinear:
    """Return one product for several of the same input, outputs side by side.

    Raises ValueError when they differ in kind, or only some have a bias.
    """
    first, biases = products[0], [product.bias for product in products if product.bias is not None]
    if len(products) == 1:
        return first
    if len(biases) not in (0, len(products)) or any(
        (item.in_features, item.kind) != (first.in_features, first.kind) for item in products
    ):
        raise ValueError(f"products with different inputs, kinds or biases: {list(products)}")
    bytes_NK = torch.cat([item.values_NK.view(torch.uint8) for item in products])
    scales_N = torch.cat([item.scales_1N[0] for item in products])
    rows = ScaledRows(bytes_NK.view(first.values_NK.dtype), scales_N)
    return ScaledLinear(rows, torch.cat(biases) if biases else None)


def rounded_rows(weight_NK: torch.Tensor, kind: ScaledKind) -> ScaledRows:
    """Round a weight to nearest, with the largest magnitude of each output as the largest number."""
    dtype, most, _, _ = kind.numbers
    wide_NK = weight_NK.float()
    peaks_N = wide_NK.abs().amax(1)
    scales_N = torch.where(peaks_N > 0, peaks_N / most, torch.ones_like(peaks_N))
    values_NK = wide_NK / scales_N[:, None]
    if kind is ScaledKind.INT8:
        values_NK = values_NK.round()
    return ScaledRows(values_NK.clamp(-most, most).to(dtype), scales_N)


RowsOf = Callable[[str, nn.Linear], ScaledRows | None]
"""Returns the matrix of a product of that name in the model; None: the product stays as it is."""


def scale_linears(model: nn.Module, rows_of: RowsOf, device: torch.device) -> int:
    """Replace products of a model by scaled ones on `device`, in place; return how many.

    A product whose inputs or outputs are no multiples of 16 stays, and the log names it. Raises RuntimeError when a
    product differs from its matrix by more than the rounding of its inputs.
    """
    count = 0
    for prefix, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            path = f"{prefix}.{name}" if prefix else name
            if type(child) is not nn.Linear:
                continue
            rows = rows_of(path, child)
            if rows is None:
                continue
            if child.in_features % _STEP or child.out_features % _STEP:
                sizes = (child.in_features, child.out_features)
                log.info("not quantised: %s has %d inputs and %d outputs, no multiples of %d", path, *sizes, _STEP)
                continue
            bias = None if child.bias is None else child.bias.to(device)
            setattr(parent, name, _checked(path, ScaledLinear(rows.to(device), bias), child.weight.dtype))
            count += 1
    return count


def _checked(path: str, product: ScaledLinear, dtype: torch.dtype) -> ScaledLinear:
    device = product.values_NK.device
    x_MK = torch.randn(3, product.in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    bias = None if product.bias is None else product.bias.float()
    want = nn.functional.linear(x_MK.float(), product.rows.dequantised(), bias)
    far = distance(product(x_MK), want)
    if far > _KERNEL:
        raise RuntimeError(f"the {product.kind.value} product of {path} is {far:.1e} away from its matrix")
    return product
