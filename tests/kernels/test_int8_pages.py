"""Keys and values of 8 bits: what is stored, attention over it, and that its bits depend on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.kv_pages import KVHeads, bytes_of_token, copy_page
from kernels.paged_attention import KVPages, paged_attention
from tests.kernels.attention_reference import inputs, paged_attention_reference, table_of
from tests.kernels.vector_units import assert_same_on_every_unit

CPU = torch.device("cpu")


def pages_of(N: int, Hkv: int, T: int, D: int, *, rest: float = 1.0) -> KVPages:
    """Return pages of random integers with random scales, `rest` times as large."""
    g = torch.Generator().manual_seed(3)
    pages = KVPages.allocate(N, Hkv, D, T, torch.int8, CPU)
    for part in (pages.k, pages.v):
        part.random_(-127, 128, generator=g)
    for scales in (pages.k_scales, pages.v_scales):
        assert scales is not None
        scales.copy_(torch.rand(scales.shape, generator=g) * rest / 50)
    return pages


def numbers(pages: KVPages) -> KVPages:
    """Return the same pages as floats."""
    assert pages.k_scales is not None
    assert pages.v_scales is not None
    k = pages.k.float() * pages.k_scales[:, :, None]
    return KVPages(k, pages.v.float() * pages.v_scales[..., None])


def stored(pages: KVPages, table_BN: torch.Tensor, positions_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values at some positions, [B, P, Hkv, D]."""
    T, at = pages.v.shape[2], positions_BP.clamp(min=0).long()
    page = table_BN.long().gather(1, at // T)
    return pages.k_NHTD[page, :, at % T], pages.v[page, :, at % T]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("P", "Hq", "Hkv", "D", "T", "limits"),
    [
        (1, 9, 3, 64, 16, {}),
        (5, 4, 1, 128, 32, {}),
        (3, 4, 4, 80, 16, {"softcap": 30.0}),
        (8, 8, 2, 256, 16, {"window": 21}),
        (40, 6, 2, 128, 16, {"chunk": 48, "sinks": True}),
    ],
)
def test_attention_equals_that_over_the_numbers_that_were_stored(
    P: int, Hq: int, Hkv: int, D: int, T: int, limits: dict[str, Any], dtype: torch.dtype
) -> None:
    starts = [0, 37, 5 * T - 2]
    B, N = len(starts), 320 // T + 1
    q, k, v = inputs(B, P, Hq, Hkv, D, dtype, None)
    k[1, 0] = 0  # a head without a largest number
    table = table_of(B, N, None)
    positions = (torch.tensor(starts)[:, None] + torch.arange(P)).int()
    positions[0, P - max(P // 3, P > 1) :] = -1  # padding
    args = {"scale": D**-0.5, **limits, "sinks_H": torch.arange(Hq) - 2.0 if limits.get("sinks") else None}
    args.pop("sinks", None)
    pages = pages_of(B * N, Hkv, T, D)
    got = paged_attention(q, k, v, pages, table, positions, **args)
    plain = numbers(pages)
    own_k, own_v = stored(plain, table, positions)
    live = positions >= 0
    for own, new in ((own_k, k), (own_v, v)):
        step = new.float().abs().amax(dim=3, keepdim=True) / 127
        assert bool(((own - new.float()).abs() <= step * 0.501)[live].all())
    want = paged_attention_reference(q.float(), own_k, own_v, plain, table, positions, **args)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
    assert not got[~live].any()


def test_result_bits_do_not_depend_on_the_batch_or_the_number_of_queries() -> None:
    starts = [3, 40, 250, 127]
    B, P, N = len(starts), 8, 20
    q, k, v = inputs(B, P, 3, 1, 64, torch.float32, None)
    table, positions = table_of(B, N, None), (torch.tensor(starts)[:, None] + torch.arange(P)).int()

    def run(b: slice, p: int) -> torch.Tensor:
        some = (part[b, :p] for part in (q, k, v))
        pages = pages_of(B * N, 1, 16, 64)
        return paged_attention(*some, pages, table[b], positions[b, :p].contiguous(), scale=0.125)

    whole = run(slice(0, B), P)
    assert_same_on_every_unit(lambda: run(slice(0, B), P))
    for b in range(B):
        assert torch.equal(run(slice(b, b + 1), P)[0], whole[b])
        assert torch.equal(run(slice(b, b + 1), 1)[0, 0], whole[b, 0])
    assert torch.equal(run(slice(0, B), 3), whole[:, :3])


@pytest.mark.parametrize("rest", [float("nan"), float("inf")])
def test_old_scales_after_the_last_position_have_no_effect(rest: float) -> None:
    q, k, v = inputs(1, 2, 4, 2, 64, torch.float32, None)
    table, positions = torch.arange(2).view(1, 2).int(), torch.tensor([[3, 4]], dtype=torch.int32)
    results = []
    for scale in (0.0, rest):
        pages = pages_of(2, 2, 16, 64)
        for part in (pages.k_scales, pages.v_scales):
            assert part is not None
            part[0, :, 5:], part[1] = scale, scale
        results.append(paged_attention(q, k, v, pages, table, positions, scale=0.125))
    assert torch.equal(*results)


def test_layers_have_zeroed_scales_of_their_own_and_a_copied_page_has_them() -> None:
    heads = [KVHeads(2, 32), KVHeads(1, 64), KVHeads(2, 32)]
    layers = KVPages.allocate_layers(heads, 4, 16, torch.int8, CPU)
    assert sum(part.nbytes for layer in layers for part in layer.tensors) == 64 * bytes_of_token(heads, torch.int8)
    assert not any(part.any() for layer in layers for part in layer.tensors)
    for number, part in enumerate(layers[1].tensors):
        part[3] = number + 1
    assert not any(part.any() for layer in layers[::2] for part in layer.tensors)
    copy_page(layers, 3, 0)
    assert all(torch.equal(part[0], part[3]) for part in layers[1].tensors)
