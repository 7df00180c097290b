"""Products over blocks: their numbers, their rows' bits, and what joins them."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch

from kernels.blocks import (
    BLOCK,
    BlockKind,
    Blocks,
    LinearCall,
    PackedBlocks,
    RawBlocks,
    can_multiply_blocks,
    packed_bytes,
    quantised,
)
from kernels.library import native
from tests.kernels.block_cases import CASES, rand

pytestmark = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


def rounded(x_MK: torch.Tensor) -> torch.Tensor:
    """The activations as the product sees them: 8 bits with a scale for every 32."""
    x_MBk = x_MK.view(len(x_MK), -1, BLOCK)
    top_MB1 = x_MBk.abs().amax(dim=2, keepdim=True)
    q_MBk = (x_MBk * torch.where(top_MB1 > 0, 127 / top_MB1, 0)).round()
    return (q_MBk.double() * (top_MB1 / 127).double()).view(x_MK.shape)


VARIANTS = {
    "x86_64_v3": {"avx2", "fma", "f16c"},
    "x86_64_avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "x86_64_v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86_64_vnni": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"},
}
"""By the flags of /proc/cpuinfo that it needs."""
VARIANTS_OF_AARCH64 = {"aarch64_dot": 8, "aarch64_i8mm": 9}
"""By the least level of dispatch.c that runs it: under an emulator, /proc/cpuinfo has the flags of the host."""
CODED = {"4-bit floats": BlockKind.F4, "4-bit levels": BlockKind.L4}
"""The cases whose 4 bits are codes."""


def variants() -> list[str]:
    """The units that this CPU has."""
    if platform.machine() == "aarch64":
        level = int(native().lockstep_cpu_level())
        return [name for name, needed in VARIANTS_OF_AARCH64.items() if needed <= level]
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return [name for name, needed in VARIANTS.items() if needed <= flags]


def product_by(variant: str, product: PackedBlocks, x_MK: torch.Tensor) -> torch.Tensor:
    """The product on one unit."""
    call = LinearCall(product, x_MK, 0)
    native()[f"lockstep_block_linear_{variant}"](ctypes.byref(call.args))
    return call.out_MN


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(50, 64), (96, 32), (33, 160)])
def test_a_product_is_that_of_its_matrix_and_the_rounded_activations(case: str, shape: tuple[int, int]) -> None:
    matrix, bias_N = CASES[case](*shape), rand(shape[0], seed=2)
    x_MK = rand(7, shape[1], seed=3)
    x_MK[2] = 0  # a row without a scale
    got_MN = PackedBlocks(matrix, bias_N)(x_MK)
    want_MN = rounded(x_MK) @ matrix.dequantised().double().T + bias_N
    torch.testing.assert_close(got_MN.double(), want_MN, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_for_any_number_of_rows(case: str, dtype: torch.dtype) -> None:
    product = PackedBlocks(CASES[case](70, 96))
    x_MK = rand(64, 96).to(dtype)
    whole_MN = product(x_MK)
    for rows in (*range(1, 20), 47, 48, 49):  # every number of rows of a tile, and what is left of several
        assert torch.equal(product(x_MK[:rows].contiguous()), whole_MN[:rows]), rows
    assert torch.equal(product(x_MK[37:40].contiguous()), whole_MN[37:40])


@pytest.mark.parametrize("kind", [BlockKind.Q4, BlockKind.Q8])
def test_quantising_rounds_to_the_nearest_step(kind: BlockKind) -> None:
    weight_NK = rand(6, 64)
    weight_NK[0, :32] = 0.25  # a block without a range
    weight_NK[1, :32] = 0
    made = quantised(weight_NK, kind)
    error_NBk = (made.dequantised() - weight_NK).view(6, 2, BLOCK).abs()
    # Half a step, and half precision's rounding of the scale and of the offset.
    bound_NB = made.scales_NS.float() * 0.5 + weight_NK.view(6, 2, BLOCK).abs().amax(dim=2) * 2e-3
    assert bool((error_NBk <= bound_NB[..., None]).all())


JOINED = {
    BlockKind.Q5: ("4 bits", "4 bits with offsets", "5 bits", "5 bits with offsets"),
    BlockKind.Q6: (
        "4 bits",
        "4 bits with offsets",
        "4 bits in parts",
        "5 bits",
        "5 bits with offsets",
        "6 bits",
        "6 bits with offsets",
    ),
    BlockKind.Q8: (
        "4 bits",
        "4 bits with offsets",
        "5 bits",
        "5 bits with offsets",
        "8 bits",
        "8 bits with offsets",
        *CODED,
    ),
}
"""What is joined without a loss, and to which kind."""


@pytest.mark.parametrize(("kind", "cases"), JOINED.items())
def test_joined_matrices_of_different_kinds_lose_nothing(kind: BlockKind, cases: tuple[str, ...]) -> None:
    parts = [CASES[case](16, 64) for case in cases]
    for some in (parts, [part for part in parts if part.offsets_NB is None]):
        whole = Blocks.joined(some)
        assert (whole.kind, whole.offsets_NB is None) == (kind, some is not parts)
        assert torch.equal(whole.dequantised(), torch.cat([part.dequantised() for part in some]))
    same = Blocks.joined([parts[0], parts[0]])
    assert same.kind is parts[0].kind
    x_MK, whole = rand(3, 64), Blocks.joined(parts)
    torch.testing.assert_close(PackedBlocks(whole)(x_MK)[:, :16], PackedBlocks(parts[0])(x_MK), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("other", ["8 bits", "8 bits with offsets", *CODED])
@pytest.mark.parametrize("case", ["6 bits", "6 bits with offsets", "4 bits in parts"])
def test_blocks_with_two_scales_are_rounded_where_another_part_has_8_bits(case: str, other: str) -> None:
    parts = [CASES[case](16, 64), CASES[other](16, 64)]
    whole = Blocks.joined(parts)
    assert whole.kind is BlockKind.Q8
    halves = whole.dequantised().view(2, 16, 64)
    assert torch.equal(halves[1], parts[1].dequantised())
    error_NBk = (halves[0] - parts[0].dequantised()).view(16, 2, BLOCK).abs()
    # Half a step of the block's largest weight, and half precision's rounding.
    assert bool((error_NBk.amax(2) <= parts[0].dequantised().view(16, 2, BLOCK).abs().amax(2) * 4.5e-3).all())


@pytest.mark.parametrize("shape", [(33, 32), (70, 96), (64, 1120)])
@pytest.mark.parametrize(("case", "kind"), CODED.items())
def test_products_over_codes_have_the_bits_of_those_over_their_8_bits(
    case: str, kind: BlockKind, shape: tuple[int, int]
) -> None:
    matrix = CASES[case](*shape)
    of_4_bits = PackedBlocks(matrix)
    of_8_bits = PackedBlocks(Blocks.joined([matrix, CASES["8 bits"](*shape)]))
    assert (of_4_bits.kind, of_8_bits.kind, of_8_bits.offsets) == (kind, BlockKind.Q8, None)
    x_MK = rand(128, shape[1])
    for rows in range(1, 129):
        part_MK = x_MK[128 - rows :].contiguous()
        want_MN = of_8_bits(part_MK)[:, : shape[0]].view(torch.int32)
        for name in variants():
            assert torch.equal(product_by(name, of_4_bits, part_MK).view(torch.int32), want_MN), (name, rows)


def test_every_variant_that_this_cpu_runs_gives_the_same_bits() -> None:
    """The slower variants are compiled for CPUs without the instruction, which no test machine may be."""
    assert variants() != []
    for case in CASES.values():
        product = PackedBlocks(case(40, 96), rand(40, seed=2))
        for rows in range(1, 9):  # every tile of rows, of every variant
            x_MK = rand(rows, 96)
            want_MN = product(x_MK)
            for name in variants():
                assert torch.equal(product_by(name, product, x_MK), want_MN), (name, rows)


def test_rows_of_another_width_are_rejected() -> None:
    with pytest.raises(AssertionError, match="32"):
        PackedBlocks(quantised(rand(4, 64), BlockKind.Q8))(rand(2, 32))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("N", [64, 70])
def test_a_packed_matrix_gives_its_integers_back_and_joins_as_the_matrix_does(case: str, N: int) -> None:
    parts = [CASES[case](N, 96), CASES["4 bits"](33, 96), CASES[case](32, 96)]
    for chosen in (parts[:1], parts[::2], parts):
        whole, packed = Blocks.joined(chosen), PackedBlocks.joined([PackedBlocks(part) for part in chosen])
        for made in (packed, PackedBlocks(whole)):
            back = made.unpacked()
            assert back.kind is whole.kind
            assert torch.equal(back.quants_NK, whole.quants_NK)
            assert torch.equal(back.scales_NS, whole.scales_NS)
            assert (back.offsets_NB is None) == (whole.offsets_NB is None)
            assert back.offsets_NB is None or torch.equal(back.offsets_NB, whole.offsets_NB)
        for name in ("quants", "scales", "offsets"):
            want = getattr(PackedBlocks(whole), name)
            assert want is None or torch.equal(getattr(packed, name), want), name


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_put_in_parts_and_in_another_order_make_the_same_matrix(case: str) -> None:
    matrix, order = CASES[case](100, 64), torch.randperm(100, generator=torch.Generator().manual_seed(0))
    made = PackedBlocks.unfilled(matrix.kind, matrix.shape, offsets=matrix.offsets_NB is not None)
    for first, count in ((0, 32), (32, 64), (96, 4)):
        made.put(first, count, RawBlocks.of(matrix), order[first : first + count].contiguous())
    want = PackedBlocks(matrix.rows(order))
    assert torch.equal(made.quants, want.quants)
    assert torch.equal(made.scales, want.scales)
    assert made.num_bytes == packed_bytes(matrix.kind, matrix.shape, offsets=matrix.offsets_NB is not None)


@pytest.mark.parametrize("case", ["4 bits", "8 bits"])
def test_rows_without_offsets_go_into_a_matrix_that_has_them(case: str) -> None:
    parts = [CASES[name](N, 64) for name, N in ((case, 64), (f"{case} with offsets", 32), (case, 5))]
    made, first = PackedBlocks.unfilled(parts[0].kind, (101, 64), offsets=True), 0
    for part in parts:
        made.put(first, part.shape[0], RawBlocks.of(part))
        first += part.shape[0]
    assert torch.equal(made.unpacked().dequantised(), torch.cat([part.dequantised() for part in parts]))
    x_MK = rand(7, 64)
    apart = torch.cat([PackedBlocks(part)(x_MK) for part in parts], dim=1)
    if case == "8 bits":
        assert torch.equal(made(x_MK), apart)
    else:  # a stored offset is added as a float; without one, 8 is subtracted from the integers
        torch.testing.assert_close(made(x_MK), apart, rtol=1e-6, atol=1e-5)
