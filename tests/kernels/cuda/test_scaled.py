"""Rows of 8 bits: the roundings of torch, scales of each row alone, padding without an effect."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.scaled import MOST, quantise_rows, rescale

KINDS = [torch.int8, torch.float8_e4m3fn]


def some(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    # Large and small numbers in one row: the smallest are subnormal in FP8.
    return (made * torch.exp(2 * torch.randn(shape, generator=torch.Generator().manual_seed(1)))).to(device, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("M", "K", "L"), [(1, 64, 16), (3, 80, 16), (16, 576, 16), (17, 96, 32)])
def test_values_are_the_nearest(
    device: torch.device, kind: torch.dtype, dtype: torch.dtype, M: int, K: int, L: int
) -> None:
    x = some(device, M, K, dtype=dtype)
    values, scales = quantise_rows(x, kind, L)
    # The reference is computed on the CPU: on a device torch divides by a number through the reciprocal, rounded twice.
    exact = x.cpu().float()
    want_scales = exact.abs().amax(1, keepdim=True) / MOST[kind]
    assert torch.equal(scales[:M].cpu(), want_scales)
    exact /= want_scales
    want = torch.floor(exact + 0.5).to(kind) if kind is torch.int8 else exact.to(kind)
    assert torch.equal(values[:M].float().cpu(), want.float())
    assert not values[M:].float().any()
    assert torch.equal(scales[M:], torch.ones_like(scales[M:]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_and_a_row_of_one_large_number(device: torch.device, kind: torch.dtype) -> None:
    x = torch.zeros(2, 32, device=device)
    x[1, 5] = -1e30
    values, scales = quantise_rows(x, kind, 2)
    assert torch.equal(values[0].float(), x[0])
    assert values[1, 5].float() == -MOST[kind]
    torch.testing.assert_close(values.float() * scales, x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_those_beside_it(device: torch.device, kind: torch.dtype) -> None:
    x = some(device, 9, 128)
    whole = quantise_rows(x, kind, 16)
    for row in (0, 8):
        alone = quantise_rows(x[row : row + 1], kind, 32)
        assert all(torch.equal(a[0].float(), w[row].float()) for a, w in zip(alone, whole, strict=True))


def test_rows_of_a_wider_tensor_are_read_by_their_stride(device: torch.device) -> None:
    x = some(device, 4, 256)
    got, want = quantise_rows(x[:, 64:128], torch.int8, 16), quantise_rows(x[:, 64:128].contiguous(), torch.int8, 16)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("N", [48, 1500])
def test_sums_become_numbers(device: torch.device, N: int, bias: bool) -> None:
    sums = torch.randint(-(1 << 20), 1 << 20, (32, N), dtype=torch.int32, device=device)
    rows, columns = torch.rand(32, 1, device=device), torch.rand(N, device=device)
    offset = some(device, N) if bias else None
    want = sums[:5].float() * rows[:5] * columns + (0.0 if offset is None else offset.float())
    for dtype, rtol in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):  # the interpreter cuts bfloat16 off
        torch.testing.assert_close(rescale(sums, rows, columns, offset, 5, dtype), want.to(dtype), atol=1e-3, rtol=rtol)


def test_unsupported_inputs_are_rejected(device: torch.device) -> None:
    with pytest.raises(AssertionError):
        quantise_rows(some(device, 8, 32), torch.int8, 7)
    with pytest.raises(KeyError):
        quantise_rows(some(device, 8, 32), torch.uint8, 8)
    with pytest.raises(AssertionError):
        quantise_rows(torch.zeros(2, 32, dtype=torch.int32, device=device), torch.int8, 8)
