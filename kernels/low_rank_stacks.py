"""Low-rank matrices next to a model's products (LoRA) on a device: stacks of a fixed size, a place for each adapter.

A forward has the number of each sequence's adapter in a tensor, and the kernels read the matrices of that number. So a
captured graph serves every adapter, and a load writes memory instead of capturing. Invariant: no stack moves or grows
after it was allocated. Needs no Triton. Not responsible for: the products (see cuda/low_rank.py), the order of
writes and replays (see gpu_engine/step/device/adapter_copies.py).

Shapes: M adapters, Q products, P parts of a product, R the largest rank, I inputs, O outputs of a product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.low_rank import MAX_PARTS, LowRankPart

RANK_TILE = 16
"""Ranks are padded to a multiple: the least that a tensor core multiplies."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Inputs and outputs of a product, which may be several joined to one."""

    inputs: int
    widths: tuple[int, ...]
    """The outputs of each part; at most `MAX_PARTS`."""

    @property
    def outputs(self) -> int:
        """O."""
        return sum(self.widths)

    def num_elements(self, rank: int) -> int:
        """Return the elements of one adapter's matrices, padded to `rank`."""
        return rank * (len(self.widths) * self.inputs + self.outputs)


@dataclass(frozen=True, slots=True, eq=False)
class ProductStack:
    """The matrices of every adapter for one product. Adapter `number` has the entry `number - 1`."""

    shape: ProductShape
    a_MXI: torch.Tensor
    """[M, P * R, I], in the model's dtype, contiguous: rank r of part p is row p * R + r."""
    b_MX: torch.Tensor
    """[M, R * O], also: part p begins at R times its first output, as [R, outputs of the part]."""
    ranks_MP: torch.Tensor
    """int32, a view: the rank of each part, 0 without matrices."""
    scales_MP: torch.Tensor
    """float32, a view."""

    @property
    def rank(self) -> int:
        """R."""
        return self.a_MXI.shape[1] // len(self.shape.widths)


class LowRankStacks:
    """The stacks of one model, allocated once.

    Args:
        shapes: of the products, in their order.
        max_adapters: M.
        max_rank: of a part; padded to a multiple of `RANK_TILE`.
        dtype: of the model: matrices are rounded to it.
        device: of the model.
    """

    def __init__(
        self,
        shapes: Sequence[ProductShape],
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert all(1 <= len(shape.widths) <= MAX_PARTS for shape in shapes), shapes
        self.dtype, self.max_adapters, R = dtype, max_adapters, padded_rank(max_rank)
        table = (max_adapters, len(shapes), MAX_PARTS)
        self._ranks_MQP = torch.zeros(table, dtype=torch.int32, device=device)
        self._scales_MQP = torch.zeros(table, dtype=torch.float32, device=device)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.products = tuple(
            ProductStack(
                shape,
                zeros(max_adapters, len(shape.widths) * R, shape.inputs),
                zeros(max_adapters, R * shape.outputs),
                self._ranks_MQP[:, q],
                self._scales_MQP[:, q],
            )
            for q, shape in enumerate(shapes)
        )

    @staticmethod
    def num_bytes(shapes: Sequence[ProductShape], max_rank: int, dtype: torch.dtype) -> int:
        """Return the bytes of one adapter."""
        R = padded_rank(max_rank)
        return sum(dtype.itemsize * shape.num_elements(R) + 8 * MAX_PARTS for shape in shapes)

    def writes(
        self, number: int, products: Mapping[int, Sequence[LowRankPart]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (part of a stack, its new content on the CPU) for adapter `number`; both contiguous, of one dtype.

        What the adapter has no matrices for has rank 0, so nothing older is read there.
        """
        m = number - 1
        assert 0 <= m < self.max_adapters, number
        ranks_QP, scales_QP = (
            torch.zeros(len(self.products), MAX_PARTS, dtype=kind) for kind in (torch.int32, torch.float32)
        )
        for q, parts in products.items():
            stack = self.products[q]
            widths, R = stack.shape.widths, stack.rank
            begins = [0, *itertools.accumulate(widths[:-1])]
            for part in parts:
                p = begins.index(part.begin)
                r = part.rank
                assert r <= R, (r, R)
                ranks_QP[q, p], scales_QP[q, p] = r, part.scale
                yield stack.a_MXI[m, p * R : p * R + r], part.a_RI.to(self.dtype).contiguous()
                first = R * begins[p]
                b_RO = stack.b_MX[m, first : first + r * widths[p]].view(r, widths[p])
                yield b_RO, part.b_RO.to(self.dtype).contiguous()
        yield self._ranks_MQP[m], ranks_QP
        yield self._scales_MQP[m], scales_QP

    def __repr__(self) -> str:
        return f"<LowRankStacks of {self.max_adapters} adapters, {len(self.products)} products>"


def padded_rank(rank: int) -> int:
    """Return the next multiple of `RANK_TILE`."""
    return RANK_TILE * math.ceil(rank / RANK_TILE)
