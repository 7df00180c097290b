"""Top-k, top-p and min-p for the rows that have them: one program a row, a few passes, no sort.

A token passes iff fewer than k tokens and less than p of the mass lie above it, and it is not below the cut of min-p.
Passing is monotone in the logit, so the draw is the best scored candidate that passes. The kernel tries the best
candidate of all first; when that one does not pass, it tries the best of the tokens above it. One or two passes are
expected, and each pass also yields the next candidate. The token is that of exact thresholds, where ties pass.
Invariant: rows without filters cost one early exit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.noise import float_of, gumbel_at, gumbel_tile, log_normal, order_of
from kernels.cuda.rows import DEFER, NO_COLUMN, filters, pick


@triton.jit
def kth_largest(
    x: tl.tensor, peak: tl.tensor, t: tl.tensor, k: tl.tensor, width: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Return a threshold that exactly the k largest of (x - peak) / t reach, ties of the k-th included."""
    lo = order_of(tl.full([], float("-inf"), tl.float32))
    hi = order_of(tl.full([], 0.0, tl.float32))
    while lo < hi:
        mid = lo + (hi - lo + 1) // 2
        cut = float_of(mid)
        counts = tl.zeros([ROWS, 32], tl.int32)
        for first in range(0, width, ROWS * 32):
            column = first + tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
            z = tl.div_rn(tl.load(x + column, mask=column < width, other=float("-inf")) - peak, t)
            counts += tl.where((z >= cut) & (z > float("-inf")), 1, 0)
        count = tl.sum(tl.sum(counts, axis=1), axis=0)
        lo = tl.where(count >= k, mid, lo)
        hi = tl.where(count == k, mid, tl.where(count > k, hi, mid - 1))
    return float_of(lo)


@triton.jit
def filter_kernel(
    slots: tl.tensor,
    num_drafts: tl.tensor,
    kinds: tl.tensor,
    done: tl.tensor,
    d2t: tl.tensor,
    length: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    seed: tl.tensor,
    depths: tl.tensor,
    best: tl.tensor,
    best_column: tl.tensor,
    peaks: tl.tensor,
    scratch: tl.tensor,
    chosen: tl.tensor,
    lane_stride: tl.tensor,
    scratch_stride: tl.tensor,
    partial_stride: tl.tensor,
    tiles: tl.tensor,
    width: tl.tensor,
    V: tl.tensor,
    num_rows: tl.tensor,
    first_row: tl.tensor,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    DRAFT: tl.constexpr,
    D2T: tl.constexpr,
    TREE: tl.constexpr,
) -> None:
    """Grid (B * num_rows): the chosen column of a filtered row, -1 where nothing is legal."""
    row = tl.program_id(0)
    b = row // num_rows
    j = first_row + row % num_rows
    s = tl.load(slots + b).to(tl.int64)
    if s < 0:
        return
    t, k, p, m = tl.load(temperature + s), tl.load(top_k + s), tl.load(top_p + s), tl.load(min_p + s)
    if not filters(t, k, p, m, V):
        return
    if tl.load(kinds + b * lane_stride + j).to(tl.int32) >= DEFER:
        return
    if not DRAFT:
        if (j > tl.load(num_drafts + b)) | (tl.load(done + s) != 0):
            return
    candidates, tops = pick(best, best_column, peaks, row, 1, t, partial_stride, tiles, 1, TILES)
    column, peak = tl.sum(candidates, axis=0), tl.sum(tops, axis=0)
    if column < 0:
        tl.store(chosen + row, column)
        return
    x = scratch + row.to(tl.int64) * scratch_stride
    depth = j
    if TREE:
        depth = tl.load(depths + b * lane_stride + j)
    n = tl.load(length + s) + depth
    key = tl.load(seed + s)
    limit = tl.where((k > 0) & (k < V), k, V + 1)
    floor = tl.full([], float("-inf"), tl.float32)
    if (limit <= V) & (p < 1.0):  # top-p is a share of the mass that passes top-k
        floor = kth_largest(x, peak, t, k, width, ROWS)
    lowest = floor
    if m > 0.0:
        lowest = tl.maximum(lowest, tl.minimum(log_normal(m), 0.0))
    pivot = tl.div_rn(tl.load(x + column) - peak, t)
    searching = 1
    while searching > 0:
        above = tl.zeros([ROWS, 32], tl.float32)
        total = tl.zeros([ROWS, 32], tl.float32)
        counts = tl.zeros([ROWS, 32], tl.int32)
        next_score = tl.full([], float("-inf"), tl.float32)
        next_column = column
        for first in range(0, width, ROWS * 32):
            at = first + tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
            z = tl.div_rn(tl.load(x + at, mask=at < width, other=float("-inf")) - peak, t)
            mass = tl.exp(z)
            higher = z > pivot
            above += tl.where(higher, mass, 0.0)
            total += tl.where(z >= floor, mass, 0.0)
            counts += higher.to(tl.int32)
            if tl.max(tl.max(z, axis=1), axis=0) > pivot:
                if D2T:
                    noise = gumbel_at(key, n, at + tl.load(d2t + at, mask=at < V, other=0))
                else:
                    noise = gumbel_tile(key, n, first, ROWS)
                score = tl.where(higher, z + noise, float("-inf"))
                top = tl.max(tl.max(score, axis=1), axis=0)
                if top > next_score:
                    next_score = top
                    next_column = tl.min(tl.min(tl.where(score == top, at, NO_COLUMN), axis=1), axis=0)
        count = tl.sum(tl.sum(counts, axis=1), axis=0)
        reached = tl.sum(tl.sum(above, axis=1), axis=0)
        goal = p * tl.sum(tl.sum(total, axis=1), axis=0)
        passes = (count < limit) & ((p >= 1.0) | (reached < goal)) & (pivot >= lowest)
        searching = tl.where(passes | (count == 0), 0, 1)
        column = tl.where(searching > 0, next_column, column)
        pivot = tl.div_rn(tl.load(x + column) - peak, t)
    tl.store(chosen + row, column)
