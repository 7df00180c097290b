"""Latent attention in its absorbed form: the numbers of the expanded form, and bits that depend on nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from kernels.blocks import BlockKind, PackedBlocks, can_multiply_blocks, quantised
from kernels.fused_arguments import NormKind, RMSNorm
from kernels.kv_pages import KVHeads, KVPages, bytes_of_token, copy_page
from kernels.latent import AbsorbedAttention, HeadProducts, LatentShape
from kernels.paged_attention import joined_attention
from tests.kernels.attention_reference import paged_attention_reference, table_of

CPU = torch.device("cpu")
SMALL = LatentShape(heads=5, unrotated=32, rotated=8, values=48, latent=64)
DEEPSEEK = LatentShape(heads=16, unrotated=128, rotated=64, values=128, latent=512)
NEEDS_BLOCKS = pytest.mark.skipif(not can_multiply_blocks(), reason="this CPU has no products over blocks")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def joined_pages(N: int, T: int, D: int, dtype: torch.dtype) -> KVPages:
    """Return pages of random numbers."""
    pages = KVPages.allocate(N, 1, D, T, dtype, CPU, joined=True)
    if dtype is torch.int8:
        pages.v.random_(-127, 128, generator=torch.Generator().manual_seed(3))
        assert pages.v_scales is not None
        pages.v_scales.copy_(rand(N, 1, T).abs() / 50)
    else:
        pages.v.copy_(rand(N, 1, T, D))
    return pages


def test_a_key_that_begins_with_its_value_is_stored_once() -> None:
    heads = [KVHeads(1, 576, 512)] * 2
    assert bytes_of_token(heads, torch.bfloat16) == 2 * 576 * 2
    assert bytes_of_token(heads, torch.int8) == 2 * (576 + 4)
    for dtype, parts in ((torch.bfloat16, 1), (torch.int8, 2)):
        layers = KVPages.allocate_layers(heads, 3, 16, dtype, CPU)
        assert all(layer.joined and len(layer.tensors) == parts for layer in layers)
        assert layers[0].v.data_ptr() != layers[1].v.data_ptr()
        assert layers[0].k_NHTD.shape == (3, 1, 16, 576)
        for layer in layers:
            layer.v[1] = 5
        copy_page(layers, 1, 2)
        assert bool((layers[1].v[2] == 5).all())
        assert not layers[1].v[0].any()


@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("P", "Hq", "D", "values", "T"), [(1, 16, 576, 512, 32), (5, 4, 48, 32, 16), (3, 21, 80, 64, 16)]
)
def test_attention_equals_that_over_keys_and_values_apart(
    P: int, Hq: int, D: int, values: int, T: int, kv: torch.dtype, threads: int
) -> None:
    dtype = torch.float32 if kv is torch.int8 else kv
    starts = [0, 37, 5 * T - 2]
    B, N = len(starts), 320 // T + 1
    q, k = rand(B, P, Hq, D, seed=1, dtype=dtype), rand(B, P, 1, D, seed=2, dtype=dtype)
    table = table_of(B, N, None)
    positions = (torch.tensor(starts)[:, None] + torch.arange(P)).int()
    positions[0, P - max(P // 3, P > 1) :] = -1  # padding
    pages = joined_pages(B * N, T, D, kv)
    got = joined_attention(q, k, pages, table, positions, scale=D**-0.5, values=values)
    live = positions >= 0
    plain, own = pages.v.float(), k.float()
    if kv is torch.int8:
        assert pages.v_scales is not None
        plain = plain * pages.v_scales[..., None]
        own = own.clone()
        at = positions.clamp(min=0).long()
        kept = plain[table.long().gather(1, at // T), :, at % T]
        step = own.abs().amax(dim=3, keepdim=True) / 127
        assert bool(((kept - own).abs() <= step * 0.501)[live].all())
        own = kept
    both = KVPages(plain.transpose(2, 3).contiguous(), plain)
    want = paged_attention_reference(q.float(), own, own, both, table, positions, scale=D**-0.5)[..., :values]
    tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
    assert not got[~live].any()


def products_of(weights_HKJ: torch.Tensor, form: str) -> HeadProducts:
    if form in ("float32", "bfloat16"):
        return HeadProducts(weights_HKJ.to(getattr(torch, form)))
    return HeadProducts([PackedBlocks(quantised(each.T.contiguous(), BlockKind[form])) for each in weights_HKJ])


FORMS = ["float32", "bfloat16", pytest.param("Q4", marks=NEEDS_BLOCKS), pytest.param("Q8", marks=NEEDS_BLOCKS)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("H", "K", "J"), [(3, 64, 48), (2, 32, 16), (4, 128, 512)])
def test_each_head_has_its_product_and_a_row_has_the_same_bits_in_any_company(
    H: int, K: int, J: int, form: str, threads: int
) -> None:
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    products = products_of(rand(H, K, J) / math.sqrt(K), form)
    wide = rand(29, H, K + 8, seed=1, dtype=dtype)
    x_NHK, out = wide[..., 4 : 4 + K], torch.zeros(29, H, J + 16, dtype=dtype)
    products(x_NHK, out[..., :J])
    want = torch.einsum("nhk,hkj->nhj", x_NHK.float(), products.dense())
    bound = {"float32": 1e-5, "bfloat16": 1e-2}.get(form, 2e-2)
    assert float((out[..., :J].float() - want).norm() / want.norm()) < bound
    assert not out[..., J:].any()
    for count in (1, 2, 3, 6, 7, 13):
        some = torch.empty(count, H, J, dtype=dtype)
        products(x_NHK[29 - count :], some)
        assert torch.equal(some, out[29 - count :, :, :J])


def layer_of(shape: LatentShape, form: str, *, neighbours: bool, dtype: torch.dtype) -> AbsorbedAttention:
    keys = products_of(rand(shape.heads, shape.unrotated, shape.latent, seed=5) / 8, form)
    values = products_of(rand(shape.heads, shape.latent, shape.values, seed=6) / 8, form)
    norm = RMSNorm(rand(shape.latent, seed=7, dtype=dtype).abs(), 1e-6, NormKind.ROUND_THEN_SCALE)
    return AbsorbedAttention(shape, 0.07, norm, keys, values, neighbours=neighbours)


def inputs_of(shape: LatentShape, N: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return queries, latents with shared keys, cosines and sines of N rows; the first two are one tensor's columns."""
    C = shape.heads * (shape.unrotated + shape.rotated)
    both = rand(N, C + shape.latent + shape.rotated, seed=8, dtype=dtype)
    angles = rand(N, shape.rotated // 2, seed=9)
    return both[:, :C], both[:, C:], angles.cos(), angles.sin()


def expanded(layer: AbsorbedAttention, q: torch.Tensor, kv: torch.Tensor, turns: torch.Tensor, *, neighbours: bool):
    """Return the attention of one sequence in the expanded form, in float32."""
    s = layer.shape

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(-1, (-1, 2)) if neighbours else torch.stack(x.chunk(2, -1), -1)
        out = torch.view_as_complex(pairs.contiguous()) * turns.view(len(x), *[1] * (x.dim() - 2), -1)
        return torch.view_as_real(out).flatten(-2)

    q_NHC, q_NHR = q.float().unflatten(1, (s.heads, -1)).split((s.unrotated, s.rotated), -1)
    c_NL, k_NR = kv.float().split((s.latent, s.rotated), 1)
    c_NL = c_NL * torch.rsqrt(c_NL.pow(2).mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight_H.float()
    k_NHC = torch.einsum("nl,hcl->nhc", c_NL, layer.keys.dense())
    v_NHV = torch.einsum("nl,hlv->nhv", c_NL, layer.values.dense())
    scores_HNN = torch.einsum("nhc,mhc->hnm", q_NHC, k_NHC) + torch.einsum("nhr,mr->hnm", turned(q_NHR), turned(k_NR))
    mask_NN = torch.ones(len(q), len(q)).tril().bool()
    weights_HNN = (scores_HNN * layer.scale).masked_fill(~mask_NN, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhv->nhv", weights_HNN, v_NHV).flatten(1)


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [SMALL, DEEPSEEK])
def test_a_layer_equals_the_expanded_form(shape: LatentShape, form: str, neighbours: bool) -> None:
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    layer, N = layer_of(shape, form, neighbours=neighbours, dtype=dtype), 21
    q, kv, cos, sin = inputs_of(shape, N, dtype)
    pages = joined_pages(2, 32, shape.kv_heads.width, dtype)
    positions = torch.arange(N, dtype=torch.int32)[None]
    got = layer(q, kv, cos, sin, pages, torch.tensor([[1]], dtype=torch.int32), positions)
    want = expanded(layer, q, kv, torch.complex(cos, sin), neighbours=neighbours)
    assert float((got.float() - want).norm() / want.norm()) < {"float32": 1e-5, "bfloat16": 2e-2}.get(form, 4e-2)
    assert not pages.v[1, :, :N, shape.latent + shape.rotated :].any(), "zeros after the key"


@pytest.mark.parametrize("form", FORMS)
def test_rows_have_the_same_bits_one_by_one(form: str, threads: int) -> None:
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    layer, N = layer_of(SMALL, form, neighbours=True, dtype=dtype), 21
    parts, table = inputs_of(SMALL, N, dtype), torch.tensor([[0], [1]], dtype=torch.int32)
    pages = joined_pages(2, 32, SMALL.kv_heads.width, dtype)
    positions = torch.arange(N, dtype=torch.int32)
    whole = layer(*parts, pages, table[:1], positions[None])
    for at in range(N):
        row = layer(*(part[at : at + 1] for part in parts), pages, table[1:], positions[None, at : at + 1])
        assert torch.equal(row[0], whole[at])
    assert torch.equal(pages.v[0, :, :N], pages.v[1, :, :N])
