"""Paged attention for a chunk of a prompt: store the chunk's keys and values, then a tile of queries a program.

Invariant: a tile reads only positions up to its last query, all of them already stored, and a query's result has the
bits that decode.py gives it: the same splits, each summed by itself and added in the same order. Not responsible for:
many sequences of few queries (see decode.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.attention.block import MASKED, add_split, attend, first_key, parts_of, split_weights, with_sink


@triton.jit
def store_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    k_stride_b: tl.tensor,
    k_stride_p: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_b: tl.tensor,
    v_stride_p: tl.tensor,
    v_stride_h: tl.tensor,
    table_stride: tl.tensor,
    P: tl.tensor,
    Hkv: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    T: tl.constexpr,
) -> None:
    """Grid (B * P): one token's keys and values to its page."""
    b = (tl.program_id(0) // P).to(tl.int64)
    p = tl.program_id(0) % P
    position = tl.load(positions + tl.program_id(0))
    if position < 0:
        return
    page = tl.load(table + b * table_stride + position // T).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    for h in range(Hkv):
        at = ((page * Hkv + h) * T + position % T) * D + d
        tl.store(
            k_pages + at, tl.load(k + b * k_stride_b + p * k_stride_p + h * k_stride_h + d, mask=d < D), mask=d < D
        )
        tl.store(
            v_pages + at, tl.load(v + b * v_stride_b + p * v_stride_p + h * v_stride_h + d, mask=d < D), mask=d < D
        )


@triton.jit
def prefill_kernel(
    q: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    q_stride_b: tl.tensor,
    q_stride_p: tl.tensor,
    q_stride_h: tl.tensor,
    table_stride: tl.tensor,
    P: tl.tensor,
    Hq: tl.tensor,
    Hkv: tl.tensor,
    window: tl.tensor,
    chunk: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    SUMS: tl.constexpr,
) -> None:
    """Grid (query tiles, Hq, B): out [B, P, Hq, D]; rows of padding are 0."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    channels = parts_of(BLOCK_D, PART)
    position = tl.load(positions + b * P + m, mask=m < P, other=-1)
    at = q + b * q_stride_b + m * q_stride_p + head * q_stride_h
    query = [tl.load(at[:, None] + c[None, :], mask=(m < P)[:, None] & (c < D)[None, :], other=0.0) for c in channels]
    acc = [tl.zeros([BLOCK_M, PART], tl.float32) for _ in channels]
    peak = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M, SUMS], tl.float32)
    whole = [tl.zeros([BLOCK_M, PART], tl.float32) for _ in channels]
    whole_peak = tl.full([BLOCK_M], MASKED, tl.float32)
    whole_total = tl.zeros([BLOCK_M], tl.float32)
    last = tl.max(position, axis=0)
    first = tl.min(tl.where(position >= 0, position, last), axis=0)
    low = first_key(first, window, chunk)
    seen = first_key(position, window, chunk)
    k_head = k_pages + head // G * (T * D)
    v_head = v_pages + head // G * (T * D)
    for n in range(low // BLOCK_N * BLOCK_N, last + 1, BLOCK_N):
        token = n + tl.arange(0, BLOCK_N)
        inside = token <= last
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
        if (n + BLOCK_N) % SPLIT == 0 or n + BLOCK_N > last:
            kept, weight, whole_peak = split_weights(whole_peak, peak)
            whole = add_split(whole, kept, acc, weight)
            whole_total = tl.fma(tl.max(total, axis=1), weight, whole_total * kept)
            acc = [tl.zeros([BLOCK_M, PART], tl.float32) for _ in channels]
            peak = tl.full([BLOCK_M], MASKED, tl.float32)
            total = tl.zeros([BLOCK_M, SUMS], tl.float32)
    if SINKS:
        # A row of padding has no peak; its result is 0 whatever the sink takes.
        kept, whole_total = with_sink(tl.where(position >= 0, whole_peak, 0.0), whole_total, tl.load(sinks + head))
        whole = [part * kept[:, None] for part in whole]
    divisor = tl.where(whole_total > 0.0, whole_total, 1.0)[:, None]
    at = out + ((b * P + tl.program_id(0) * BLOCK_M) * Hq + head) * D + tl.arange(0, BLOCK_M) * (Hq * D)
    for i in tl.static_range(len(channels)):
        mean = tl.where(position[:, None] >= 0, whole[i] / divisor, 0.0).to(out.dtype.element_ty)
        tl.store(at[:, None] + channels[i][None, :], mean, mask=(m < P)[:, None] & (channels[i] < D)[None, :])
