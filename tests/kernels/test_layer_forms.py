"""Layers of different forms in one native forward: heads of two sizes, shared keys and values, inputs by layer.

Bits of a row in any company, and of what a forward leaves out. Not responsible for: the numbers, which are compared
with those of models (see tests/gpu_engine/model/test_quantised.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.blocks import BlockKind, PackedBlocks, can_multiply_blocks
from kernels.forward import Forward
from kernels.forward_inputs import ForwardInput, ForwardInputs
from kernels.forward_layers import ForwardAttention, ForwardLayer, Norm
from kernels.fused_arguments import Activation, KeyValues
from kernels.kv_pages import KVHeads, KVPages
from kernels.mixture import GatedBlock
from tests.kernels.block_cases import random_blocks

pytestmark = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")

H, VOCAB, PAGE, WIDTH, HEADS = 64, 70, 16, 32, 4
FORMS = (
    (0, KVHeads(2, 16), KeyValues.OWN, 96),
    (1, KVHeads(1, 48), KeyValues.FROM_KEYS, 160),
    (0, KVHeads(2, 16), KeyValues.SHARED, 192),
    (1, KVHeads(1, 48), KeyValues.SHARED, 96),
)
"""Of each layer: its place in the cache, heads, key_values, and channels of its block."""
COUNTS = (130, 5, 61)
"""Rows of sequences: together they are shared by rows between up to four threads."""


def some(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def packed(outputs: int, inputs: int, seed: int) -> PackedBlocks:
    return PackedBlocks(random_blocks(BlockKind.Q8, outputs, inputs, seed))


def norm(width: int, seed: int) -> Norm:
    return Norm(some(width, seed=seed), 1e-5)


def layer_of(at: int, place: int, heads: KVHeads, key_values: KeyValues, inner: int) -> ForwardLayer:
    seed, stores = 100 * at, key_values is not KeyValues.SHARED
    angles_LR = some(max(COUNTS), heads.width, seed=heads.width)
    channels = key_values.product_heads((HEADS, heads.number)) * heads.width
    attention = ForwardAttention(
        place=place,
        kv_heads=heads,
        qkv=packed(channels, H, seed),
        output=packed(H, HEADS * heads.width, seed + 1),
        q_norm=norm(heads.width, seed + 8),
        k_norm=norm(heads.width, seed + 9) if stores else None,
        v_norm=norm(heads.width, seed + 10) if stores else None,
        cos_LR=angles_LR.cos(),
        sin_LR=angles_LR.sin(),
        scale=0.1,
        softcap=0.0,
        window=20 if place == 0 else 0,
        key_values=key_values,
    )
    return ForwardLayer(
        attention=attention,
        recurrence=None,
        block=GatedBlock(packed(2 * inner, H, seed + 2), packed(H, inner, seed + 3)),
        act=Activation.GELU_TANH,
        pre_attention=norm(H, seed + 4),
        post_attention=norm(H, seed + 5),
        pre_block=norm(H, seed + 6),
        post_block=norm(H, seed + 7),
        input=ForwardInput(packed(WIDTH, H, seed + 11), packed(H, WIDTH, seed + 12), some(H, seed=seed + 13), 1e-5),
        stream_scale=0.5 + 0.25 * at,
    )


@pytest.fixture(scope="module")
def forward() -> Forward:
    total = len(FORMS) * WIDTH
    inputs = ForwardInputs(packed(total, H, 1), some(VOCAB, total, seed=2), some(WIDTH, seed=3), 1e-5, 0.125, 5.5, 0.7)
    layers = [layer_of(at + 1, *form) for at, form in enumerate(FORMS)]
    return Forward(some(VOCAB, H, seed=4), layers, norm(H, 5), packed(VOCAB, H, 6), HEADS, inputs=inputs)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Run:
    """One forward of some sequences; the rows after `num_logits` only fill the pages."""

    def __init__(self, forward: Forward, sequences: tuple[int, ...], num_logits: int, tap: int | None = None) -> None:
        counts, self.per = [COUNTS[s] for s in sequences], -(-max(COUNTS) // PAGE)
        ids_N = torch.cat([(torch.arange(COUNTS[s]) * 37 + 11 * s) % VOCAB for s in sequences])
        positions_N = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts])
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
        table = torch.arange(self.per * len(counts), dtype=torch.int32).view(len(counts), self.per)
        sizes = [heads for place, heads, key_values, _ in FORMS if key_values is not KeyValues.SHARED]
        self.pages = KVPages.allocate_layers(sizes, table.numel(), PAGE, torch.float32, torch.device("cpu"))
        taps = {} if tap is None else {tap: forward.new_tap(len(ids_N))}
        run = (ids_N, positions_N, starts, self.pages, table)
        self.logits_NV = forward(*run, num_logits=num_logits, taps=taps).clone()
        self.tap_NH = None if tap is None else taps[tap]

    def pages_of(self, sequence: int) -> list[torch.Tensor]:
        rows = slice(sequence * self.per, (sequence + 1) * self.per)
        return [part[rows] for page in self.pages for part in (page.k, page.v)]


def test_a_row_has_its_bits_in_any_company(forward: Forward, threads: int) -> None:
    whole = Run(forward, (0, 1, 2), sum(COUNTS))
    assert whole.logits_NV.isfinite().all()
    for sequence, logits_PV in enumerate(whole.logits_NV.split(COUNTS)):
        alone = Run(forward, (sequence,), COUNTS[sequence])
        assert torch.equal(alone.logits_NV, logits_PV)
        assert all(torch.equal(*both) for both in zip(alone.pages_of(0), whole.pages_of(sequence), strict=True))


@pytest.mark.parametrize("num_logits", [0, 3, 130, 135])
def test_rows_without_logits_fill_the_pages(forward: Forward, threads: int, num_logits: int) -> None:
    """They leave after the keys and values of the second layer, the last that stores some."""
    whole, part = Run(forward, (0, 1, 2), sum(COUNTS)), Run(forward, (0, 1, 2), num_logits)
    assert torch.equal(part.logits_NV, whole.logits_NV[:num_logits])
    for sequence in range(len(COUNTS)):
        assert all(torch.equal(*both) for both in zip(part.pages_of(sequence), whole.pages_of(sequence), strict=True))


@pytest.mark.parametrize("tap", range(len(FORMS) + 1))
def test_a_tap_has_every_row_whatever_logits_are_wanted(forward: Forward, threads: int, tap: int) -> None:
    whole, part = Run(forward, (0, 1, 2), sum(COUNTS), tap), Run(forward, (0, 1, 2), 7, tap)
    assert whole.tap_NH is not None
    assert part.tap_NH is not None
    assert torch.equal(part.tap_NH, whole.tap_NH)
    assert whole.tap_NH.any(dim=1).all()
    assert torch.equal(part.logits_NV, whole.logits_NV[:7])
