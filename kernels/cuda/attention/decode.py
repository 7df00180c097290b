"""Paged attention for a few query positions: the context is split over programs, a second kernel combines the splits.

The query positions and heads of one KV head are the rows of a tile, so keys are read once for all of them. Keys and
values of the step itself are stored to their pages by the programs that read them, so that no launch of its own is
needed. Invariant: split s holds positions [s * SPLIT, (s + 1) * SPLIT), whatever the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.attention.block import MASKED, attend, first_key, parts_of, split_weights, with_sink


@triton.jit
def bounds(
    positions: tl.tensor, b: tl.tensor, P: tl.tensor, window: tl.tensor, chunk: tl.tensor, QUERIES: tl.constexpr
) -> tl.tensor:
    """First and last query position of sequence b (-1: none), and the first position that a query sees."""
    i = tl.arange(0, QUERIES)
    last = tl.max(tl.load(positions + b * P + i, mask=i < P, other=-1), axis=0)
    first = tl.load(positions + b * P)
    return first, last, first_key(first, window, chunk)


@triton.jit
def decode_kernel(
    q: tl.tensor,
    k_new: tl.tensor,
    v_new: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    partial: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    q_stride_b: tl.tensor,
    q_stride_p: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_b: tl.tensor,
    k_stride_p: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_b: tl.tensor,
    v_stride_p: tl.tensor,
    v_stride_h: tl.tensor,
    table_stride: tl.tensor,
    P: tl.tensor,
    Hkv: tl.tensor,
    splits: tl.tensor,
    window: tl.tensor,
    chunk: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    stripes: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Grid (row tiles, B * Hkv, stripes): partial [B * Hkv * P * G, splits, D], peaks and totals without the D.

    A program takes every `stripes`-th split of its sequence, one after the other: a large batch fills the chip with a
    program or two a sequence, and splits after its end cost nothing.
    """
    tile = tl.program_id(0)
    b = (tl.program_id(1) // Hkv).to(tl.int64)
    h = tl.program_id(1) % Hkv
    first, last, low = bounds(positions, b, P, window, chunk, QUERIES)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = P * G
    d = tl.arange(0, BLOCK_D)
    channels = parts_of(BLOCK_D, PART)
    position = tl.load(positions + b * P + m // G, mask=m < rows, other=-1)
    seen = first_key(position, window, chunk)
    at = q + b * q_stride_b + (m // G) * q_stride_p + (h * G + m % G) * q_stride_h
    query = [
        tl.load(at[:, None] + c[None, :], mask=(m < rows)[:, None] & (c < D)[None, :], other=0.0) for c in channels
    ]
    k_head = k_pages + h * (T * D)
    v_head = v_pages + h * (T * D)
    for split in range(low // SPLIT + tl.program_id(2), (last + SPLIT) // SPLIT, stripes):
        start = split * SPLIT
        end = tl.minimum(start + SPLIT, last + 1)
        if end > first:
            # Every program stores the keys and values that it reads, so programs need not wait for each other. Several
            # programs may write equal bytes, which is no race.
            token = tl.maximum(first, start) + tl.arange(0, QUERIES)
            writes = token < end
            page = tl.load(table + b * table_stride + token // T, mask=writes, other=0)
            row = (page.to(tl.int64) * (Hkv * T * D) + (token % T) * D)[:, None] + d[None, :]
            cells = writes[:, None] & (d < D)[None, :]
            k_row = k_new + b * k_stride_b + h * k_stride_h + (token - first) * k_stride_p
            v_row = v_new + b * v_stride_b + h * v_stride_h + (token - first) * v_stride_p
            tl.store(k_head + row, tl.load(k_row[:, None] + d[None, :], mask=cells), mask=cells)
            tl.store(v_head + row, tl.load(v_row[:, None] + d[None, :], mask=cells), mask=cells)
            tl.debug_barrier()
        acc = [tl.zeros([BLOCK_M, PART], tl.float32) for _ in channels]
        peak = tl.full([BLOCK_M], MASKED, tl.float32)
        total = tl.zeros([BLOCK_M, 8], tl.float32)
        for n in range(tl.maximum(start, low // BLOCK_N * BLOCK_N), end, BLOCK_N):
            token = n + tl.arange(0, BLOCK_N)
            inside = token < end
            page = tl.load(table + b * table_stride + token // T, mask=inside, other=0)
            row = page.to(tl.int64) * (Hkv * T * D) + (token % T) * D
            acc, peak, total = attend(
                query,
                k_head + row,
                v_head + row,
                inside,
                channels,
                token,
                position,
                acc,
                peak,
                total,
                seen,
                scale,
                softcap,
                SOFTCAP,
                D,
            )
        out = (tl.program_id(1).to(tl.int64) * rows + tile * BLOCK_M) * splits + split
        place = tl.arange(0, BLOCK_M) * splits
        for i in tl.static_range(len(channels)):
            cells = (m < rows)[:, None] & (channels[i] < D)[None, :]
            tl.store(partial + out * D + ((place * D)[:, None] + channels[i][None, :]), acc[i], mask=cells)
        tl.store(peaks + out + place, peak, mask=m < rows)
        tl.store(totals + out + place, tl.max(total, axis=1), mask=m < rows)


@triton.jit
def combine_kernel(
    partial: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    P: tl.tensor,
    Hq: tl.tensor,
    splits: tl.tensor,
    window: tl.tensor,
    chunk: tl.tensor,
    sinks: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    G: tl.constexpr,
    SPLIT: tl.constexpr,
    QUERIES: tl.constexpr,
    COMBINE: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Grid (B * P * Hq): one output row, the weighted mean of its splits in their order; 0 for padding."""
    row = tl.program_id(0)
    b = row // (P * Hq)
    p = row // Hq % P
    head = row % Hq
    d = tl.arange(0, BLOCK_D)
    real = d < D
    _, last, low = bounds(positions, b, P, window, chunk, QUERIES)
    acc = tl.zeros([BLOCK_D], tl.float32)
    if tl.load(positions + b * P + p) >= 0:
        at = ((b * (Hq // G) + head // G) * (P * G) + p * G + head % G).to(tl.int64) * splits
        peak = tl.full([], MASKED, tl.float32)
        total = tl.zeros([], tl.float32)
        begin = low // SPLIT // COMBINE * COMBINE
        for s in range(begin, last // SPLIT + 1, COMBINE):
            # Unrolled, so that the loads of all splits are in flight at once; the sums keep the order of the splits.
            for i in tl.static_range(COMBINE):
                split = s + i
                ran = (split <= last // SPLIT) & (split >= low // SPLIT)
                m = tl.load(peaks + at + split, mask=ran, other=MASKED)
                n = tl.load(totals + at + split, mask=ran, other=0.0)
                values = tl.load(partial + (at + split) * D + d, mask=d < tl.where(ran, D, 0), other=0.0)
                kept, weight, peak = split_weights(peak, m)
                acc = tl.fma(values, weight, acc * kept)
                total = tl.fma(n, weight, total * kept)
        if SINKS:
            kept, total = with_sink(peak, total, tl.load(sinks + head))
            acc = acc * kept
        acc = acc / total
    tl.store(out + row.to(tl.int64) * D + d, acc.to(out.dtype.element_ty), mask=real)
