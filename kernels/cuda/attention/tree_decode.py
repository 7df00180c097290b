"""Paged attention for the rows of a tree of drafts: each row sees the context and the rows on the way to it.

Splits before the step's rows are those of decode.py, shared by all rows. In the splits that hold a row's own
position, a program attends for one row of the tree after the other, and takes the keys and values of the step from the
tensors of the step: at the place of depth d the row at depth d on the way to the query's row. So a row adds the same
keys at the same places as it would after a chain of its drafts, and its result has the same sums in the same order.
Invariant: pages are read only before the step's first position, and written from there on: row j at distance j.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.attention.block import MASKED, attend, first_key, parts_of
from kernels.cuda.attention.decode import bounds


@triton.jit
def tree_decode_kernel(
    q: tl.tensor,
    k_new: tl.tensor,
    v_new: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    tree_rows: tl.tensor,
    R: tl.tensor,
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
    """Grid (row tiles, B * Hkv, stripes): as `decode_kernel`; `tree_rows` [B, R, R] is `TreeRows.rows_BRR`."""
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
    k_step = k_new + b * k_stride_b + h * k_stride_h
    v_step = v_new + b * v_stride_b + h * v_stride_h
    if (tile == 0) & (tl.program_id(2) == 0):
        # No program reads these places in this launch.
        i = tl.arange(0, QUERIES)
        writes = tl.load(positions + b * P + i, mask=i < P, other=-1) >= 0
        place = first + i
        page = tl.load(table + b * table_stride + place // T, mask=writes, other=0)
        row = (page.to(tl.int64) * (Hkv * T * D) + (place % T) * D)[:, None] + d[None, :]
        cells = writes[:, None] & (d < D)[None, :]
        tl.store(k_head + row, tl.load(k_step + (i * k_stride_p)[:, None] + d[None, :], mask=cells), mask=cells)
        tl.store(v_head + row, tl.load(v_step + (i * v_stride_p)[:, None] + d[None, :], mask=cells), mask=cells)
    for split in range(low // SPLIT + tl.program_id(2), (last + SPLIT) // SPLIT, stripes):
        start = split * SPLIT
        end = tl.minimum(start + SPLIT, last + 1)
        begin = tl.maximum(start, low // BLOCK_N * BLOCK_N)
        # Before the step's rows one pass serves every row of the tile; after, each row has its own pass.
        node = tile * BLOCK_M // G
        end_node = node + 1
        served = P
        if end > first:
            end_node = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // G + 1, P)
            served = 1
        for own in range(node, end_node):
            way = tree_rows + (b * R + own) * R
            acc = [tl.zeros([BLOCK_M, PART], tl.float32) for _ in channels]
            peak = tl.full([BLOCK_M], MASKED, tl.float32)
            total = tl.zeros([BLOCK_M, 8], tl.float32)
            depth = tl.load(positions + b * P + own) - first
            for n in range(begin, end, BLOCK_N):
                token = n + tl.arange(0, BLOCK_N)
                old = token < tl.minimum(first, end)
                new = (token >= first) & (token < end) & (token - first <= depth)
                page = tl.load(table + b * table_stride + token // T, mask=old, other=0)
                row = page.to(tl.int64) * (Hkv * T * D) + (token % T) * D
                step = tl.load(way + token - first, mask=new, other=0)
                # One load takes both kinds of places: two tiles of keys and of values do not fit into the registers.
                k_row = tl.where(new, k_step + step * k_stride_p, k_head + row)
                v_row = tl.where(new, v_step + step * v_stride_p, v_head + row)
                inside = old | new
                acc, peak, total = attend(
                    query,
                    k_row,
                    v_row,
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
            mine = (m < rows) & (m // G >= own) & (m // G < own + served)
            out = (tl.program_id(1).to(tl.int64) * rows + tile * BLOCK_M) * splits + split
            cell = tl.arange(0, BLOCK_M) * splits
            for i in tl.static_range(len(channels)):
                cells = mine[:, None] & (channels[i] < D)[None, :]
                tl.store(partial + out * D + ((cell * D)[:, None] + channels[i][None, :]), acc[i], mask=cells)
            tl.store(peaks + out + cell, peak, mask=mine)
            tl.store(totals + out + cell, tl.max(total, axis=1), mask=mine)
