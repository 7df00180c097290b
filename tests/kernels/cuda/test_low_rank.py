"""The low-rank products of several adapters have the results of plain torch, row by row."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.low_rank import add_low_rank
from kernels.low_rank import LowRankPart
from kernels.low_rank_stacks import LowRankStacks, ProductShape

JOINED = ProductShape(1056, (70, 33, 48))
"""Two spans of inputs; tiles that end within a part."""
SINGLE = ProductShape(72, (100,))


def half(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter multiplies the bits of bf16


def some(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4


def parts_of(shape: ProductShape, ranks: tuple[int, ...], seed: int) -> list[LowRankPart]:
    """Return parts of these ranks; a part of rank 0 is left out."""
    found, begin = [], 0
    for p, (width, rank) in enumerate(zip(shape.widths, ranks, strict=True)):
        if rank:
            a_RI, b_RO = some(rank, shape.inputs, seed=seed + p), some(rank, width, seed=seed + 10 + p)
            found.append(LowRankPart(a_RI, b_RO, begin, scale=0.5 + p))
        begin += width
    return found


ADAPTERS = {
    1: {0: parts_of(JOINED, (4, 0, 20), 1), 1: parts_of(SINGLE, (24,), 2)},
    3: {0: parts_of(JOINED, (17, 8, 1), 3)},
}
"""By number; adapter 3 has nothing for the second product, and number 2 is free."""


def stacks(device: torch.device, dtype: torch.dtype) -> LowRankStacks:
    made = LowRankStacks([JOINED, SINGLE], 3, 24, dtype, device)
    for number, products in ADAPTERS.items():
        for target, source in made.writes(number, products):
            target.copy_(source)
    return made


def reference(
    x_NI: torch.Tensor, y_NO: torch.Tensor, product: int, numbers: list[int], each: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the sum in float32, of matrices rounded as the stacks'."""
    out_NO = y_NO.float().clone()
    for b, number in enumerate(numbers):
        rows = slice(b * each, (b + 1) * each)
        for part in ADAPTERS.get(number, {}).get(product, []):
            a_RI, b_RO = part.a_RI.to(dtype).float(), part.b_RO.to(dtype).float()
            columns = slice(part.begin, part.begin + b_RO.shape[1])
            out_NO[rows, columns] += part.scale * (x_NI[rows].float() @ a_RI.T @ b_RO)
    return out_NO


@pytest.mark.parametrize(("each", "wide"), [(1, False), (5, True), (20, True)])
@pytest.mark.parametrize("product", [0, 1])
def test_equals_the_reference(device: torch.device, product: int, each: int, wide: bool) -> None:
    dtype = torch.float32 if wide else half(device)
    shape, numbers = (JOINED, SINGLE)[product], [1, 0, 3]
    x_NI = some(len(numbers) * each, shape.inputs, seed=5).to(dtype)
    y_NO = some(len(numbers) * each, shape.outputs, seed=6).to(dtype)
    want = reference(x_NI, y_NO, product, numbers, each, dtype)
    got, stack = y_NO.to(device), stacks(device, dtype).products[product]
    add_low_rank(x_NI.to(device), got, stack, torch.tensor(numbers, dtype=torch.int32, device=device), each)
    bounds = {"atol": 1e-4, "rtol": 1e-4} if wide else {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(got.cpu().float(), want, **bounds)
    untouched = slice(each, 2 * each)
    assert torch.equal(got.cpu()[untouched], y_NO[untouched]), "a row without an adapter was written"


def test_a_row_has_the_same_bits_in_any_company(device: torch.device) -> None:
    dtype = half(device)
    stack = stacks(device, dtype).products[0]
    x_NI, y_NO = (some(18, width, seed=7).to(device, dtype) for width in (JOINED.inputs, JOINED.outputs))

    def run(rows: slice, numbers: list[int]) -> torch.Tensor:
        y = y_NO[rows].clone()
        each = len(y) // len(numbers)
        add_low_rank(x_NI[rows], y, stack, torch.tensor(numbers, dtype=torch.int32, device=device), each)
        return y

    whole = run(slice(0, 18), [3])
    assert torch.equal(run(slice(0, 18), [3, 3, 3]), whole)
    assert torch.equal(run(slice(4, 8), [3, 3]), whole[4:8])
    for row in (5, 17):
        assert torch.equal(run(slice(row, row + 1), [3]), whole[row : row + 1])


def test_a_number_has_the_matrices_that_were_written_last(device: torch.device) -> None:
    made, each = stacks(device, torch.float32), 2
    x_NI, y_NO = (some(each, width, seed=8) for width in (SINGLE.inputs, SINGLE.outputs))
    for target, source in made.writes(1, ADAPTERS[3]):  # nothing for this product
        target.copy_(source)
    got = y_NO.to(device)
    numbers_B = torch.tensor([1], dtype=torch.int32, device=device)
    add_low_rank(x_NI.to(device), got, made.products[1], numbers_B, each)
    assert torch.equal(got.cpu(), y_NO)


def test_the_bytes_of_an_adapter_are_those_of_its_part_of_the_stacks() -> None:
    made = LowRankStacks([JOINED, SINGLE], 1, 24, torch.float16, torch.device("cpu"))
    tensors = [t for p in made.products for t in (p.a_MXI, p.b_MX)] + [made._ranks_MQP, made._scales_MQP]
    held = sum(t.numel() * t.element_size() for t in tensors)
    assert LowRankStacks.num_bytes([JOINED, SINGLE], 24, torch.float16) == held
