"""Low-rank products of several adapters, native and in Triton, have the results of plain torch, row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.low_rank import LowRankPart, LowRankTable
from kernels.low_rank_stacks import LowRankStacks, ProductShape
from tests.kernels.vector_units import assert_same_on_every_unit

Target = torch.device | None
Add = Callable[[int, torch.Tensor, torch.Tensor, list[int], int], torch.Tensor]
"""(product, inputs, outputs before, numbers, rows of each) -> outputs, in CPU memory."""
JOINED = ProductShape(1056, (70, 33, 48))
"""Two spans of inputs; tiles that end within a part."""
SINGLE = ProductShape(72, (100,))


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


def dtype_of(target: Target, half: bool) -> torch.dtype:
    if not half:
        return torch.float32
    # Triton's interpreter multiplies the bits of bf16.
    return torch.float16 if target is not None and target.type == "cpu" else torch.bfloat16


def adapters(target: Target, dtype: torch.dtype, changed: dict[int, dict[int, list[LowRankPart]]] | None = None) -> Add:
    """Return the products of `ADAPTERS`; `changed` are written over them."""
    if target is None:
        table = LowRankTable(2, 3)
        for number, products in (ADAPTERS | (changed or {})).items():
            kept = {
                at: [LowRankPart(p.a_RI.to(dtype), p.b_RO.to(dtype), p.begin, p.scale) for p in parts]
                for at, parts in products.items()
            }
            table.put(number, kept)

        def add(product: int, x: torch.Tensor, y: torch.Tensor, numbers: list[int], each: int) -> torch.Tensor:
            out = y.clone()
            table.add(product, x, out, torch.tensor(numbers, dtype=torch.int32), each)
            return out

        return add
    from kernels.cuda.low_rank import add_low_rank  # a CPU install has no Triton

    made = LowRankStacks([JOINED, SINGLE], 3, 24, dtype, target)
    for number, products in [*ADAPTERS.items(), *(changed or {}).items()]:
        for there, source in made.writes(number, products):
            there.copy_(source)

    def add_there(product: int, x: torch.Tensor, y: torch.Tensor, numbers: list[int], each: int) -> torch.Tensor:
        out, numbers_B = y.clone().to(target), torch.tensor(numbers, dtype=torch.int32, device=target)
        add_low_rank(x.to(target), out, made.products[product], numbers_B, each)
        return out.cpu()

    return add_there


def reference(
    x_NI: torch.Tensor, y_NO: torch.Tensor, product: int, numbers: list[int], each: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the sum in float32, of matrices rounded as the adapters'."""
    out_NO = y_NO.float().clone()
    for b, number in enumerate(numbers):
        rows = slice(b * each, (b + 1) * each)
        for part in ADAPTERS.get(number, {}).get(product, []):
            a_RI, b_RO = part.a_RI.to(dtype).float(), part.b_RO.to(dtype).float()
            columns = slice(part.begin, part.begin + b_RO.shape[1])
            out_NO[rows, columns] += part.scale * (x_NI[rows].float() @ a_RI.T @ b_RO)
    return out_NO


@pytest.mark.parametrize(("each", "half"), [(1, True), (5, False), (20, False)])
@pytest.mark.parametrize("product", [0, 1])
def test_equals_the_reference(target: Target, product: int, each: int, half: bool) -> None:
    dtype, shape, numbers = dtype_of(target, half), (JOINED, SINGLE)[product], [1, 0, 3]
    x_NI = some(len(numbers) * each, shape.inputs, seed=5).to(dtype)
    y_NO = some(len(numbers) * each, shape.outputs, seed=6).to(dtype)
    want = reference(x_NI, y_NO, product, numbers, each, dtype)
    add = adapters(target, dtype)
    got = add(product, x_NI, y_NO, numbers, each)
    if target is None:
        assert_same_on_every_unit(lambda: add(product, x_NI, y_NO, numbers, each))
    bounds = {"atol": 2e-2, "rtol": 1e-2} if half else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(got.float(), want, **bounds)
    untouched = slice(each, 2 * each)
    assert torch.equal(got[untouched], y_NO[untouched]), "a row without an adapter was written"


@pytest.mark.parametrize(
    ("target", "half"), [("native", True), ("native", False), ("triton", True)], indirect=["target"]
)
def test_a_row_has_the_same_bits_in_any_company(target: Target, half: bool) -> None:
    dtype = dtype_of(target, half)
    add, x_NI, y_NO = adapters(target, dtype), *(some(18, width, seed=7).to(dtype) for width in (1056, 151))

    def run(rows: slice, numbers: list[int]) -> torch.Tensor:
        return add(0, x_NI[rows].contiguous(), y_NO[rows], numbers, len(y_NO[rows]) // len(numbers))

    whole = run(slice(0, 18), [3])
    assert torch.equal(run(slice(0, 18), [3, 3, 3]), whole)
    assert torch.equal(run(slice(6, 12), [1, 3, 0])[2:4], whole[8:10])
    assert torch.equal(run(slice(4, 8), [3, 3]), whole[4:8])
    for row in (5, 17):
        assert torch.equal(run(slice(row, row + 1), [3]), whole[row : row + 1])


def test_a_number_has_the_matrices_that_were_written_last(target: Target) -> None:
    add = adapters(target, torch.float32, {1: ADAPTERS[3]})  # nothing for the second product
    x_NI, y_NO = (some(2, width, seed=8) for width in (SINGLE.inputs, SINGLE.outputs))
    assert torch.equal(add(1, x_NI, y_NO, [1], 2), y_NO)
    if target is None:
        table = LowRankTable(2, 3)
        table.put(1, ADAPTERS[1])
        assert table.max_rank == 24
        table.remove(1)
        table.add(1, x_NI, y_NO, torch.tensor([1], dtype=torch.int32), 2)
        assert torch.equal(y_NO, some(2, SINGLE.outputs, seed=8)), "a removed number has no matrices"


def test_the_bytes_of_an_adapter_are_those_of_its_part_of_the_stacks() -> None:
    made = LowRankStacks([JOINED, SINGLE], 1, 24, torch.float16, torch.device("cpu"))
    tensors = [t for p in made.products for t in (p.a_MXI, p.b_MX)] + [made._ranks_MQP, made._scales_MQP]
    held = sum(t.numel() * t.element_size() for t in tensors)
    assert LowRankStacks.num_bytes([JOINED, SINGLE], 24, torch.float16) == held
