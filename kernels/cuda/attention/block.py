"""One block of keys and values against a tile of queries, and one split after the splits before it: the online softmax
that decode and prefill share.

Invariant: a query's numbers do not depend on the tile that it is in, nor on the kernel: maxima are exact, sums over
the keys of a split are matrix products, which add the keys in their order, and splits are added in their order. Triton
functions. Not responsible for: loading keys and values (see decode.py, prompt.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

MASKED = tl.constexpr(float("-inf"))


@triton.jit
def first_key(position: tl.tensor, window: tl.tensor, chunk: tl.tensor) -> tl.tensor:
    """Return the first position that a query at `position` sees, for any shape of it."""
    low = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    return tl.where(chunk > 0, tl.maximum(position, 0) // tl.maximum(chunk, 1) * chunk, low)


@triton.jit
def with_sink(peak: tl.tensor, total: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """Give a sink, a logit without a value, its part of the weights; return the factor for acc, and the total.

    `sink` is a natural logit; scores are in powers of 2.
    """
    sink = sink * 1.4426950408889634
    higher = tl.maximum(peak, sink)
    kept = tl.exp2(peak - higher)
    return kept, total * kept + tl.exp2(sink - higher)


@triton.jit
def split_weights(peak: tl.tensor, part_peak: tl.tensor) -> tl.tensor:
    """Return the factors of what there is and of a split, and the higher peak. A split without keys changes nothing."""
    higher = tl.maximum(peak, part_peak)
    base = tl.where(higher > MASKED, higher, 0.0)
    return tl.exp2(peak - base), tl.exp2(part_peak - base), higher


@triton.jit
def attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    token: tl.tensor,
    position: tl.tensor,
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    low: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Add keys `k` [D, N] and values `v` [N, D] at positions `token` [N] to acc [M, D], peak [M] and total [M, 16].

    Query m sees the tokens from `low[m]` up to its own, at `position[m]`. Scores are in powers of 2: `scale` carries
    log2(e) unless SOFTCAP is set.
    """
    s = tl.dot(q, k, input_precision="ieee") * scale
    if SOFTCAP:
        s = softcap * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
    legal = (token[None, :] <= position[:, None]) & (token[None, :] >= low[:, None])
    s = tl.where(legal, s, MASKED)
    higher = tl.maximum(peak, tl.max(s, axis=1))
    base = tl.where(higher > MASKED, higher, 0.0)
    p = tl.exp2(s - base[:, None]).to(v.dtype)
    shrink = tl.exp2(peak - base)
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
    ones = tl.full([v.shape[0], 16], 1.0, v.dtype)
    total = tl.dot(p, ones, total * shrink[:, None], input_precision="ieee")
    return acc, higher, total
