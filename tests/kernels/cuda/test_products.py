"""A row of a product has the same bits beside any number of other rows, from the kernel as from cuBLAS."""

from __future__ import annotations

import pytest
import torch

from gpu_engine.model.fused_layers import FusedGated, join_activations
from gpu_engine.model.linear import BitChecks, InvariantLinear
from kernels.cuda.fused import gated
from kernels.cuda.products import ROW_TILES, Tile, gated_product, product
from kernels.fused_arguments import EVERYWHERE, Activation


def exact(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers on a device. In the interpreter each tile adds in another order, so integers: their sums are
    exact in fp32."""
    if device.type == "cuda":
        return some(device, *shape, seed=seed)
    return torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(seed)).half()


def checks_of(device: torch.device) -> BitChecks:
    return BitChecks(most_draws=2, draw=lambda weight, rows, seed: exact(device, rows, weight.shape[1], seed=9 + seed))


def some(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter multiplies the bits of bf16
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4).to(device, dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 64, 128), (3, 100, 192), (16, 130, 64), (17, 33, 576), (64, 96, 128), (150, 33, 80)]
)
def test_equals_a_plain_product(device: torch.device, M: int, N: int, K: int, bias: bool) -> None:
    x, weight, offset = some(device, M, K), some(device, N, K, seed=1), some(device, N, seed=2) if bias else None
    want = torch.nn.functional.linear(x.float(), weight.float(), None if offset is None else offset.float())
    torch.testing.assert_close(product(x, weight, offset).float(), want, atol=2e-2, rtol=1e-2)


def test_a_row_has_the_same_bits_in_every_tile_beside_any_rows(device: torch.device) -> None:
    x, weight = exact(device, 150, 320), exact(device, 66, 320, seed=1)
    whole = product(x, weight)
    for count in (1, 7, 16, 17, 40, 100):
        assert torch.equal(product(x[:count], weight), whole[:count]), count
    assert torch.equal(product(x[140:141], weight), whole[140:141])
    # The large matrices' tiles, too.
    for rows in ROW_TILES:
        for tile in (Tile.of(rows, 4096, 4096, 0), Tile.of(rows, 28_672, 4096, 0)):
            assert torch.equal(product(x, weight, tile=tile), whole), tile


def test_rows_are_read_by_their_stride_and_unsupported_inputs_are_rejected(device: torch.device) -> None:
    x, weight = some(device, 4, 256), some(device, 32, 64, seed=1)
    assert torch.equal(product(x[:, 64:128], weight), product(x[:, 64:128].contiguous(), weight))
    for wrong in (some(device, 0, 64), some(device, 2, 64).float(), some(device, 2, 32)):
        with pytest.raises(AssertionError):
            product(wrong, weight)


@pytest.mark.parametrize("act", EVERYWHERE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("M", "J", "K"), [(1, 128, 128), (3, 98, 192), (16, 260, 64), (50, 66, 576)])
def test_a_product_with_its_activation_has_the_bits_of_both_kernels(
    device: torch.device, act: Activation, M: int, J: int, K: int, bias: bool
) -> None:
    x, weight, offset = exact(device, M, K), exact(device, J, K, seed=1), exact(device, J, seed=2) if bias else None
    got = gated_product(x, weight, act, offset)
    assert got.shape == (M, J // 2)
    assert torch.equal(got, gated(product(x, weight, offset), act))


class Called(Exception):
    """The product was asked for its outputs."""


class AdaptedProduct(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise Called


def layer(device: torch.device, K: int, N: int) -> torch.nn.Linear:
    made = torch.nn.Linear(K, N, device=device).requires_grad_(False)
    made.weight.data, made.bias.data = exact(device, N, K), exact(device, N, seed=3)
    return made


@pytest.mark.parametrize("rows", [3, 40])
def test_a_gated_block_joins_its_activation_without_an_adapter(device: torch.device, rows: int) -> None:
    x, adapts, checks = exact(device, rows, 64), [False], checks_of(device)
    gate_up, down = layer(device, 64, 96), layer(device, 48, 64)
    gate_up.weight.data /= 64  # a power of two, so sums stay exact
    block = FusedGated(InvariantLinear(gate_up, checks), down, Activation.SILU)
    apart = down(gated(InvariantLinear(gate_up, checks)(x), Activation.SILU))
    assert join_activations(torch.nn.Sequential(block)) == 1
    assert torch.equal(block.of_rows(x), apart)
    assert join_activations(FusedGated(gate_up, down, Activation.SILU)) == 0, "another product has no such kernel"
    block.replace_product("gate_up", AdaptedProduct(), lambda: adapts[0])
    assert torch.equal(block.of_rows(x), apart)
    adapts[0] = True
    with pytest.raises(Called):
        block.of_rows(x)


def test_stages_fit_into_shared_memory() -> None:
    for N, K in ((576, 576), (4096, 4096), (128_256, 4096), (49_152, 576)):
        for shared in (99 << 10, 164 << 10, 227 << 10):
            for rows in (1, 17, 33, 65, 129, 512):
                cut = Tile.of(rows, N, K, shared)
                assert cut.num_stages * (cut.block_n + cut.rows) * cut.block_k * 2 <= shared, cut
                halves = 2 * max(16, cut.block_n // 2)
                assert cut.num_stages * (halves + cut.rows) * cut.block_k * 2 <= shared, "with gates"


@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 64), (17, 64), (0, 64)])
def test_a_linear_of_any_shape_equals_the_plain_one(device: torch.device, shape: tuple[int, ...]) -> None:
    x, plain = some(device, *shape), layer(device, 64, 48)
    torch.testing.assert_close(InvariantLinear(plain)(x), plain(x), atol=1e-2, rtol=1e-2)


class Halves(InvariantLinear):
    """The library adds two halves of K in bfloat16 at more than 100 rows, as it may with few outputs."""

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= 100:
            return self.by_kernel(x)
        half = self.in_features // 2
        sums = [(x[:, at : at + half] @ self.weight[:, at : at + half].T).bfloat16() for at in (0, half)]
        return (sums[0] + sums[1]).to(x.dtype) + self.bias


def test_the_library_multiplies_only_rows_at_which_it_has_the_bits_of_the_kernel(device: torch.device) -> None:
    checks = checks_of(device)
    made, x = Halves(layer(device, 512, 96), checks), exact(device, 128, 512)
    assert checks.library_agrees(made, 100)
    assert not checks.library_agrees(made, 128)
    assert torch.equal(made(x), torch.cat([made(x[:64]), made(x[64:])])), "the kernel takes its place"


def test_equal_weights_prove_nothing(device: torch.device) -> None:
    checks, zeros = checks_of(device), layer(device, 64, 48)
    zeros.weight.data.zero_()
    zeros.bias.data.zero_()
    assert not checks.library_agrees(InvariantLinear(zeros, checks), 80)


class LargeTileDiffers(Halves):
    """The tile of more than 100 rows has another matrix instruction."""

    def by_kernel(self, x_MK: torch.Tensor, *, smallest_tile: bool = False) -> torch.Tensor:
        out = super().by_kernel(x_MK, smallest_tile=smallest_tile)
        return out * 1.01 if len(x_MK) > 100 and not smallest_tile else out


def test_a_large_tile_is_compared_where_the_library_has_other_bits(device: torch.device) -> None:
    for kind, only_smallest in ((Halves, False), (LargeTileDiffers, True)):
        checks = checks_of(device)
        made = kind(layer(device, 512, 96), checks)
        assert not checks.library_agrees(made, 128)
        assert (checks.tile_of(made) is not None) == only_smallest


class TwoInstructions(InvariantLinear):
    """Tiles of more than 16 rows have another matrix instruction, which rounds differently."""

    def by_kernel(self, x_MK: torch.Tensor, *, smallest_tile: bool = False) -> torch.Tensor:
        out = super().by_kernel(x_MK, smallest_tile=smallest_tile)
        return out * 1.01 if len(x_MK) > 16 and not smallest_tile else out


@pytest.mark.parametrize(("kind", "only_smallest"), [(InvariantLinear, False), (TwoInstructions, True)])
def test_tiles_that_differ_leave_the_smallest_one(
    device: torch.device, kind: type[InvariantLinear], only_smallest: bool
) -> None:
    checks = checks_of(device)
    made = kind(layer(device, 72, 40), checks)
    assert checks.kernel_agrees(made)
    tile = checks.tile_of(made)
    assert (tile is not None and tile.rows == ROW_TILES[0]) == only_smallest
