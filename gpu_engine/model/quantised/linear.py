"""Linear layers over weights in blocks: the replacement of every `nn.Linear` of a model on a CPU.

Invariant: no product is used before it was compared with the one that it replaces. Not responsible for: where blocks
come from (see gguf_blocks.py), products that are joined (see model/linear.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from gpu_engine.model.recording import distance
from kernels.blocks import BLOCK, Blocks, PackedBlocks

log = logging.getLogger(__name__)

_KERNEL = 2e-2
"""Largest relative distance of a product that 8-bit activations explain."""


class BlockLinear(nn.Module):
    """`nn.Linear` over blocks. Keeps the matrix until `release`, so that products can be joined.

    Args:
        blocks: the matrix, [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = blocks.shape
        self.blocks: Blocks | None = blocks
        self.bias = None if bias is None else bias.detach()
        self.packed = PackedBlocks(blocks, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; [..., in_features] -> [..., out_features]."""
        rows_MK = x.reshape(-1, self.in_features).contiguous()
        return self.packed(rows_MK).view(*x.shape[:-1], self.out_features)

    def release(self) -> None:
        """Forget the matrix that was not packed."""
        self.blocks = None

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
    kept = [product.blocks for product in products if product.blocks is not None]
    assert len(kept) == len(products), "the matrices were released"
    return BlockLinear(Blocks.joined(kept), torch.cat(biases) if biases else None)


BlocksOf = Callable[[str, nn.Linear], Blocks]
"""Returns the blocks of a product of that name in the model."""


def quantise_linears(model: nn.Module, blocks_of: BlocksOf) -> int:
    """Replace every `nn.Linear` of a CPU model in place; return how many.

    A product whose inputs are no whole blocks stays, and the log names it. Raises RuntimeError when a product differs
    from its matrix by more than the activations' rounding.
    """
    count = 0
    for prefix, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            path = f"{prefix}.{name}" if prefix else name
            if type(child) is not nn.Linear:
                continue
            if child.in_features % BLOCK:
                log.info("not quantised: %s has %d inputs, no multiple of %d", path, child.in_features, BLOCK)
                continue
            setattr(parent, name, _checked(path, BlockLinear(blocks_of(path, child), child.bias)))
            count += 1
    return count


def release_blocks(model: nn.Module) -> None:
    """Forget the matrices that were kept for joining."""
    for module in model.modules():
        if isinstance(module, BlockLinear):
            module.release()


def _checked(path: str, product: BlockLinear) -> BlockLinear:
    assert product.blocks is not None
    x_MK = torch.randn(3, product.in_features, generator=torch.Generator().manual_seed(0))
    want = nn.functional.linear(
        x_MK, product.blocks.dequantised(), None if product.bias is None else product.bias.float()
    )
    far = distance(product(x_MK), want)
    if far > _KERNEL:
        raise RuntimeError(f"the quantised product of {path} is {far:.1e} away from its matrix")
    return product
