"""Linear layers over weights in blocks: the replacement of every `nn.Linear` of a model on a CPU.

Invariant: no product is used before it was compared with the one that it replaces. Not responsible for: where blocks
come from (see gguf_blocks.py), products that are joined (see model/linear.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

import torch
from torch import nn

from gpu_engine.model.recording import distance
from kernels.blocks import BLOCK, Blocks, PackedBlocks

log = logging.getLogger(__name__)

_KERNEL = 2e-2
"""Largest relative distance of a product that 8-bit activations explain."""
_ROWS = 128
"""The most rows of a matrix that a product is compared by."""
_COMPARED = 256
"""The fewest sums that a product is compared by."""


class BlockLinear(nn.Module):
    """`nn.Linear` over blocks.

    Args:
        packed: the matrix, [out_features, in_features], with `bias`.
        bias: [out_features] or None.
    """

    def __init__(self, packed: PackedBlocks, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.num_outputs, packed.num_inputs
        self.bias = None if bias is None else bias.detach()
        self.packed = packed

    @classmethod
    def of(cls, blocks: Blocks, bias: torch.Tensor | None) -> BlockLinear:
        """Return the product by a matrix that is not packed."""
        return cls(PackedBlocks(blocks, None if bias is None else bias.detach()), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; [..., in_features] -> [..., out_features]."""
        rows_MK = x.reshape(-1, self.in_features).contiguous()
        return self.packed(rows_MK).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Name the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.packed.kind.name}"


def joined_blocks(products: Sequence[BlockLinear]) -> BlockLinear:
    """Return one product for several of the same input, outputs side by side.

    Raises ValueError when only some have a bias.
    """
    first, biases = products[0], [product.bias for product in products if product.bias is not None]
    if len(products) == 1:
        return first
    if len(biases) not in (0, len(products)) or any(item.in_features != first.in_features for item in products):
        raise ValueError(f"products with different inputs or biases: {list(products)}")
    bias = torch.cat(biases) if biases else None
    return BlockLinear(PackedBlocks.joined([product.packed for product in products], bias), bias)


BlocksOf = Callable[[str, nn.Linear], Blocks]
"""Returns the blocks of a product of that name in the model."""


_ROUTER = re.compile(r"Router|Gate$")


def is_router(module: nn.Module) -> bool:
    """Return whether a module is a router of transformers, by its name."""
    return bool(_ROUTER.search(type(module).__name__))


def why_not_blocks(linear: nn.Linear, parent: nn.Module) -> str | None:
    """Return why a product of `parent` stays as it is; None: blocks can take its place."""
    if is_router(parent):  # the choice of experts follows small differences
        return "belongs to a router"
    if linear.in_features % BLOCK:
        return f"has {linear.in_features} inputs, no multiple of {BLOCK}"
    if linear.out_features == 1:  # the gate of a shared expert, which has nothing to save
        return "has one output"
    return None


def quantise_linears(model: nn.Module, blocks_of: BlocksOf) -> int:
    """Replace every `nn.Linear` of a CPU model in place; return how many.

    A product that blocks cannot replace stays, and the log names it. Raises RuntimeError when a product differs
    from its matrix by more than the activations' rounding.
    """
    count = 0
    for prefix, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            path = f"{prefix}.{name}" if prefix else name
            if type(child) is not nn.Linear:
                continue
            if (why := why_not_blocks(child, parent)) is not None:
                log.info("not quantised: %s %s", path, why)
                continue
            blocks = blocks_of(path, child)
            product = BlockLinear.of(blocks, child.bias)
            check_product(path, product, torch.arange(child.out_features), blocks.dequantised())
            setattr(parent, name, product)
            count += 1
    return count


def some_rows(num_rows: int) -> torch.Tensor:
    """Return the numbers of the rows of a matrix that `check_product` compares: at most 128, the last among them."""
    # Exact in torch's default dtype as well, which is bfloat16 for every thread while a model is made.
    return torch.linspace(0, num_rows - 1, min(_ROWS, num_rows), dtype=torch.float64).long()


def check_product(path: str, product: BlockLinear, rows_n: torch.Tensor, want_nK: torch.Tensor) -> None:
    """Raise RuntimeError where a product differs from its matrix by more than the activations' rounding.

    `want_nK`: the matrix's rows of the outputs `rows_n`, float32.
    """
    # The sums of a product with few outputs may all be near zero, where rounding is a large share of them.
    num_rows = max(3, -(-_COMPARED // len(rows_n)))
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(num_rows, product.in_features, generator=generator, dtype=torch.float32)
    bias = None if product.bias is None else product.bias.float()[rows_n]
    far = distance(product(x_MK)[:, rows_n], nn.functional.linear(x_MK, want_nK, bias))
    if far > _KERNEL:
        raise RuntimeError(f"the quantised product of {path} is {far:.1e} away from its matrix")
