"""Quantised matrices of a checkpoint as values: integers in groups, or 8-bit floats under scales.

Invariant: `dequantised` is the weight that the checkpoint states, in fp32; `blocks` gives the same weight, up to half
precision's rounding of scales and offsets, or raises, and `rows` gives it exactly, or raises. Not responsible for: the
order of bits in a file (see layouts.py), products (see kernels/blocks.py, scaled.py).

Shapes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.blocks import BLOCK, BlockKind, Blocks

_HALF = 2.0**-11
"""Half precision's relative rounding."""


class NoBlocks(Exception):
    """A matrix does not fit the blocks of the products; the message says why, without the matrix's name."""


class NoScaledRows(Exception):
    """A matrix does not have exactly one scale for each output; the message says why, without the matrix's name."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledRows:
    """weight = values * scale, with a scale for each output, for products of a GPU."""

    values_NK: torch.Tensor
    """int8 or float8_e4m3fn."""
    scales_N: torch.Tensor
    """float32."""

    def dequantised(self) -> torch.Tensor:
        """Return the weight, float32 [N, K]."""
        return self.values_NK.float() * self.scales_N[:, None]

    def to(self, device: torch.device) -> ScaledRows:
        """Return the same on a device."""
        return ScaledRows(self.values_NK.to(device), self.scales_N.to(device))


class Matrix(Protocol):
    """One quantised matrix."""

    @property
    def kind(self) -> str:
        """A few words for the log, such as "4 bits"."""

    def dequantised(self) -> torch.Tensor:
        """Return the weight, float32 [N, K]."""

    def blocks(self) -> Blocks:
        """Return the same weight in blocks of 32 inputs. Raises NoBlocks."""

    def rows(self) -> ScaledRows:
        """Return the same weight with a scale for each output. Raises NoScaledRows."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedIntegers:
    """weight[n, k] = scales[n, g] * (quants[n, k] - zeros[n, g]), where g is the group of the input k."""

    bits: int
    """4 or 8."""
    quants_NK: torch.Tensor
    """uint8, 0 to 15, with 4 bits; int8 with 8."""
    scales_NG: torch.Tensor
    """Any float type."""
    zeros_NG: torch.Tensor
    """int16, in the range of the quants."""
    groups_K: torch.Tensor | None = None
    """int64, the group of each input; None: K / G neighbours are a group."""

    @property
    def kind(self) -> str:
        """The bits."""
        return f"{self.bits} bits"

    def dequantised(self) -> torch.Tensor:
        """Return the weight, float32 [N, K]."""
        weight_NK, scales_NG = self.quants_NK.float(), self.scales_NG.float()
        if self.groups_K is not None:
            weight_NK -= self.zeros_NG[:, self.groups_K]
            weight_NK *= scales_NG[:, self.groups_K]
            return weight_NK
        (N, K), G = weight_NK.shape, scales_NG.shape[1]
        weight_NGk = weight_NK.view(N, G, K // G)
        weight_NGk -= self.zeros_NG[..., None]
        weight_NGk *= scales_NG[..., None]
        return weight_NK

    def blocks(self) -> Blocks:
        """Return the same weight in blocks of 32 inputs: a group's scale is repeated in each of its blocks.

        Half precision rounds scales that are not half precision, and offsets, products of a scale and a zero point.
        Either error is far below a step of the integers. Raises NoBlocks.
        """
        if self.groups_K is not None:
            raise NoBlocks("its groups are not of neighbouring inputs (desc_act)")
        size = self.quants_NK.shape[1] // self.scales_NG.shape[1]
        if size % BLOCK:
            raise NoBlocks(f"its groups of {size} inputs are no whole blocks of {BLOCK}")
        scales_NG = self.scales_NG.float()
        halves_NG = scales_NG.half()
        # A scale below half precision's range may be rounded by more than its own share: its weights are small.
        if not float((halves_NG.float() - scales_NG).abs().max()) <= _HALF * float(scales_NG.abs().max()):
            raise NoBlocks("its scales do not fit half precision")
        offsets_NG = None
        if self.bits == 4 or bool(self.zeros_NG.any()):
            offsets_NG = (-scales_NG * self.zeros_NG).half()
            if not bool(offsets_NG.isfinite().all()):
                raise NoBlocks("its offsets do not fit half precision")
            if self.bits == 4 and torch.equal(offsets_NG, halves_NG * -BlockKind.Q4.middle(offsets=False)):
                offsets_NG = None
        kind = BlockKind.Q4 if self.bits == 4 else BlockKind.Q8
        scales_NB, offsets_NB = (
            None if part_NG is None else part_NG.repeat_interleave(size // BLOCK, dim=1)
            for part_NG in (halves_NG, offsets_NG)
        )
        assert scales_NB is not None
        return Blocks(kind, self.quants_NK, scales_NB, offsets_NB)

    def rows(self) -> ScaledRows:
        """Return 8-bit integers of one group for each output, without zero points. Raises NoScaledRows."""
        if self.bits != 8:
            raise NoScaledRows(f"its integers have {self.bits} bits")
        if self.groups_K is not None or self.scales_NG.shape[1] > 1:
            raise NoScaledRows("its outputs have several scales")
        if bool(self.zeros_NG.any()):
            raise NoScaledRows("it has zero points")
        return ScaledRows(self.quants_NK, self.scales_NG[:, 0].float())


@dataclass(frozen=True, slots=True, eq=False)
class ScaledFloats:
    """weight = floats * scale, with a scale for each tile of the matrix."""

    floats_NK: torch.Tensor
    """A float type of 8 bits."""
    scales: torch.Tensor
    """Any float type, [ceil(N / rows), ceil(K / columns)]."""
    tile: tuple[int, int]
    """(rows, columns)."""

    @property
    def kind(self) -> str:
        """FP8."""
        return "FP8"

    def dequantised(self) -> torch.Tensor:
        """Return the weight, float32 [N, K]."""
        (N, K), (rows, columns) = self.floats_NK.shape, self.tile
        rows_NC = self.scales.float().repeat_interleave(min(rows, N), dim=0)[:N]
        return self.floats_NK.float() * rows_NC.repeat_interleave(min(columns, K), dim=1)[:, :K]

    def blocks(self) -> Blocks:
        """Raise NoBlocks: a float of 8 bits is no multiple of one scale."""
        raise NoBlocks("FP8 has no product on a CPU")

    def rows(self) -> ScaledRows:
        """Return the same floats of type e4m3, where a tile has all inputs of an output. Raises NoScaledRows."""
        if self.floats_NK.dtype is not torch.float8_e4m3fn:
            raise NoScaledRows("its floats are e5m2")
        (N, K), (rows, columns) = self.floats_NK.shape, self.tile
        if columns < K:
            raise NoScaledRows("its outputs have several scales")
        return ScaledRows(self.floats_NK, self.scales[:, 0].float().repeat_interleave(min(rows, N))[:N])


def tiles(shape: tuple[int, int], tile: tuple[int, int]) -> tuple[int, int]:
    """Return how many tiles, the last of them perhaps smaller, cover a matrix."""
    return math.ceil(shape[0] / tile[0]), math.ceil(shape[1] / tile[1])
