"""Paged attention, native and in Triton, has the results of plain torch, which do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.kv_pages import KVHeads, bytes_of_token
from kernels.paged_attention import KVPages, paged_attention
from tests.kernels.attention_reference import inputs, paged_attention_reference, pages_of, table_of

Target = torch.device | None
triton_only = pytest.mark.parametrize("target", ["triton"], indirect=True)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def on(target: Target, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(target or "cpu") for tensor in tensors]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("target", "P", "Hq", "Hkv", "D", "T", "limits", "dtype"),
    [
        *(
            ("native", *shape, dtype)
            for dtype in (F32, BF16)
            for shape in (
                (1, 9, 3, 64, 16, {}),
                (5, 4, 1, 128, 32, {}),
                (3, 4, 4, 80, 16, {"softcap": 30.0}),
                (8, 8, 2, 256, 16, {"window": 21}),
                (3, 8, 1, 512, 16, {}),
                (1, 6, 2, 64, 16, {"sinks": True}),
                (8, 6, 2, 64, 16, {"window": 24, "sinks": True}),
                (7, 6, 2, 80, 16, {"chunk": 32}),
                (40, 6, 2, 128, 16, {"chunk": 48, "sinks": True}),
            )
        ),
        ("triton", 1, 9, 3, 64, 16, {}, BF16),
        slow("triton", 4, 8, 2, 128, 32, {}, F16),
        ("triton", 8, 6, 1, 80, 16, {"softcap": 30.0}, F32),
        slow("triton", 16, 2, 2, 96, 64, {"window": 21}, F32),
        ("triton", 2, 2, 1, 256, 128, {"window": 140}, BF16),
        slow("triton", 70, 4, 2, 64, 16, {}, BF16),
        ("triton", 40, 2, 2, 80, 32, {"softcap": 20.0, "window": 33}, F32),
        slow("triton", 130, 2, 1, 128, 16, {}, F32),
        slow("triton", 20, 2, 1, 256, 64, {}, BF16),
        slow("triton", 1, 4, 2, 64, 16, {"sinks": True}, F32),
        ("triton", 8, 4, 2, 64, 16, {"window": 150, "sinks": True}, F32),
        ("triton", 5, 4, 2, 80, 16, {"chunk": 140}, F32),
        ("triton", 40, 4, 2, 64, 16, {"chunk": 96, "sinks": True}, F32),
        slow("triton", 20, 4, 2, 128, 16, {"window": 33, "sinks": True}, F32),
    ],
    indirect=["target"],
)
def test_kernels_equal_the_reference(
    target: Target, P: int, Hq: int, Hkv: int, D: int, T: int, limits: dict[str, Any], dtype: torch.dtype
) -> None:
    if target is not None and target.type == "cpu" and dtype == BF16:
        dtype = F16  # the interpreter multiplies the bits of bf16
    starts = [0, 37, 5 * T - 2] if target is None else [0, 181]
    B, N = len(starts), 320 // T + 1
    q, k, v = inputs(B, P, Hq, Hkv, D, dtype, target)
    table = table_of(B, N, target, spare=4)
    positions = (torch.tensor(starts)[:, None] + torch.arange(P)).int()
    positions[0, P - max(P // 3, P > 1) :] = -1  # padding
    # Small, as large as the scores, and above all of them.
    (sinks_H,) = on(target, torch.tensor([-9.0, 0.0, 3.0, 40.0, -1.0, 1.0])[:Hq])
    args = {"scale": D**-0.5, **limits, "sinks_H": sinks_H if limits.get("sinks") else None}
    args.pop("sinks", None)
    ours, plain = (pages_of(4 * B * N, Hkv, T, D, dtype, target, seed=1) for _ in range(2))
    got = paged_attention(q, k, v, ours, table, *on(target, positions), **args)
    want = paged_attention_reference(q, k, v, plain, table, *on(target, positions), **args)
    assert torch.equal(ours.k, plain.k)
    assert torch.equal(ours.v, plain.v)
    tolerance = 2e-5 if dtype == F32 else 2e-2
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)
    assert not got.cpu()[positions < 0].any()


@pytest.mark.parametrize("limits", [{}, {"chunk": 48, "sinks": True}])
def test_result_bits_do_not_depend_on_the_batch_or_the_number_of_queries(
    target: Target, limits: dict[str, Any]
) -> None:
    starts = [3, 150] if target is not None and target.type == "cpu" else [3, 40, 250, 127]  # the interpreter is slow
    B, P, N, dtype = len(starts), 8, 20, F32 if target is None else F16
    q, k, v = inputs(B, P, 3, 1, 64, dtype, target)
    table = table_of(B, N, target)
    (positions,) = on(target, (torch.tensor(starts)[:, None] + torch.arange(P)).int())
    (sinks_H,) = on(target, torch.arange(3.0) - 1)
    args = {"scale": 0.125, "chunk": limits.get("chunk", 0), "sinks_H": sinks_H if limits else None}

    def run(b: slice, p: int) -> torch.Tensor:
        pages = pages_of(B * N, 1, 16, 64, dtype, target, seed=4)
        some = (part[b, :p] for part in (q, k, v))
        return paged_attention(*some, pages, table[b], positions[b, :p].contiguous(), **args)

    whole = run(slice(0, B), P)
    for b in range(B):
        assert torch.equal(run(slice(b, b + 1), P)[0], whole[b])
        assert torch.equal(run(slice(b, b + 1), 1)[0, 0], whole[b, 0])
    assert torch.equal(run(slice(0, B), 3), whole[:, :3])


@triton_only
@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.slow), 150])
def test_the_distribution_of_splits_and_the_parts_of_a_head_change_no_bit(target: torch.device, window: int) -> None:
    from kernels.cuda.attention.paged import DecodeTuning
    from kernels.cuda.attention.paged import paged_attention as tuned_attention

    B, P, N, dtype = 2, 4, 40, torch.float16
    q, k, v = inputs(B, P, 2, 1, 64, dtype, target)
    table = table_of(B, N, target)
    positions = (torch.tensor([255, 620])[:, None] + torch.arange(P)).int().to(target)
    usual = DecodeTuning.of(64, 2)
    results = []
    for cut in (
        usual,
        replace(usual, programs=1),
        replace(usual, programs=12),
        replace(usual, num_warps=2),
        replace(usual, part=64),
    ):
        pages = pages_of(B * N, 1, 16, 64, dtype, target, seed=4)
        out = tuned_attention(q, k, v, pages, table, positions, scale=0.125, window=window, tuning=cut)
        results.append((out, pages.k))
    for out, keys in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(keys, results[0][1])


@pytest.mark.parametrize(("P", "window"), [(32, 0), pytest.param(96, 41, marks=pytest.mark.slow)])
def test_chunks_of_several_prompts_equal_those_of_each_alone(target: Target, P: int, window: int) -> None:
    """The chunks have different starts and lengths; some lanes are only padding, and two of these have one page."""
    starts, lengths, B, N = [0, 50, 7, 0, 0, 130], [P, 3, P - 1, 1, 0, 0], 6, 20
    tensors = inputs(B, P, 2, 1, 64, torch.float32, target)
    table = table_of(B, N, target)
    table[5] = table[4]
    row = torch.arange(P)
    positions = (
        torch.stack([torch.where(row < n, at + row, -1) for at, n in zip(starts, lengths, strict=True)])
        .int()
        .to(target or "cpu")
    )

    def run(lanes: list[int]) -> tuple[torch.Tensor, KVPages]:
        pages = pages_of(B * N, 1, 16, 64, torch.float32, target, seed=4)
        some = (t[lanes] for t in tensors)
        out = paged_attention(*some, pages, table[lanes], positions[lanes], scale=0.125, window=window)
        return out, pages

    whole, together = run([*range(B)])
    plain = pages_of(B * N, 1, 16, 64, torch.float32, target, seed=4)
    want = paged_attention_reference(*tensors, plain, table, positions, scale=0.125, softcap=0.0, window=window)
    torch.testing.assert_close(whole, want, atol=2e-5, rtol=2e-5)
    assert torch.equal(together.k, plain.k)
    assert torch.equal(together.v, plain.v)
    for b in range(B):
        alone, pages = run([b])
        assert torch.equal(alone[0], whole[b])
        assert torch.equal(pages.k[table[b].long()], together.k[table[b].long()])


def test_a_lane_of_padding_stores_nothing_and_returns_zeros(target: Target) -> None:
    q, k, v = inputs(1, 2, 4, 2, 64, F32, target)
    pages, before = (pages_of(4, 2, 16, 64, F32, target, seed=1) for _ in range(2))
    table, positions = on(target, torch.zeros(1, 4, dtype=torch.int32), torch.full((1, 2), -1, dtype=torch.int32))
    assert not paged_attention(q, k, v, pages, table, positions, scale=1.0).any()
    assert torch.equal(pages.k, before.k)


def test_strided_heads_first_inputs_are_read_by_their_strides(target: Target) -> None:
    tensors = inputs(2, 4, 4, 2, 64, F32, target)
    table, positions = on(target, torch.arange(4).view(2, 2).int(), torch.arange(4).expand(2, 4).int().contiguous())
    results = []
    for change in (False, True):
        args = [t.transpose(1, 2).contiguous().transpose(1, 2) if change else t for t in tensors]
        pages = pages_of(4, 2, 16, 64, F32, target, seed=0)
        results.append(paged_attention(*args, pages, table, positions, scale=0.125))
    assert torch.equal(*results)


def test_old_values_after_the_last_position_have_no_effect(target: Target) -> None:
    q, k, v = inputs(1, 2, 4, 2, 64, F32, target)
    table, positions = on(target, torch.arange(2).view(1, 2).int(), torch.tensor([[3, 4]], dtype=torch.int32))
    results = []
    for rest in (0.0, float("nan"), float("inf")):
        pages = pages_of(2, 2, 16, 64, F32, target, seed=7)
        for part in (pages.v, pages.k_NHTD):
            part[0, :, 5:], part[1] = rest, rest
        results.append(paged_attention(q, k, v, pages, table, positions, scale=0.125))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@triton_only
def test_splits_are_whole_blocks_and_their_number_is_bounded(target: Target) -> None:
    from kernels.cuda.attention.paged import DecodeTuning, split_length

    for max_tokens in (16, 2048, 8192, 32_768, 131_072, 1_000_000):
        split = split_length(max_tokens)
        assert -(-max_tokens // split) <= 128
        assert all(split % DecodeTuning.of(D, size).block_n == 0 for D in (64, 128, 256) for size in (2, 4))


@pytest.mark.parametrize("heads", [[KVHeads(2, 32)] * 3, [KVHeads(2, 32), KVHeads(1, 64), KVHeads(2, 32)]])
def test_the_pages_of_all_layers_are_zero_contiguous_and_apart(heads: list[KVHeads]) -> None:
    layers = KVPages.allocate_layers(heads, 4, 16, torch.float32, torch.device("cpu"))
    assert [tuple(pages.k.shape) for pages in layers] == [(4, each.number, each.width, 16) for each in heads]
    assert [tuple(pages.v.shape) for pages in layers] == [(4, each.number, 16, each.width) for each in heads]
    assert sum(part.nbytes for pages in layers for part in (pages.k, pages.v)) == 64 * bytes_of_token(
        heads, torch.float32
    )
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
    layers = KVPages.allocate_layers([KVHeads(2, 64)] * 4, 32768, 16, torch.bfloat16, torch.device("cpu"))
    assert sum(part.numel() * part.itemsize for page in layers for part in (page.k, page.v)) == 1 << 30
    assert resident_mb() - before < 16
    assert all(part.data_ptr() % 64 == 0 for page in layers for part in (page.k, page.v))
    assert not layers[3].v[32767].any()
