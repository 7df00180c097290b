"""The experts of a mixture in one call: their own products, in the order of each row's choice, and bits of a row."""

from __future__ import annotations

import threading

import pytest
import torch

from kernels.blocks import BlockKind, PackedBlocks, can_multiply_blocks, quantised
from kernels.fused import gated
from kernels.fused_arguments import Activation
from kernels.mixture import GatedBlock, MixtureProducts, Scratch
from tests.kernels.block_cases import random_blocks

pytestmark = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")

H, INNER = 64, 96
LONG = 1100
"""Rows that a call takes in three parts."""


def some(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def block(seed: int, kind: BlockKind, act: Activation = Activation.SILU) -> GatedBlock:
    parts = [
        PackedBlocks(random_blocks(kind, N, K, seed + at), some(N, seed=seed + at + 50))
        for at, (N, K) in enumerate(((INNER * (1 + act.has_gate), H), (H, INNER)))
    ]
    return GatedBlock(*parts)


def chosen(rows: int, experts: int, each: int) -> torch.Tensor:
    """Return different experts for each row, [N, k], and none for some of them."""
    return some(rows, experts - 1, seed=rows).topk(each).indices if experts > each else torch.zeros(rows, each).long()


def by_expert(blocks: list[GatedBlock], act: Activation, x_NH: torch.Tensor, chosen_Nk: torch.Tensor) -> torch.Tensor:
    """Return what each row's experts give, [N, k, H], by the products themselves."""
    outputs = [each.down(gated(each.gate_up(x_NH), act)) for each in blocks]
    return torch.stack(
        [torch.stack([outputs[e][row] for e in choice]) for row, choice in enumerate(chosen_Nk.tolist())]
    )


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        *((act, BlockKind.Q8) for act in Activation),
        *((Activation.SILU, kind) for kind in BlockKind if kind != BlockKind.Q8),
    ],
)
@pytest.mark.parametrize(("rows", "experts", "each"), [(1, 3, 1), (7, 5, 2), (40, 17, 8), (LONG, 6, 2)])
def test_a_row_adds_its_experts_with_their_weights(
    act: Activation, kind: BlockKind, rows: int, experts: int, each: int
) -> None:
    blocks, x_NH = [block(100 * e, kind, act) for e in range(experts)], some(rows, H, seed=1)
    chosen_Nk, weights_Nk = chosen(rows, experts, each), some(rows, each, seed=2)
    got_NH = MixtureProducts(blocks, act, Scratch())(x_NH, chosen_Nk, weights_Nk)
    want_NH = (by_expert(blocks, act, x_NH, chosen_Nk) * weights_Nk[..., None]).sum(1)
    torch.testing.assert_close(got_NH, want_NH, rtol=1e-4, atol=1e-4)


def test_numbers_of_16_bits_are_rounded_once_at_the_end() -> None:
    blocks, x_NH = [block(100 * e, BlockKind.Q8) for e in range(5)], some(9, H, seed=1).bfloat16()
    mixture, chosen_Nk, weights_Nk = (
        MixtureProducts(blocks, Activation.SILU, Scratch()),
        chosen(9, 5, 2),
        some(9, 2, seed=2),
    )
    got_NH, whole_NH = mixture(x_NH, chosen_Nk, weights_Nk), mixture(x_NH.float(), chosen_Nk, weights_Nk)
    assert got_NH is not None
    assert whole_NH is not None
    assert torch.equal(got_NH, whole_NH.bfloat16())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_company(threads: int) -> None:
    blocks, x_NH = [block(100 * e, BlockKind.Q4) for e in range(7)], some(LONG, H, seed=1)
    mixture, before = MixtureProducts(blocks, Activation.SILU, Scratch()), torch.get_num_threads()
    chosen_Nk, weights_Nk = chosen(LONG, 7, 3).to(torch.int32), some(LONG, 3, seed=2)
    want_NH = mixture(x_NH, chosen_Nk, weights_Nk)
    assert want_NH is not None
    torch.set_num_threads(threads)
    try:
        for begin, end in ((0, 1), (3, 30), (500, 520), (20, 600), (0, LONG)):
            part = slice(begin, end)
            got_NH = mixture(x_NH[part], chosen_Nk[part], weights_Nk[part])
            assert got_NH is not None
            assert torch.equal(got_NH, want_NH[part]), (begin, end)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("number", [-1, 3])
def test_a_number_that_no_expert_has_gives_nothing(number: int) -> None:
    mixture = MixtureProducts([block(100 * e, BlockKind.Q8) for e in range(3)], Activation.SILU, Scratch())
    assert mixture(some(2, H, seed=1), torch.tensor([[0, 1], [2, number]]), torch.ones(2, 2)) is None


def test_mixtures_of_a_model_share_their_memory_and_take_turns() -> None:
    """Memory for each of many layers would be gigabytes. Calls of two threads do not disturb each other."""
    scratch = Scratch()
    mixtures = [MixtureProducts([block(seed, BlockKind.Q8)], Activation.SILU, scratch) for seed in (0, 500)]
    x_NH, only, weights = some(LONG, H, seed=1), torch.zeros(LONG, 1).long(), torch.ones(LONG, 1)
    want = [each(x_NH, only, weights) for each in mixtures]
    held = scratch.of(0)
    wrong = list[int]()

    def run(number: int) -> None:
        for _ in range(40):
            got_NH, want_NH = mixtures[number](x_NH, only, weights), want[number]
            assert got_NH is not None
            assert want_NH is not None
            if not torch.equal(got_NH, want_NH):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert scratch.of(0) == held, "rows are computed in parts, so the memory has a bound"


def test_no_rows_give_none() -> None:
    mixture = MixtureProducts([block(0, BlockKind.Q8)], Activation.SILU, Scratch())
    got_NH = mixture(torch.zeros(0, H), torch.zeros(0, 1).long(), torch.zeros(0, 1))
    assert got_NH is not None
    assert got_NH.shape == (0, H)


def test_what_the_native_code_relies_on_is_asserted() -> None:
    mixture = MixtureProducts([block(0, BlockKind.Q8)], Activation.SILU, Scratch())
    one, weight = torch.zeros(1, 1).long(), torch.ones(1, 1)
    for call in (
        (some(1, 2 * H, seed=1), one, weight),
        (some(H, 1, seed=1).T, torch.zeros(2, 1).long(), weight),
        (some(1, H, seed=1).double(), one, weight),
        (some(2 * H, 2, seed=1).T[:, :H], torch.zeros(2, 1).long(), torch.ones(2, 1)),
    ):
        with pytest.raises(AssertionError):
            mixture(*call)
    other = GatedBlock(*(PackedBlocks(quantised(some(*shape, seed=3), BlockKind.Q8)) for shape in ((64, H), (H, 32))))
    with pytest.raises(AssertionError):
        MixtureProducts([block(0, BlockKind.Q8), other], Activation.SILU, Scratch())
