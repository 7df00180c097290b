"""The kinds of GGUF files against the `gguf` package's own reading of the same bytes.

Each bound is the rounding of the kind: none, or of a scale to half precision.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.quantised.gguf_kinds import BLOCKS, blocks_of, numbers_of, raw_blocks
from gpu_engine.model.recording import distance
from kernels.blocks import BLOCK, PackedBlocks

HALVES = {
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2)),
    Kind.Q3_K: (108,),
    Kind.Q6_K: (208,),
    Kind.MXFP4: (),
}
"""Where the numbers in half precision of a block are, for the kinds that do not begin with one."""
BITS = {Kind.Q5_0: 5, Kind.Q5_1: 5, Kind.Q5_K: 5, Kind.Q6_K: 6, Kind.Q8_0: 8}
"""Of a weight in memory, where they are not 4."""
NO_SCALE, HALF = 0.0, 3e-4


def random_bytes(kind: Kind, N: int = 6, blocks: int = 3) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(kind.value)
    raw_NBk = rng.integers(0, 256, (N, blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    if kind is Kind.MXFP4:
        raw_NBk[..., 0] = rng.integers(110, 130, (N, blocks))
    for at in HALVES.get(kind, (0,)):
        halves = rng.uniform(-1, 1, (N, blocks, 1)).astype(np.float16)
        raw_NBk[..., at : at + 2] = halves.view(np.uint8)
    return raw_NBk.reshape(N, -1)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        *(
            (kind, NO_SCALE)
            for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.IQ4_NL, Kind.MXFP4)
        ),
        *((kind, HALF) for kind in (Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS)),
    ],
)
def test_blocks_are_the_weights_of_the_file(kind: Kind, bound: float) -> None:
    raw = random_bytes(kind)
    want_NK = torch.from_numpy(dequantize(raw, kind))
    blocks = blocks_of(raw, kind)
    assert blocks is not None
    assert blocks.shape == tuple(want_NK.shape)
    assert (blocks.kind, blocks.offsets_NB is not None) == (BLOCKS[kind].kind, BLOCKS[kind].has_offsets)
    assert blocks.kind.block_bytes == BLOCK // 8 * BITS.get(kind, 4)
    assert distance(blocks.dequantised(), want_NK) <= bound
    some = blocks_of(raw[2:4], kind)
    assert some is not None
    assert torch.equal(some.dequantised(), blocks.dequantised()[2:4])


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_packed_blocks_are_the_weights_of_the_file_in_any_order_of_blocks(kind: Kind) -> None:
    raw = random_bytes(kind, N=40, blocks=2)
    blocks = blocks_of(raw, kind)
    assert blocks is not None
    (N, K), form = blocks.shape, BLOCKS[kind]
    for order in (None, torch.randperm(K // BLOCK, generator=torch.Generator().manual_seed(1))):
        packed = PackedBlocks.unfilled(form.kind, (N, K), offsets=form.has_offsets)
        packed.put(0, N, raw_blocks(raw, kind, order))
        want = blocks if order is None else blocks.columns(order)
        assert torch.equal(packed.unpacked().dequantised(), want.dequantised())


def test_numbers_of_kinds_without_blocks_are_the_librarys() -> None:
    for kind in (Kind.Q2_K, Kind.IQ3_S, Kind.TQ1_0):
        raw = np.zeros((2, 2 * GGML_QUANT_SIZES[kind][1]), np.uint8)
        raw[:, ::3] = 60  # no half of these is infinite
        want = torch.from_numpy(dequantize(raw, kind))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(numbers_of(raw, kind, dtype), want.to(dtype)), (kind, dtype)


def test_other_kinds_have_no_blocks() -> None:
    for kind in (Kind.F32, Kind.BF16, Kind.Q2_K, Kind.IQ3_S):
        assert blocks_of(np.zeros((2, 64), np.uint8), kind) is None


def test_a_scale_above_half_precision_is_refused() -> None:
    raw = random_bytes(Kind.MXFP4)
    raw[0, 0] = 127 + 17
    with pytest.raises(ModelNotSupported, match=r"MXFP4 has a scale of 2\^17"):
        blocks_of(raw, Kind.MXFP4)
