"""Matrices in blocks, and rows, for the tests of products."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.blocks import BLOCK, CODE_VALUES, BlockKind, Blocks, quantised
from tools.shapes import SHAPES

WIDTHS = sorted({576, 1536, *(n for s in SHAPES.values() for n in (s.hidden, s.inner, s.heads * s.head_dim))})
"""Inputs of every product of the embedded model and of the shapes of docs/models.md."""


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_offsets(N: int, K: int) -> Blocks:
    """8 bits with offsets, and integers of the whole range."""
    made = quantised(rand(N, K), BlockKind.Q8)
    quants_NK = torch.randint(-128, 128, (N, K), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    return Blocks(BlockKind.Q8, quants_NK, made.scales_NS, rand(N, K // BLOCK).half())


def without_offsets(N: int, K: int) -> Blocks:
    """4 bits that stand for -8 to 7, and scales of either sign."""
    made = quantised(rand(N, K), BlockKind.Q4)
    return Blocks(BlockKind.Q4, made.quants_NK, (made.scales_NS * rand(N, K // BLOCK).sign()).half(), None)


def floats(N: int, K: int) -> Blocks:
    """Codes of floats of 4 bits, and powers of two as scales."""
    generator = torch.Generator().manual_seed(3)
    codes_NK = torch.randint(0, 16, (N, K), generator=generator).to(torch.uint8)
    exponents_NB = torch.randint(-6, -1, (N, K // BLOCK), generator=generator)
    return Blocks(BlockKind.F4, codes_NK, (2.0**exponents_NB).half(), None)


def levels(N: int, K: int) -> Blocks:
    """Codes of levels, and scales of either sign."""
    codes_NK = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    codes_NK[0] = 0  # the largest magnitude
    return Blocks(BlockKind.L4, codes_NK, (rand(N, K // BLOCK, seed=5) * 0.01).half(), None)


def integers(kind: BlockKind, *, offsets: bool = False) -> Callable[[int, int], Blocks]:
    """Integers of the whole range of a kind, scales of either sign, and offsets if `offsets`."""

    def made(N: int, K: int) -> Blocks:
        generator = torch.Generator().manual_seed(6)
        quants_NK = torch.randint(0, 1 << kind.bits, (N, K), generator=generator).to(torch.uint8)
        scales_NS = (rand(N, K // BLOCK * kind.scales, seed=7) * 0.05).half()
        return Blocks(kind, quants_NK, scales_NS, rand(N, K // BLOCK).half() if offsets else None)

    return made


CASES: dict[str, Callable[[int, int], Blocks]] = {
    "4 bits": without_offsets,
    "4 bits with offsets": lambda N, K: quantised(rand(N, K), BlockKind.Q4),
    "8 bits": lambda N, K: quantised(rand(N, K), BlockKind.Q8),
    "8 bits with offsets": with_offsets,
    "4-bit floats": floats,
    "4-bit levels": levels,
    "4 bits in parts": integers(BlockKind.P4),
    "5 bits": integers(BlockKind.Q5),
    "5 bits with offsets": integers(BlockKind.Q5, offsets=True),
    "6 bits": integers(BlockKind.Q6),
    "6 bits with offsets": integers(BlockKind.Q6, offsets=True),
}
"""Matrices [N, K] of each compiled form of a product."""


def random_blocks(kind: BlockKind, N: int, K: int, seed: int) -> Blocks:
    """Return a matrix [N, K] of a kind, whose products are about as large as their inputs."""
    generator = torch.Generator().manual_seed(seed)
    if kind in (BlockKind.Q4, BlockKind.Q8):
        return quantised(torch.randn(N, K, generator=generator) * K**-0.5, kind)
    quants_NK = torch.randint(0, 1 << kind.bits, (N, K), generator=generator).to(torch.uint8)
    largest = CODE_VALUES[kind].abs().max() if kind in CODE_VALUES else kind.middle(offsets=False)
    scales_NS = torch.full((N, K // BLOCK * kind.scales), 12 * 2.0**-6 / float(largest), dtype=torch.float16)
    return Blocks(kind, quants_NK, scales_NS, None)
