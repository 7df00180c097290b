"""Products of a few rows have the results of plain torch, which do not depend on the other rows."""

from __future__ import annotations

import pytest
import torch

from gpu_engine.model.fused_layers import FusedGated, join_activations
from gpu_engine.model.linear import SkinnyLinear
from kernels.cuda.fused import gated
from kernels.cuda.skinny import MAX_ROWS, SkinnyTuning, skinny_gated, skinny_linear
from kernels.fused_arguments import Activation


def some(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter multiplies the bits of bf16
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4).to(device, dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 64, 128), (3, 100, 192), (8, 33, 576), (16, 130, 64)])
def test_equals_a_plain_product(device: torch.device, M: int, N: int, K: int, bias: bool) -> None:
    x, weight, offset = some(device, M, K), some(device, N, K, seed=1), some(device, N, seed=2) if bias else None
    want = torch.nn.functional.linear(x.float(), weight.float(), None if offset is None else offset.float())
    torch.testing.assert_close(skinny_linear(x, weight, offset).float(), want, atol=2e-2, rtol=1e-2)


def test_a_row_has_the_same_bits_with_any_rows_beside_it(device: torch.device) -> None:
    x, weight = some(device, MAX_ROWS, 320), some(device, 96, 320, seed=1)
    whole = skinny_linear(x, weight)
    for count in (1, 2, 7):
        assert torch.equal(skinny_linear(x[:count], weight), whole[:count])
    assert torch.equal(skinny_linear(x[5:6], weight), whole[5:6])


def test_rows_are_read_by_their_stride_and_unsupported_inputs_are_rejected(device: torch.device) -> None:
    x, weight = some(device, 4, 256), some(device, 32, 64, seed=1)
    assert torch.equal(skinny_linear(x[:, 64:128], weight), skinny_linear(x[:, 64:128].contiguous(), weight))
    for wrong in (some(device, MAX_ROWS + 1, 64), some(device, 2, 64).float(), some(device, 2, 32)):
        with pytest.raises(AssertionError):
            skinny_linear(wrong, weight)


@pytest.mark.parametrize("act", list(Activation))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("M", "J", "K"), [(1, 128, 128), (3, 98, 192), (8, 66, 576), (16, 260, 64)])
def test_a_product_with_its_activation_has_the_bits_of_both_kernels(
    device: torch.device, act: Activation, M: int, J: int, K: int, bias: bool
) -> None:
    x, weight, offset = some(device, M, K), some(device, J, K, seed=1), some(device, J, seed=2) if bias else None
    got = skinny_gated(x, weight, act, offset)
    assert got.shape == (M, J // 2)
    assert torch.equal(got, gated(skinny_linear(x, weight, offset), act))
    for count in range(1, M, 3):
        assert torch.equal(skinny_gated(x[:count], weight, act, offset), got[:count])


class Called(Exception):
    """The product was asked for its outputs."""


class AdaptedProduct(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise Called


@pytest.mark.parametrize("rows", [3, MAX_ROWS + 1])
def test_a_gated_block_joins_its_activation_for_few_rows_without_an_adapter(device: torch.device, rows: int) -> None:
    x, adapts = some(device, rows, 64), [False]
    gate_up, down = (
        torch.nn.Linear(K, N, device=device, dtype=x.dtype).requires_grad_(False) for K, N in ((64, 96), (48, 64))
    )
    block = FusedGated(SkinnyLinear(gate_up), down, Activation.SILU)
    apart = down(gated(SkinnyLinear(gate_up)(x), Activation.SILU))
    assert join_activations(torch.nn.Sequential(block)) == 1
    assert torch.equal(block.of_rows(x), apart)
    assert join_activations(FusedGated(gate_up, down, Activation.SILU)) == 0, "another product has no such kernel"
    if rows <= MAX_ROWS:
        block.replace_product("gate_up", AdaptedProduct(), lambda: adapts[0])
        assert torch.equal(block.of_rows(x), apart)
        adapts[0] = True
        with pytest.raises(Called):
            block.of_rows(x)


def test_stages_fit_into_shared_memory() -> None:
    for N, K in ((576, 576), (4096, 4096), (128_256, 4096), (49_152, 576)):
        for shared in (99 << 10, 227 << 10):
            cut = SkinnyTuning.of(N, K, shared)
            assert cut.num_stages * (cut.block_n + MAX_ROWS) * cut.block_k * 2 <= shared
            assert cut.num_stages * (2 * max(16, cut.block_n // 2) + MAX_ROWS) * cut.block_k * 2 <= shared, "with gates"


@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 64), (16, 64), (17, 64), (0, 64)])
def test_a_linear_of_any_shape_equals_the_plain_one(device: torch.device, shape: tuple[int, ...]) -> None:
    x = some(device, *shape)
    plain = torch.nn.Linear(64, 48, device=device, dtype=x.dtype).requires_grad_(False)
    torch.testing.assert_close(SkinnyLinear(plain)(x), plain(x), atol=1e-2, rtol=1e-2)
