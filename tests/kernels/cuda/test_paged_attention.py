"""The paged attention kernels have the results of plain torch, which do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cuda.attention.paged import DecodeTuning, paged_attention, split_length
from kernels.paged_attention import KVPages
from tests.kernels.attention_reference import paged_attention_reference
from tests.kernels.cuda.attention_inputs import inputs, pages_of


@pytest.mark.parametrize(
    ("P", "Hq", "Hkv", "D", "T", "softcap", "window", "dtype"),
    [
        (1, 9, 3, 64, 16, 0.0, 0, torch.bfloat16),
        pytest.param(4, 8, 2, 128, 32, 0.0, 0, torch.float16, marks=pytest.mark.slow),
        (8, 6, 1, 80, 16, 30.0, 0, torch.float32),
        pytest.param(16, 2, 2, 96, 64, 0.0, 21, torch.float32, marks=pytest.mark.slow),
        (2, 2, 1, 256, 128, 0.0, 140, torch.bfloat16),
        pytest.param(70, 4, 2, 64, 16, 0.0, 0, torch.bfloat16, marks=pytest.mark.slow),
        (40, 2, 2, 80, 32, 20.0, 33, torch.float32),
        pytest.param(130, 2, 1, 128, 16, 0.0, 0, torch.float32, marks=pytest.mark.slow),
        pytest.param(20, 2, 1, 256, 64, 0.0, 0, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_kernels_equal_reference(
    device: torch.device,
    P: int,
    Hq: int,
    Hkv: int,
    D: int,
    T: int,
    softcap: float,
    window: int,
    dtype: torch.dtype,
) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter multiplies the bits of bf16
    B, N = 2, 320 // T + 1
    q, k, v = inputs(B, P, Hq, Hkv, D, dtype, device)
    table = torch.randperm(4 * B * N, generator=torch.Generator().manual_seed(0))[: B * N].view(B, N).int().to(device)
    positions = (torch.tensor([0, 181])[:, None] + torch.arange(P)).int()
    positions[0, P - P // 3 :] = -1  # padding
    positions = positions.to(device)
    ours, plain = (pages_of(4 * B * N, Hkv, T, D, dtype, device, seed=1) for _ in range(2))
    args = {"scale": D**-0.5, "softcap": softcap, "window": window}
    got = paged_attention(q, k, v, ours, table, positions, **args)
    want = paged_attention_reference(q, k, v, plain, table, positions, **args)
    assert torch.equal(ours.k, plain.k)
    assert torch.equal(ours.v, plain.v)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("P", "D", "window", "chunk", "sinks"),
    [
        pytest.param(1, 64, 0, 0, True, marks=pytest.mark.slow),
        (8, 64, 150, 0, True),
        (5, 80, 0, 140, False),
        (40, 64, 0, 96, True),
        pytest.param(20, 128, 33, 0, True, marks=pytest.mark.slow),
    ],
)
def test_sinks_and_chunks_equal_the_reference(
    device: torch.device, P: int, D: int, window: int, chunk: int, sinks: bool
) -> None:
    B, N, Hq, Hkv, T = 2, 16, 4, 2, 16
    q, k, v = inputs(B, P, Hq, Hkv, D, torch.float32, device)
    table = torch.randperm(4 * B * N, generator=torch.Generator().manual_seed(0))[: B * N].view(B, N).int().to(device)
    positions = (torch.tensor([0, 181])[:, None] + torch.arange(P)).int()
    positions[0, P - P // 3 :] = -1  # padding
    positions = positions.to(device)
    # Small, as large as the scores, and above all of them.
    sinks_H = torch.tensor([-9.0, 0.0, 3.0, 40.0], device=device) if sinks else None
    ours, plain = (pages_of(4 * B * N, Hkv, T, D, torch.float32, device, seed=1) for _ in range(2))
    args = {"scale": D**-0.5, "window": window, "chunk": chunk, "sinks_H": sinks_H}
    got = paged_attention(q, k, v, ours, table, positions, **args)
    want = paged_attention_reference(q, k, v, plain, table, positions, **args)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_result_bits_do_not_depend_on_the_batch_or_the_number_of_queries(device: torch.device) -> None:
    starts = [3, 150] if device.type == "cpu" else [3, 40, 250, 127]  # the interpreter takes its time
    B, P, N, dtype = len(starts), 8, 20, torch.float16
    q, k, v = inputs(B, P, 9, 3, 64, dtype, device)
    table = torch.randperm(B * N, generator=torch.Generator().manual_seed(2)).view(B, N).int().to(device)
    positions = (torch.tensor(starts)[:, None] + torch.arange(P)).int().to(device)

    def run(b: slice, p: int) -> torch.Tensor:
        pages = pages_of(B * N, 3, 16, 64, dtype, device, seed=4)
        return paged_attention(
            q[b, :p], k[b, :p], v[b, :p], pages, table[b], positions[b, :p].contiguous(), scale=0.125
        )

    whole = run(slice(0, B), P)
    for b in range(B):
        assert torch.equal(run(slice(b, b + 1), P)[0], whole[b])
        assert torch.equal(run(slice(b, b + 1), 1)[0, 0], whole[b, 0])
    assert torch.equal(run(slice(0, B), 3), whole[:, :3])


@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.slow), 150])
def test_the_distribution_of_splits_changes_no_bit(device: torch.device, window: int) -> None:
    B, P, N, dtype = 3, 4, 40, torch.float16
    q, k, v = inputs(B, P, 4, 2, 64, dtype, device)
    table = torch.randperm(B * N, generator=torch.Generator().manual_seed(2)).view(B, N).int().to(device)
    positions = (torch.tensor([3, 255, 620])[:, None] + torch.arange(P)).int().to(device)
    usual = DecodeTuning.of(64, 2)
    results = []
    for cut in (usual, replace(usual, programs=1), replace(usual, programs=12), replace(usual, num_warps=2)):
        pages = pages_of(B * N, 2, 16, 64, dtype, device, seed=4)
        out = paged_attention(q, k, v, pages, table, positions, scale=0.125, window=window, tuning=cut)
        results.append((out, pages.k))
    for out, keys in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(keys, results[0][1])


@pytest.mark.parametrize(("P", "window"), [(32, 0), pytest.param(96, 41, marks=pytest.mark.slow)])
def test_chunks_of_several_prompts_equal_those_of_each_alone(device: torch.device, P: int, window: int) -> None:
    """The chunks have different starts and lengths; some lanes are only padding, and two of these have one page."""
    starts, lengths, B, N = [0, 50, 7, 0, 0, 130], [P, 3, P - 1, 1, 0, 0], 6, 20
    tensors = inputs(B, P, 4, 2, 64, torch.float32, device)
    table = torch.randperm(B * N, generator=torch.Generator().manual_seed(2)).view(B, N).int().to(device)
    table[5] = table[4]
    row = torch.arange(P)
    positions = (
        torch.stack([torch.where(row < n, at + row, -1) for at, n in zip(starts, lengths, strict=True)])
        .int()
        .to(device)
    )

    def run(lanes: list[int]) -> tuple[torch.Tensor, KVPages]:
        pages = pages_of(B * N, 2, 16, 64, torch.float32, device, seed=4)
        some = (t[lanes] for t in tensors)
        out = paged_attention(*some, pages, table[lanes], positions[lanes], scale=0.125, window=window)
        return out, pages

    whole, together = run([*range(B)])
    plain = pages_of(B * N, 2, 16, 64, torch.float32, device, seed=4)
    want = paged_attention_reference(*tensors, plain, table, positions, scale=0.125, softcap=0.0, window=window)
    torch.testing.assert_close(whole, want, atol=2e-5, rtol=2e-5)
    assert torch.equal(together.k, plain.k)
    assert torch.equal(together.v, plain.v)
    for b in range(B):
        alone, pages = run([b])
        assert torch.equal(alone[0], whole[b])
        assert torch.equal(pages.k[table[b].long()], together.k[table[b].long()])


def test_a_lane_of_padding_stores_nothing_and_returns_zeros(device: torch.device) -> None:
    q, k, v = inputs(1, 2, 4, 2, 64, torch.float32, device)
    pages = pages_of(4, 2, 16, 64, torch.float32, device, seed=1)
    before = pages.k.clone()
    positions = torch.full((1, 2), -1, dtype=torch.int32, device=device)
    out = paged_attention(q, k, v, pages, torch.zeros(1, 4, dtype=torch.int32, device=device), positions, scale=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(pages.k, before)


def test_strided_heads_first_inputs_are_read_by_their_strides(device: torch.device) -> None:
    tensors = inputs(2, 4, 4, 2, 64, torch.float32, device)
    table = torch.arange(4, device=device).view(2, 2).int()
    positions = torch.arange(4, device=device).expand(2, 4).int().contiguous()
    results = []
    for change in (False, True):
        pages = pages_of(4, 2, 16, 64, torch.float32, device, seed=0)
        args = [t.transpose(1, 2).contiguous().transpose(1, 2) if change else t for t in tensors]
        results.append(paged_attention(*args, pages, table, positions, scale=0.125))
    assert torch.equal(*results)


def test_splits_are_whole_blocks_and_their_number_is_bounded() -> None:
    for max_tokens in (16, 2048, 8192, 32_768, 131_072, 1_000_000):
        split = split_length(max_tokens)
        assert -(-max_tokens // split) <= 128
        assert all(split % DecodeTuning.of(D, size).block_n == 0 for D in (64, 128, 256) for size in (2, 4))
