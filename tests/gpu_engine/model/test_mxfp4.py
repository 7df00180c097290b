"""Blocks of MXFP4 from a Hugging Face checkpoint against the values that the specification gives to codes."""

from __future__ import annotations

import pytest
import torch

from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.quantised.mxfp4 import half_scales, mxfp4_blocks
from kernels.blocks import BlockKind, PackedBlocks, can_multiply_blocks

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def drawn(N: int, B: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks_NBk = torch.randint(0, 256, (N, B, 16), generator=generator, dtype=torch.uint8)
    return blocks_NBk, torch.randint(110, 144, (N, B), generator=generator, dtype=torch.uint8)


@pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")
def test_blocks_are_the_weights_of_the_checkpoint() -> None:
    N, B = 70, 3
    blocks_NBk, scales_NB = drawn(N, B)
    packed = PackedBlocks.unfilled(BlockKind.F4, (N, 32 * B), offsets=False)
    for first, end in ((0, 32), (32, 70)):
        packed.put(first, end - first, mxfp4_blocks(blocks_NBk[first:end], scales_NB[first:end]))
    codes_NBk = torch.stack([blocks_NBk & 15, blocks_NBk >> 4], 3).view(N, B, 32)
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    want_NBk = values[codes_NBk.long()] * 2.0 ** (scales_NB.float() - 127)[..., None]
    assert torch.equal(packed.unpacked().dequantised(), want_NBk.view(N, -1))


def test_scales_are_halved_and_those_that_half_precision_does_not_hold_are_refused() -> None:
    exponents = torch.tensor([0, 103, 104, 127, 143], dtype=torch.uint8)
    assert half_scales(exponents).tolist() == [0, 0, 2.0**-24, 0.5, 2.0**15]
    with pytest.raises(ModelNotSupported, match=r"a scale of 2\^17, and the largest is 2\^16"):
        half_scales(torch.tensor([127, 144], dtype=torch.uint8))
