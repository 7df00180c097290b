"""The blocks and numbers of GGUF's kinds against the `gguf` package's own reading of the same bytes, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from kernels.blocks import BLOCK, BlockKind, Blocks, quantised
from kernels.unpack import dequantised, unpacked

SCALES = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.IQ4_NL, Kind.IQ4_XS), (0,)),
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2)),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q6_K: (208,),
    Kind.MXFP4: (),
}
"""Kind -> where the numbers in half precision of a block are."""
BLOCK_KINDS = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q4_1, Kind.Q4_K), BlockKind.Q4),
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS), BlockKind.L4),
    **dict.fromkeys((Kind.Q5_0, Kind.Q5_1, Kind.Q5_K), BlockKind.Q5),
    Kind.Q3_K: BlockKind.P4,
    Kind.Q6_K: BlockKind.Q6,
    Kind.Q8_0: BlockKind.Q8,
}
WITH_OFFSETS = (Kind.Q4_1, Kind.Q4_K, Kind.Q5_1, Kind.Q5_K)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def drawn(kind: Kind, scales: npt.NDArray[np.float16], N: int = 9, blocks: int = 3) -> npt.NDArray[np.uint8]:
    """Return random rows whose numbers in half precision are drawn from `scales`."""
    rng = np.random.default_rng(kind.value)
    raw_NBk = rng.integers(0, 256, (N, blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in SCALES[kind]:
        raw_NBk[..., at : at + 2] = rng.choice(scales, (N, blocks, 1)).view(np.uint8)
    if kind is Kind.MXFP4:
        raw_NBk[..., 0] = rng.integers(112, 142, (N, blocks))
    return raw_NBk.reshape(N, -1)


def integers_of(quants_NBk: torch.Tensor, kind: BlockKind) -> torch.Tensor:
    """The integers or codes of blocks, [N, K], from where `block_weights` of blocks.h says that they lie."""
    N, B, _ = quants_NBk.shape
    if kind is BlockKind.Q8:
        return quants_NBk.view(torch.int8).reshape(N, -1)
    of_inputs = []
    for half, word, byte in np.ndindex(2, 4, 4):
        if kind is BlockKind.Q6:
            part = quants_NBk[..., 12 * half : 12 * half + 12]
            last = part[..., byte] >> 6 | part[..., 4 + byte] >> 6 << 2 | part[..., 8 + byte] >> 6 << 4
            of_inputs.append(part[..., 4 * word + byte] & 63 if word < 3 else last)
            continue
        four = quants_NBk[..., 4 * (kind.bits - 4) + 4 * word + byte] >> 4 * half & 15
        fifth = quants_NBk[..., byte] >> (2 * word + half) & 1
        of_inputs.append(four | fifth << 4 if kind is BlockKind.Q5 else four)
    return torch.stack(of_inputs, dim=2).view(N, B * BLOCK)


ANY = np.random.default_rng(0).standard_normal(64).astype(np.float16)
ROUND = (2.0 ** np.arange(-9, 3)).astype(np.float16)
"""Scales whose product with a block's own scale of 6 bits is a number of half precision."""
TINY = np.array([0, -0.0, 6e-8, -1.8e-7, 6e-5, 65504, -0.33], np.float16)


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("scales", [ANY, ROUND, TINY], ids=["any", "round", "tiny"])
def test_numbers_have_the_bits_of_the_librarys(kind: Kind, scales: npt.NDArray[np.float16]) -> None:
    raw = drawn(kind, scales)
    want_NK = torch.from_numpy(dequantize(raw, kind))
    for dtype in (torch.float32, torch.bfloat16):
        got_NK = dequantised(torch.from_numpy(raw), kind.value, want_NK.shape[1], dtype)
        assert torch.equal(bits(got_NK), bits(want_NK.to(dtype))), dtype
        row = dequantised(torch.from_numpy(raw[4:5].copy()), kind.value, want_NK.shape[1], dtype)
        assert torch.equal(row, got_NK[4:5])


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_blocks_are_exact_but_for_a_scale_in_half_precision(kind: Kind) -> None:
    for scales, bound in ((ROUND, 0.0), (ANY, 2.0**-11)):
        raw = drawn(kind, scales)
        want_NK = torch.from_numpy(dequantize(raw, kind))
        (N, K), block_kind, offsets = want_NK.shape, BLOCK_KINDS[kind], kind in WITH_OFFSETS
        made = unpacked(torch.from_numpy(raw), kind.value, K, block_kind, offsets=offsets, order=None)
        offsets_NB = None if made.offsets is None else made.offsets.memory
        blocks = Blocks(block_kind, integers_of(made.quants.memory, block_kind), made.scales.memory, offsets_NB)
        largest_NK = blocks.integers().float().abs().view(N, blocks.scales_NS.shape[1], -1)
        largest_NK *= blocks.scales_NS.float().abs()[..., None]
        if blocks.offsets_NB is not None:
            largest_NK += blocks.offsets_NB.float().abs()[..., None]
        far_NK = (blocks.dequantised() - want_NK).abs()
        assert bool((far_NK <= bound * largest_NK.view(N, K) + 1e-7 * bound).all()), scales


def test_rounding_is_to_the_nearest_of_127_steps() -> None:
    generator = torch.Generator().manual_seed(2)
    x_NK = torch.randn(64, 256, generator=generator) * 10.0 ** torch.randint(-9, 4, (64, 1), generator=generator)
    x_NK[3, :64], x_NK[5] = 0, 1e30  # blocks of zeros, and with a scale above half precision
    x_NK[7, :32] = torch.arange(32) - 15.5
    x_NK[7, 0] = 127  # so the scale is 1, and the others are ties
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x_NBk = x_NK.clamp(-6e4, 6e4).to(dtype).float().view(64, -1, BLOCK)
        scales_NB = (x_NBk.abs().amax(dim=2) / 127).half()
        wide_NB1 = scales_NB.float()[..., None]
        want_NBk = torch.where(wide_NB1 > 0, x_NBk / wide_NB1, 0).round().clamp(-127, 127).to(torch.int8)
        got = quantised(x_NBk.view(64, 256).to(dtype), BlockKind.Q8)
        assert torch.equal(bits(got.scales_NS), bits(scales_NB)), dtype
        assert torch.equal(got.quants_NK, want_NBk.view(64, 256)), dtype
    assert torch.isinf(quantised(x_NK, BlockKind.Q8).scales_NS[5]).all()


def test_rounding_is_to_the_nearest_of_15_steps_from_the_least_number_on() -> None:
    generator = torch.Generator().manual_seed(2)
    x_NK = torch.randn(64, 256, generator=generator) * 10.0 ** torch.randint(-9, 4, (64, 1), generator=generator)
    x_NK[3, :64], x_NK[5] = 0, 1.5  # a range of 0
    x_NK[7, :32] = torch.arange(32) / 2.0
    x_NK[7, 31] = 15  # so the scale is 1, and every second number is a tie
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x_NBk = x_NK.clamp(-6e4, 6e4).to(dtype).float().view(64, -1, BLOCK)
        offsets_NB = x_NBk.amin(dim=2).half()
        scales_NB = ((x_NBk.amax(dim=2) - offsets_NB.float()) / 15).half()
        wide_NB1 = scales_NB.float()[..., None]
        ratio_NBk = torch.where(wide_NB1 > 0, (x_NBk - offsets_NB.float()[..., None]) / wide_NB1, 0)
        got = quantised(x_NBk.view(64, 256).to(dtype), BlockKind.Q4)
        assert got.offsets_NB is not None
        assert torch.equal(got.offsets_NB, offsets_NB), dtype  # zeros may have another sign
        assert torch.equal(bits(got.scales_NS), bits(scales_NB)), dtype
        assert torch.equal(got.quants_NK, ratio_NBk.round().clamp(0, 15).to(torch.uint8).view(64, 256)), dtype
