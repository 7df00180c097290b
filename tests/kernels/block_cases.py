"""Matrices in blocks, and rows, for the tests of products."""

from __future__ import annotations

import torch

from kernels.blocks import BLOCK, BlockKind, Blocks, quantised


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_offsets(N: int, K: int) -> Blocks:
    """8 bits with offsets, and integers of the whole range."""
    made = quantised(rand(N, K), BlockKind.Q8)
    quants_NK = torch.randint(-128, 128, (N, K), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    return Blocks(BlockKind.Q8, quants_NK, made.scales_NB, rand(N, K // BLOCK).half())
