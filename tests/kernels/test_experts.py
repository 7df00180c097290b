"""Mixtures of experts in the native forward: the experts' own outputs, the router's choice, and bits of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.blocks import BlockKind, PackedBlocks, can_multiply_blocks, quantised
from kernels.forward import Forward
from kernels.forward_layers import ForwardAttention, ForwardLayer, Norm
from kernels.fused_arguments import Activation
from kernels.kv_pages import KVHeads, KVPages
from kernels.mixture import Choice, GatedBlock, Mixture
from tests.kernels.block_cases import random_blocks

pytestmark = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")

H, INNER, VOCAB, PAGE = 64, 96, 70, 16
HEADS, HEAD_DIM = (4, 2), 16
LONG = 600
"""Rows that a mixture takes in two parts."""


def some(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def packed(
    outputs: int, inputs: int, seed: int, kind: BlockKind = BlockKind.Q8, *, biased: bool = False
) -> PackedBlocks:
    bias_N = some(outputs, seed=seed + 1000) if biased else None
    return PackedBlocks(random_blocks(kind, outputs, inputs, seed), bias_N)


def block(
    seed: int, kind: BlockKind = BlockKind.Q8, act: Activation = Activation.SILU, *, biased: bool = False
) -> GatedBlock:
    first = packed(INNER * (1 + act.has_gate), H, seed, kind, biased=biased)
    return GatedBlock(first, packed(H, INNER, seed + 1, kind, biased=biased))


def forward_of(blocks: Sequence[GatedBlock | Mixture], act: Activation = Activation.SILU) -> Forward:
    """Return a model with one layer for each block; all else is the same for the same number of layers."""
    embedding_VH, table_LR = some(VOCAB, H, seed=1), some(LONG, HEAD_DIM, seed=2)
    layers = [
        ForwardLayer(
            attention=ForwardAttention(
                place=at,
                kv_heads=KVHeads(HEADS[1], HEAD_DIM),
                qkv=packed((HEADS[0] + 2 * HEADS[1]) * HEAD_DIM, H, 10 * at),
                output=packed(H, HEADS[0] * HEAD_DIM, 10 * at + 1),
                q_norm=None,
                k_norm=None,
                cos_LR=table_LR.cos(),
                sin_LR=table_LR.sin(),
                scale=0.25,
                softcap=0.0,
                window=0,
            ),
            recurrence=None,
            block=each,
            act=act,
            pre_attention=Norm(some(H, seed=3), 1e-5),
            post_attention=None,
            pre_block=Norm(some(H, seed=4), 1e-5),
            post_block=None,
        )
        for at, each in enumerate(blocks)
    ]
    return Forward(embedding_VH, layers, Norm(torch.ones(H), 1e-5), packed(VOCAB, H, 5), HEADS[0])


@dataclass(frozen=True)
class Rows:
    """Some sequences, of `counts` rows each."""

    counts: tuple[int, ...]

    def run(self, forward: Forward, num_layers: int, tap: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the input of layer `tap`, of all rows."""
        N, per = sum(self.counts), -(-max(self.counts) // PAGE)
        ids_N = torch.cat([(torch.arange(count) * 37 + 11 * s) % VOCAB for s, count in enumerate(self.counts)])
        positions_N = torch.cat([torch.arange(count, dtype=torch.int32) for count in self.counts])
        starts = torch.tensor([0, *torch.tensor(self.counts).cumsum(0)], dtype=torch.int32)
        table = torch.arange(per * len(self.counts), dtype=torch.int32).view(len(self.counts), per)
        shape = (per * len(self.counts), HEADS[1])
        pages = [
            KVPages(torch.zeros(*shape, HEAD_DIM, PAGE), torch.zeros(*shape, PAGE, HEAD_DIM)) for _ in range(num_layers)
        ]
        taps = {tap: forward.new_tap(N)}
        logits_NV = forward(ids_N, positions_N, starts, pages, table, num_logits=N, taps=taps)
        return logits_NV.clone(), taps[tap]


def routed(x_NH: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """Return the weight of each expert in each row, [N, E]; 0: it is not chosen."""
    normed_NH = torch.nn.functional.rms_norm(x_NH.double(), (H,), some(H, seed=4).double(), 1e-5)
    outputs_NE = normed_NH @ mixture.router_EH.double().T  # a router of few bits is exact here
    if mixture.router_bias_E is not None:
        outputs_NE = outputs_NE + mixture.router_bias_E
    weights_Nk, chosen_Nk = mixture.choice(outputs_NE)
    return torch.zeros_like(outputs_NE).scatter(1, chosen_Nk, weights_Nk.double())


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        *((act, BlockKind.Q8) for act in Activation),
        *((Activation.SILU, kind) for kind in BlockKind if kind != BlockKind.Q8),
    ],
)
@pytest.mark.parametrize(("renormalises", "biased"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("experts", "chosen", "counts"), [(5, 2, (7, 1)), (17, 4, (40,)), (3, 3, (1,)), (40, 1, (LONG,)), (6, 2, (LONG, 9))]
)
def test_a_row_adds_its_experts_with_their_weights(
    act: Activation,
    kind: BlockKind,
    renormalises: bool,
    biased: bool,
    experts: int,
    chosen: int,
    counts: tuple[int, ...],
) -> None:
    """What an expert gives is what a model with this expert as its block adds."""
    blocks, rows = [block(100 + 2 * e, kind, act, biased=biased) for e in range(experts)], Rows(counts)
    bias_E = some(experts, seed=7) if biased else None
    mixture = Mixture(tuple(blocks), some(experts, H, seed=6, scale=0.3), Choice(chosen, renormalises), bias_E)
    nothing = GatedBlock(blocks[0].gate_up, PackedBlocks(quantised(torch.zeros(H, INNER), BlockKind.Q8)))
    _, before_NH = rows.run(forward_of([nothing, nothing], act), 2, tap=1)
    given_ENH = torch.stack([rows.run(forward_of([each, nothing], act), 2, tap=1)[1] for each in blocks]) - before_NH
    _, got_NH = rows.run(forward_of([mixture, nothing], act), 2, tap=1)
    want_NH = before_NH + torch.einsum("ne,enh->nh", routed(before_NH, mixture), given_ENH.double())
    torch.testing.assert_close(got_NH, want_NH.float(), rtol=1e-5, atol=1e-5)


CHOICES = {
    "sigmoid": Choice(2, renormalises=False, of_sigmoid=True),
    "sigmoid, corrected": Choice(2, True, True, some(8, seed=12), 2.5),
    "softmax, corrected": Choice(3, True, False, some(8, seed=12, scale=0.2)),
    "of groups": Choice(3, renormalises=False, groups=4, kept=2),
    "of groups by two": Choice(3, True, True, some(8, seed=12, scale=0.2), 2.5, groups=4, kept=2, by_two=True),
    "scaled": Choice(2, renormalises=False, scale=0.25),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("gate", [None, "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_corrections_and_a_shared_expert(choice: str, gate: str | None, dtype: torch.dtype) -> None:
    """The shared expert is wider than the others, and than the block of the next layer."""
    blocks, rows = [block(100 + 2 * e) for e in range(8)], Rows((40, 3))
    shared = GatedBlock(packed(256, H, 300), packed(H, 128, 301))
    gate_H = some(H, seed=9, scale=0.2) if gate else None
    router_EH = some(8, H, seed=6, scale=0.3).to(dtype)
    mixture = Mixture(tuple(blocks), router_EH, CHOICES[choice], None, shared, gate_H)

    def like(each: GatedBlock) -> GatedBlock:
        """Return a block of the same sizes that adds nothing."""
        return GatedBlock(each.gate_up, PackedBlocks(quantised(torch.zeros(H, each.down.num_inputs), BlockKind.Q8)))

    _, before_NH = rows.run(forward_of([like(shared)] * 2), 2, tap=1)
    given_ENH = torch.stack([rows.run(forward_of([each, like(each)]), 2, tap=1)[1] for each in (*blocks, shared)])
    given_ENH = given_ENH - before_NH
    _, got_NH = rows.run(forward_of([mixture, like(blocks[0])]), 2, tap=1)
    normed_NH = torch.nn.functional.rms_norm(before_NH, (H,), some(H, seed=4), 1e-5)
    share_N1 = torch.ones(len(got_NH), 1) if gate_H is None else (normed_NH @ gate_H)[:, None].sigmoid()
    weights_NE = routed(before_NH, mixture)
    assert len({tuple(row.nonzero().flatten().tolist()) for row in weights_NE}) > 3, "rows take different experts"
    want_NH = before_NH + torch.einsum("ne,enh->nh", weights_NE, given_ENH[:-1].double()) + share_N1 * given_ENH[-1]
    torch.testing.assert_close(got_NH, want_NH.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", BlockKind)
def test_one_expert_is_a_gated_block(kind: BlockKind) -> None:
    only, rows = block(100, kind), Rows((50, 3))
    mixture = Mixture((only,), some(1, H, seed=6), Choice(1, renormalises=True))
    want, got = (rows.run(forward_of([each, each]), 2, tap=1) for each in (only, mixture))
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0], want[0])


def test_gated_blocks_and_mixtures_may_alternate_and_have_sizes_of_their_own() -> None:
    """A narrow expert is a wide block whose other channels have no weights."""
    gate_up, down = some(2, 32, H, seed=7, scale=0.2), some(H, 32, seed=8, scale=0.2)
    narrow = GatedBlock(*(PackedBlocks(quantised(part, BlockKind.Q8)) for part in (gate_up.flatten(0, 1), down)))
    padded = (
        torch.nn.functional.pad(gate_up, (0, 0, 0, INNER - 32)).flatten(0, 1),
        torch.nn.functional.pad(down, (0, 64)),
    )
    wide = GatedBlock(*(PackedBlocks(quantised(part, BlockKind.Q8)) for part in padded))
    mixture, rows = Mixture((narrow,), some(1, H, seed=6), Choice(1, renormalises=True)), Rows((9,))
    got, want = (rows.run(forward_of([each, block(90), each]), 3, tap=2) for each in (mixture, wide))
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0], want[0])


def test_the_first_of_equal_experts_are_chosen() -> None:
    blocks, rows = [block(100 + 2 * e) for e in range(20)], Rows((5,))
    equal = Mixture(tuple(blocks), torch.zeros(20, H), Choice(2, renormalises=True))
    first = Mixture(tuple(blocks[:2]), torch.zeros(2, H), Choice(2, renormalises=True))
    assert torch.equal(rows.run(forward_of([equal]), 1, tap=1)[0], rows.run(forward_of([first]), 1, tap=1)[0])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_company(threads: int) -> None:
    """Alone, in a batch, and in a part of a long forward; whatever the number of threads."""
    blocks = tuple(block(100 + 2 * e, BlockKind.Q4) for e in range(8))
    mixture = Mixture(blocks, some(8, H, seed=6), Choice(3, renormalises=True))
    forward, before = forward_of([mixture, mixture]), torch.get_num_threads()
    want_NV = Rows((LONG, 20)).run(forward, 2, tap=1)[0]
    torch.set_num_threads(threads)
    try:
        assert torch.equal(Rows((LONG, 20)).run(forward, 2, tap=1)[0], want_NV)
        for count in (1, 2, 33, 512, 513):
            assert torch.equal(Rows((count,)).run(forward, 2, tap=1)[0], want_NV[:count]), count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "bad",
    [
        "a router in another dtype",
        "too many chosen",
        "groups of unequal size",
        "too many of the groups",
        "experts of two sizes",
        "another count",
        "a long bias",
        "a short correction",
        "a gate without an expert",
        "an expert that only one has",
    ],
)
def test_what_the_native_code_relies_on_is_asserted(bad: str) -> None:
    mixture = Mixture((block(100), block(102)), some(2, H, seed=6), Choice(2, renormalises=True))
    others = {
        "a router in another dtype": replace(mixture, router_EH=mixture.router_EH.double()),
        "a short correction": replace(mixture, choice=replace(mixture.choice, correction_E=torch.zeros(1))),
        "a gate without an expert": replace(mixture, shared_gate_H=torch.zeros(H)),
        "an expert that only one has": replace(mixture, shared=block(104)),
        "a long bias": replace(mixture, router_bias_E=torch.zeros(3)),
        "too many chosen": replace(mixture, choice=Choice(3, renormalises=True)),
        "groups of unequal size": replace(mixture, choice=Choice(1, renormalises=True, groups=3)),
        "too many of the groups": replace(mixture, choice=Choice(2, renormalises=True, groups=2)),
        "experts of two sizes": replace(mixture, experts=(block(100), GatedBlock(packed(64, H, 1), packed(H, 32, 2)))),
        "another count": replace(
            mixture, experts=mixture.experts[:1], router_EH=mixture.router_EH[:1], choice=Choice(1, renormalises=True)
        ),
    }
    with pytest.raises(AssertionError):
        forward_of([mixture, others[bad]])
