"""The native attention has the results of plain torch, which do not depend on the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.paged_attention import KVPages, paged_attention
from tests.kernels.attention_reference import paged_attention_reference


def make(
    B: int, P: int, Hq: int, Hkv: int, D: int, T: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    return rand(B, P, Hq, D), rand(B, P, Hkv, D), rand(B, P, Hkv, D), torch.randperm(4 * B * 8, generator=g)


def filled(pages: KVPages, seed: int) -> KVPages:
    g = torch.Generator().manual_seed(seed)
    pages.k.copy_(torch.randn(pages.k.shape, generator=g))
    pages.v.copy_(torch.randn(pages.v.shape, generator=g))
    return pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("P", "Hq", "Hkv", "D", "T", "softcap", "window"),
    [
        (1, 9, 3, 64, 16, 0.0, 0),
        (8, 9, 3, 64, 16, 0.0, 0),
        (5, 4, 1, 128, 32, 0.0, 0),
        (3, 4, 4, 80, 16, 30.0, 0),
        (8, 8, 2, 256, 16, 0.0, 21),
    ],
)
def test_native_equals_reference(
    dtype: torch.dtype, P: int, Hq: int, Hkv: int, D: int, T: int, softcap: float, window: int
) -> None:
    B, N = 3, 8
    q, k, v, order = make(B, P, Hq, Hkv, D, T, dtype)
    table = order[: B * N].view(B, N).int()
    start = torch.tensor([0, 37, 5 * T - 2])
    positions = (start[:, None] + torch.arange(P)).int()
    positions[0, P - 1 :] = -1 if P > 1 else 0  # padding at the end of the first sequence
    native_pages, plain_pages = (
        filled(KVPages.allocate(4 * B * N, Hkv, D, T, dtype, torch.device("cpu")), seed=1) for _ in range(2)
    )
    got = paged_attention(q, k, v, native_pages, table, positions, scale=D**-0.5, softcap=softcap, window=window)
    want = paged_attention_reference(
        q, k, v, plain_pages, table, positions, scale=D**-0.5, softcap=softcap, window=window
    )
    assert torch.equal(native_pages.k, plain_pages.k)
    assert torch.equal(native_pages.v, plain_pages.v)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


def test_result_bits_do_not_depend_on_the_batch_or_the_number_of_queries() -> None:
    B, P, N = 4, 8, 8
    q, k, v, order = make(B, P, 9, 3, 64, 16, torch.float32, seed=3)
    table = order[: B * N].view(B, N).int()
    positions = (torch.tensor([3, 40, 77, 100])[:, None] + torch.arange(P)).int()

    def run(b: slice, p: int) -> torch.Tensor:
        pages = filled(KVPages.allocate(4 * B * N, 3, 64, 16, torch.float32, torch.device("cpu")), seed=4)
        return paged_attention(
            q[b, :p], k[b, :p], v[b, :p], pages, table[b], positions[b, :p].contiguous(), scale=0.125
        )

    whole = run(slice(0, B), P)
    for b in range(B):
        assert torch.equal(run(slice(b, b + 1), P)[0], whole[b])
        assert torch.equal(run(slice(b, b + 1), 1)[0, 0], whole[b, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("P", "D", "window", "chunk", "sinks"),
    [(1, 64, 0, 0, True), (8, 64, 24, 0, True), (7, 80, 0, 32, False), (40, 128, 0, 48, True)],
)
def test_sinks_and_chunks_equal_the_reference(
    dtype: torch.dtype, P: int, D: int, window: int, chunk: int, sinks: bool
) -> None:
    B, N, Hq, Hkv, T = 3, 8, 6, 2, 16
    q, k, v, order = make(B, P, Hq, Hkv, D, T, dtype)
    table = order[: B * N].view(B, N).int()
    positions = (torch.tensor([0, 29, 5 * T - 2])[:, None] + torch.arange(P)).int()
    positions[0, P - 1 :] = -1 if P > 1 else 0
    # Small, as large as the scores, and above all of them.
    sinks_H = torch.tensor([-9.0, -1.0, 0.0, 1.0, 3.0, 40.0]) if sinks else None
    ours, plain = (filled(KVPages.allocate(4 * B * N, Hkv, D, T, dtype, torch.device("cpu")), seed=1) for _ in range(2))
    args = {"scale": D**-0.5, "window": window, "chunk": chunk, "sinks_H": sinks_H}
    got = paged_attention(q, k, v, ours, table, positions, **args)  # type: ignore[arg-type]
    want = paged_attention_reference(q, k, v, plain, table, positions, **args)  # type: ignore[arg-type]
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)
    if P > 1:
        assert not got[0, P - 1 :].any()
    for b in (1, 2):  # the same bits alone
        pages = filled(KVPages.allocate(4 * B * N, Hkv, D, T, dtype, torch.device("cpu")), seed=1)
        some = (part[b : b + 1, :1] for part in (q, k, v))
        alone = paged_attention(*some, pages, table[b : b + 1], positions[b : b + 1, :1].contiguous(), **args)  # type: ignore[arg-type]
        assert torch.equal(alone[0, 0], got[b, 0])


def test_strided_heads_first_inputs_are_read_by_their_strides() -> None:
    q, k, v, _ = make(2, 4, 4, 2, 64, 16, torch.float32, seed=5)
    table, positions = torch.arange(4).view(2, 2).int(), torch.arange(4).expand(2, 4).int().contiguous()
    results = []
    for change in (False, True):
        pages = KVPages.allocate(4, 2, 64, 16, torch.float32, torch.device("cpu"))
        args = [t.transpose(1, 2).contiguous().transpose(1, 2) if change else t for t in (q, k, v)]
        results.append(paged_attention(*args, pages, table, positions, scale=0.125))
    assert torch.equal(*results)


def test_old_values_after_the_last_position_have_no_effect() -> None:
    q, k, v, _ = make(1, 2, 4, 2, 64, 16, torch.float32, seed=6)
    table, positions = torch.arange(2).view(1, 2).int(), torch.tensor([[3, 4]], dtype=torch.int32)
    results = []
    for rest in (0.0, float("nan"), float("inf")):
        pages = filled(KVPages.allocate(2, 2, 64, 16, torch.float32, torch.device("cpu")), seed=7)
        pages.v[0, :, 5:], pages.v[1] = rest, rest
        pages.k[0, :, :, 5:], pages.k[1] = rest, rest
        results.append(paged_attention(q, k, v, pages, table, positions, scale=0.125))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_pages_of_all_layers_are_zero_contiguous_and_apart() -> None:
    layers = KVPages.allocate_layers(3, 4, 2, 32, 16, torch.float32, torch.device("cpu"))
    assert [tuple(pages.k.shape) for pages in layers] == [(4, 2, 32, 16)] * 3
    assert all(pages.k.is_contiguous() and pages.v.is_contiguous() for pages in layers)
    layers[1].k.fill_(1)
    layers[1].v.fill_(2)
    assert not any(pages.k.any() or pages.v.any() for pages in (layers[0], layers[2]))


def test_pages_that_nobody_has_written_are_not_resident() -> None:
    def resident_mb() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("RssAnon:")).split()[1]) // 1024

    before = resident_mb()
    # More than any earlier test may have given back to the allocator, which would hand out that memory again.
    layers = KVPages.allocate_layers(4, 32768, 2, 64, 16, torch.bfloat16, torch.device("cpu"))
    assert sum(part.numel() * part.itemsize for page in layers for part in (page.k, page.v)) == 1 << 30
    assert resident_mb() - before < 16
    assert all(part.data_ptr() % 64 == 0 for page in layers for part in (page.k, page.v))
    assert not layers[3].v[32767].any()
