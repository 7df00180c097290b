"""Attention after a joined product has the results of its two parts, over calls of changing sizes."""

from __future__ import annotations

import pytest
import torch

from kernels.fused import HeadForm, NormKind, RMSNorm, rotate
from kernels.fused_attention import QkvAttention
from kernels.paged_attention import KVPages, paged_attention

Hq, Hkv, D, T, N = 4, 2, 32, 16, 6


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("with_norm", "with_sinks", "form"),
    [
        (False, False, HeadForm()),
        (True, False, HeadForm()),
        (False, True, HeadForm()),
        (True, False, HeadForm(neighbours=True, whole_norms=True, norms_last=True)),
    ],
)
def test_fused_attention_has_the_bits_of_its_parts_after_any_earlier_calls(
    dtype: torch.dtype, with_norm: bool, with_sinks: bool, form: HeadForm
) -> None:
    widths = (Hq * D, Hkv * D) if form.whole_norms else (D, D)
    norms = [
        RMSNorm(rand(width, dtype=dtype, seed=s), 1e-6, NormKind.ONE_PLUS_SCALE) if with_norm else None
        for s, width in enumerate(widths, 1)
    ]
    sinks_H = rand(Hq, dtype=torch.float32, seed=3) if with_sinks else None
    attend = QkvAttention((Hq, Hkv), D, 0.2, 30.0, 21, *norms, sinks_H, form)
    # The caches change as well: the engine also calls it with those of a drafter and of the measurement at load.
    for B, P, cache, size in ((2, 3, 0, T), (1, 1, 0, T), (2, 3, 1, T), (3, 2, 1, T), (2, 3, 2, 2 * T)):
        ours, theirs = (KVPages.allocate(3 * N, Hkv, D, size, dtype, torch.device("cpu")) for _ in range(2))
        for pages in (ours, theirs):
            pages.k.copy_(rand(*pages.k.shape, dtype=dtype, seed=cache))
            pages.v.copy_(rand(*pages.v.shape, dtype=dtype, seed=cache + 1))
        table = torch.randperm(3 * N)[: B * N].view(B, N).int()
        positions = (torch.arange(B)[:, None] * 20 + torch.arange(P) + 3).int()
        positions[0, -1] = -1 if P > 1 else 5
        qkv = rand(B * P, (Hq + 2 * Hkv) * D, dtype=dtype, seed=P)
        padding = rand(cache, (Hq + 2 * Hkv) * D, dtype=dtype)
        cos, sin = (rand(B * P, D, dtype=dtype, seed=seed) for seed in (7, 8))
        whole = torch.cat([qkv, padding])
        got = attend(whole, cos, sin, ours, table, positions)
        rotate(qkv, cos, sin, heads=(Hq, Hkv), head_dim=D, q_norm=norms[0], k_norm=norms[1], form=form)
        q, k, v = qkv.view(B, P, Hq + 2 * Hkv, D).split((Hq, Hkv, Hkv), dim=2)
        options = {"scale": 0.2, "softcap": 30.0, "window": 21, "sinks_H": sinks_H}
        want = paged_attention(q, k, v, theirs, table, positions, **options)  # type: ignore[arg-type]
        assert torch.equal(got, torch.cat([want.view(B * P, Hq * D), torch.zeros(cache, Hq * D, dtype=dtype)]))
        assert torch.equal(whole, torch.cat([qkv, padding]))
        assert torch.equal(ours.k, theirs.k)
        assert torch.equal(ours.v, theirs.v)


@pytest.mark.parametrize("token_major", [False, True])
def test_queries_alone_attend_to_what_the_pages_have(token_major: bool, target: torch.device | None) -> None:
    """As after a layer that has stored the same rows. Heads may have 512 channels."""
    if token_major and target is None:
        pytest.skip("only device kernels read that layout")
    D, dtype = 64 if token_major else 512, torch.float32
    norm, v_norm = (RMSNorm(rand(D, dtype=dtype, seed=seed), 1e-6, NormKind.SCALE_THEN_ROUND) for seed in (1, 2))
    stores = QkvAttention((Hq, Hkv), D, 0.2, q_norm=norm, k_norm=norm, v_norm=v_norm)
    reads = QkvAttention((Hq, Hkv), D, 0.2, q_norm=norm, stores=False)
    pages = KVPages.allocate(2 * N, Hkv, D, T, dtype, torch.device("cpu"), token_major)
    table, positions = torch.randperm(2 * N).view(2, N).int(), torch.tensor([[20, 21, 22], [3, 4, -1]]).int()
    qkv, cos, sin = (rand(6, width, dtype=dtype, seed=width) for width in ((Hq + 2 * Hkv) * D, D, D))
    queries = qkv[:, : Hq * D].contiguous()
    want = stores(qkv, cos, sin, pages, table, positions)
    stored = [part.clone() for part in pages.tensors]
    got = reads(queries, cos, sin, pages, table, positions)
    assert torch.equal(got, want)
    assert all(torch.equal(part, before) for part, before in zip(pages.tensors, stored, strict=True))


def test_caches_of_8_bits_take_the_place_of_others_in_the_same_memory() -> None:
    """The allocator gives a new engine's cache the addresses of one that is gone."""
    attend, shape = QkvAttention((Hq, Hkv), D, 0.2), (N, Hkv, D, T)
    memory = [torch.zeros(N * Hkv * D * T) for _ in range(2)]
    table, positions = torch.randperm(N).view(1, N).int(), torch.tensor([[20, 21]], dtype=torch.int32)
    cos, sin = (rand(2, D, dtype=torch.float32, seed=seed) for seed in (7, 8))

    def pages_of(dtype: torch.dtype) -> KVPages:
        k, v = (part.zero_().view(dtype)[: part.numel()] for part in memory)
        scales = [torch.zeros(N, Hkv, T) if dtype is torch.int8 else None for _ in range(2)]
        return KVPages(k.view(shape), v.view(N, Hkv, T, D), False, *scales)

    for dtype in (torch.float32, torch.int8, torch.int8, torch.float32):
        results = []
        for one in (attend, QkvAttention((Hq, Hkv), D, 0.2)):
            pages, qkv = pages_of(dtype), rand(2, (Hq + 2 * Hkv) * D, dtype=torch.float32)
            results.append((one(qkv, cos, sin, pages, table, positions), *(part.clone() for part in pages.tensors)))
        assert all(torch.equal(got, want) for got, want in zip(*results, strict=True)), dtype
        assert all(part.any() for part in results[0])


def test_a_product_of_another_width_is_rejected() -> None:
    attend = QkvAttention((Hq, Hkv), D, 0.2)
    pages = KVPages.allocate(2, Hkv, D, T, torch.float32, torch.device("cpu"))
    angles, table, positions = torch.zeros(1, D), torch.zeros(1, 2).int(), torch.zeros(1, 1).int()
    with pytest.raises(AssertionError):
        attend(torch.zeros(1, (Hq + Hkv) * D), angles, angles, pages, table, positions)
