"""Blocks of MXFP4 (floats of 4 bits, e2m1, with a power of two for every 32 inputs) for the products over their codes.

GGUF files and Hugging Face's checkpoints have the same numbers in other orders. Invariant: a weight is exact, except in
a block whose scale, halved, is below half precision's least number: its weights are 0. Not responsible for: where the
numbers lie in a file (see gguf_kinds.py), the product (see kernels/blocks.py).

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0.
"""

from __future__ import annotations

import torch

from gpu_engine.model.names import ModelNotSupported
from kernels.blocks import Field, RawBlocks

_BIAS = 127
"""Of the exponents (e8m0)."""
_LARGEST = 16
"""Exponent of the largest scale whose half is a number of half precision."""
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_VALUES, -_VALUES])
"""Of the codes."""
_LOW_HALVES = 0x0F0F0F0F0F0F0F0F


def mxfp4_blocks(blocks_NBk: torch.Tensor, scales_NB: torch.Tensor) -> RawBlocks:
    """Return the blocks of some rows of a Hugging Face checkpoint, for a matrix of BlockKind.F4.

    Raises ModelNotSupported for a scale that half precision does not hold.

    Args:
        blocks_NBk: uint8 [N, B, 16]; byte j has input 2 j in its low half, and input 2 j + 1 in its high half.
        scales_NB: uint8 [N, B], exponents.
    """
    N, B, _ = blocks_NBk.shape
    # A word has 16 inputs, so the first word's go to low halves, and the second word's to high halves.
    low_NB, high_NB = blocks_NBk.contiguous().view(torch.int64).unbind(2)
    even_NB = (low_NB & _LOW_HALVES) | (high_NB & _LOW_HALVES) << 4
    odd_NB = (low_NB >> 4 & _LOW_HALVES) | (high_NB & ~_LOW_HALVES)
    parts = [part_NB.view(torch.uint8).view(N, B, 8) for part_NB in (even_NB, odd_NB)]
    return RawBlocks(Field.of(torch.stack(parts, 3).view(N, B, 16)), Field.of(half_scales(scales_NB)), None)


def mxfp4_numbers(blocks_NBk: torch.Tensor, scales_NB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights of some rows of a Hugging Face checkpoint, [N, K]. Arguments: as of `mxfp4_blocks`."""
    (N, B), codes_NBk = scales_NB.shape, torch.stack([blocks_NBk & 15, blocks_NBk >> 4], 3)
    values_NBk = _VALUES[codes_NBk.int()].view(N, B, 32)
    return torch.ldexp(values_NBk, (scales_NB.int() - _BIAS)[..., None]).view(N, B * 32).to(dtype)


def half_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks of BlockKind.F4, which are half of those of MXFP4, in half precision.

    Raises ModelNotSupported for one that half precision does not hold. `exponents`: uint8 of any shape.
    """
    if exponents.numel() and (most := int(exponents.max()) - _BIAS) > _LARGEST:
        raise ModelNotSupported(f"model: a matrix of MXFP4 has a scale of 2^{most}, and the largest is 2^{_LARGEST}")
    # The bits of 2^(exponent - 128) in single precision; the two least scales become 0 here, and many more in half.
    return ((exponents.int() - 1).clamp(min=0) << 23).view(torch.float32).half()
