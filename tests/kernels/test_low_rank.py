"""Low-rank products: equal to plain torch, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch

from kernels.low_rank import LowRankPart, LowRankTable

SPLITS = {
    "one part": [(0, 40, 5)],
    "three parts": [(0, 48, 4), (48, 16, 9), (64, 16, 1)],
    "a part that is not adapted": [(64, 21, 3)],
}
"""Of each product: the first output, the outputs and the rank of every part."""


def table_of(
    inputs: int, adapters: int, generator: torch.Generator
) -> tuple[LowRankTable, list[list[list[LowRankPart]]]]:
    """Return a table, and its parts by adapter and product; every second adapter is in bfloat16."""
    table, made = LowRankTable(len(SPLITS), adapters), []
    for number in range(1, adapters + 1):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        products = [
            [
                LowRankPart(
                    torch.randn(rank, inputs, generator=generator).to(dtype),
                    torch.randn(rank, outputs, generator=generator).to(dtype),
                    begin,
                    0.5,
                )
                for begin, outputs, rank in parts
            ]
            for parts in SPLITS.values()
        ]
        table.put(number, dict(enumerate(products)))
        made.append(products)
    return table, made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [64, 75])
def test_the_sum_is_torchs(inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    table, adapters = table_of(inputs, 2, generator)
    numbers = torch.tensor([2, 0, 1], dtype=torch.int32)
    x = torch.randn(6, inputs, generator=generator).to(dtype)
    for product in range(len(SPLITS)):
        before = torch.randn(6, 96, generator=generator).to(dtype)
        y, want = before.clone(), before.float()
        table.add(product, x, y, numbers, 2)
        for row in range(6):
            for part in adapters[numbers[row // 2] - 1][product] if numbers[row // 2] else []:
                added = part.scale * (x[row].float() @ part.a_RI.float().T) @ part.b_RO.float()
                want[row, part.begin : part.begin + len(added)] += added
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-1}
        torch.testing.assert_close(y.float(), want, **tolerance)
        assert torch.equal(y[2:4], before[2:4]), "rows without an adapter are not touched"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    table, _ = table_of(512, 3, generator)
    x, numbers = torch.randn(90, 512, generator=generator).to(dtype), torch.arange(90, dtype=torch.int32) % 4
    together, before = torch.ones(90, 96, dtype=dtype), torch.ones(1, 96, dtype=dtype)
    table.add(1, x, together, numbers, 1)
    for row in range(90):
        alone = before.clone()
        table.add(1, x[row : row + 1].contiguous(), alone, numbers[row : row + 1].contiguous(), 1)
        assert torch.equal(alone[0], together[row])


def test_a_number_is_used_again() -> None:
    table, _ = table_of(64, 2, torch.Generator().manual_seed(0))
    assert table.max_rank == 14
    for number in (1, 2):
        table.remove(number)
    y = torch.zeros(2, 96)
    table.add(0, torch.ones(2, 64), y, torch.tensor([1, 2], dtype=torch.int32), 1)
    assert not y.any()
    table.put(1, {0: [LowRankPart(torch.ones(1, 64), torch.ones(1, 8), 4)]})
    table.add(0, torch.ones(2, 64), y, torch.tensor([1, 2], dtype=torch.int32), 1)
    assert y[0].tolist() == [0.0] * 4 + [64.0] * 8 + [0.0] * 84
    assert not y[1].any()
