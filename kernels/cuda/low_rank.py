"""The low-rank products of several adapters in one forward: y += scale * B (A x), by the number of each row's adapter.

Two launches next to a product, whatever adapters the rows have: one shrinks the inputs to the ranks, one expands them
to the outputs. A program has rows of one sequence, so it reads the matrices of one adapter; programs of a sequence
without an adapter, and of ranks that the adapter lacks, end at once. As punica's BGMV (Chen 2023) and S-LoRA (Sheng
2023) gather; the inputs are cut into spans, so that few rows have many programs. The spans' sums are added in their
order, not atomically. Invariant: a row depends only on its own input and its own adapter, bit for bit, for any number
of rows and any neighbours; a row without an adapter is not written. Not responsible for: the stacks (see
kernels/low_rank_stacks.py).

Shapes: N rows, B sequences, I inputs, O outputs, R largest rank, P parts of a product, S spans.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.low_rank_stacks import RANK_TILE, ProductStack

_ROWS = 16
_SPAN = 1024
"""Inputs of a program. It is part of the result's bits."""
_BLOCK_K = 128
_BLOCK_N = 64


@triton.jit
def shrink_kernel(
    x: tl.tensor,
    a: tl.tensor,
    ranks: tl.tensor,
    numbers: tl.tensor,
    partial: tl.tensor,
    N: tl.tensor,
    each: tl.tensor,
    chunks: tl.tensor,
    x_stride: tl.tensor,
    rank_stride: tl.tensor,
    inputs: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (row chunks of all sequences, tiles of the ranks of all parts, spans of the inputs)."""
    sequence = tl.program_id(0) // chunks
    number = tl.load(numbers + sequence).to(tl.int64)
    if number < 1:
        return
    part = tl.program_id(1) // (R // TILE)
    first = (tl.program_id(1) % (R // TILE)) * TILE
    rank = tl.load(ranks + (number - 1) * rank_stride + part)
    if first >= rank:
        return
    at = (tl.program_id(0) % chunks) * ROWS + tl.arange(0, ROWS)
    real = at < each
    row = (sequence * each + at).to(tl.int64)
    r = first + tl.arange(0, TILE)
    k = tl.program_id(2) * SPAN + tl.arange(0, BLOCK)
    a_at = a + ((number - 1) * (PARTS * R) + part * R + r)[:, None] * inputs + k[None, :]
    x_at = x + row[None, :] * x_stride + k[:, None]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    for step in range(0, SPAN, BLOCK):
        inside = k + step < inputs
        m = tl.load(a_at + step, mask=(r < rank)[:, None] & inside[None, :], other=0.0)
        v = tl.load(x_at + step, mask=real[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(m, v, acc, input_precision="ieee")
    out = (tl.program_id(2) * N + row) * (PARTS * R) + part * R
    tl.store(partial + out[None, :] + r[:, None], acc, mask=real[None, :])


@triton.jit
def expand_kernel(
    partial: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    scales: tl.tensor,
    numbers: tl.tensor,
    y: tl.tensor,
    N: tl.tensor,
    each: tl.tensor,
    chunks: tl.tensor,
    y_stride: tl.tensor,
    rank_stride: tl.tensor,
    spans: tl.tensor,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (row chunks of all sequences, tiles of the outputs of all parts)."""
    sequence = tl.program_id(0) // chunks
    number = tl.load(numbers + sequence).to(tl.int64)
    if number < 1:
        return
    tile, part, begin, width = tl.program_id(1), 0, 0, WIDTH_0
    tiles_0: tl.constexpr = (WIDTH_0 + BLOCK - 1) // BLOCK
    tiles_1: tl.constexpr = (WIDTH_1 + BLOCK - 1) // BLOCK
    if PARTS > 1:
        second, third = tile >= tiles_0, tile >= tiles_0 + tiles_1
        part = second.to(tl.int32) + third.to(tl.int32)
        begin = tl.where(third, WIDTH_0 + WIDTH_1, tl.where(second, WIDTH_0, 0))
        width = tl.where(third, WIDTH_2, tl.where(second, WIDTH_1, WIDTH_0))
        tile -= tl.where(third, tiles_0 + tiles_1, tl.where(second, tiles_0, 0))
    rank = tl.load(ranks + (number - 1) * rank_stride + part)
    if rank < 1:
        return
    at = (tl.program_id(0) % chunks) * ROWS + tl.arange(0, ROWS)
    real = at < each
    row = (sequence * each + at).to(tl.int64)
    o = tile * BLOCK + tl.arange(0, BLOCK)
    b_at = b + (number - 1) * (R * (WIDTH_0 + WIDTH_1 + WIDTH_2)) + R * begin
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rank, TILE):
        r = first + tl.arange(0, TILE)
        inner = real[:, None] & (r < rank)[None, :]
        small = tl.zeros([ROWS, TILE], tl.float32)
        for span in range(0, spans):
            small += tl.load(
                partial + (span * N + row)[:, None] * (PARTS * R) + part * R + r[None, :], mask=inner, other=0.0
            )
        m = tl.load(b_at + r[:, None] * width + o[None, :], mask=(r < rank)[:, None] & (o < width)[None, :], other=0.0)
        acc = tl.dot(small, m.to(tl.float32), acc, input_precision="ieee")
    scale = tl.load(scales + (number - 1) * rank_stride + part)
    cells = real[:, None] & (o < width)[None, :]
    y_at = y + row[:, None] * y_stride + begin + o[None, :]
    old = tl.load(y_at, mask=cells, other=0.0)
    tl.store(y_at, (old.to(tl.float32) + scale * acc).to(old.dtype), mask=cells)


def add_low_rank(
    x_NI: torch.Tensor, y_NO: torch.Tensor, stack: ProductStack, numbers_B: torch.Tensor, each: int
) -> None:
    """Add what the rows' adapters have for a product to its output `y_NO`, in place.

    `numbers_B` int32: row r has the adapter `numbers_B[r // each]`, 0 for none. `x_NI` and `y_NO` have the stack's
    dtype, and rows that are contiguous. Sums are float32.
    """
    (N, inputs), B, shape = x_NI.shape, len(numbers_B), stack.shape
    widths = (*shape.widths, 0, 0)[:3]
    assert B * each == N, (N, B, each)
    assert inputs == shape.inputs, (inputs, shape)
    assert y_NO.shape == (N, shape.outputs), (y_NO.shape, shape)
    assert x_NI.dtype == y_NO.dtype == stack.a_MXI.dtype, (x_NI.dtype, y_NO.dtype, stack.a_MXI.dtype)
    assert x_NI.stride(1) == y_NO.stride(1) == 1
    assert numbers_B.dtype == torch.int32
    assert numbers_B.is_contiguous()
    R, parts, chunks, spans = stack.rank, len(shape.widths), triton.cdiv(each, _ROWS), triton.cdiv(inputs, _SPAN)
    partial = torch.empty(spans, N, parts * R, dtype=torch.float32, device=x_NI.device)
    rank_stride = stack.ranks_MP.stride(0)
    shrink_kernel[(B * chunks, parts * (R // RANK_TILE), spans)](
        x_NI,
        stack.a_MXI,
        stack.ranks_MP,
        numbers_B,
        partial,
        N,
        each,
        chunks,
        x_NI.stride(0),
        rank_stride,
        inputs=inputs,
        R=R,
        PARTS=parts,
        ROWS=_ROWS,
        TILE=RANK_TILE,
        SPAN=min(_SPAN, _BLOCK_K * triton.cdiv(inputs, _BLOCK_K)),
        BLOCK=_BLOCK_K,
        num_warps=2,
    )
    expand_kernel[(B * chunks, sum(triton.cdiv(width, _BLOCK_N) for width in widths))](
        partial,
        stack.b_MX,
        stack.ranks_MP,
        stack.scales_MP,
        numbers_B,
        y_NO,
        N,
        each,
        chunks,
        y_NO.stride(0),
        rank_stride,
        spans,
        R=R,
        PARTS=parts,
        WIDTH_0=widths[0],
        WIDTH_1=widths[1],
        WIDTH_2=widths[2],
        ROWS=_ROWS,
        TILE=RANK_TILE,
        BLOCK=_BLOCK_N,
        num_warps=4,
    )
