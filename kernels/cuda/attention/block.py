"""One block of keys and values against a tile of queries, and one split after the splits before it: the online softmax
that decode and prefill share.

Invariant: a query's numbers do not depend on the tile that it is in, nor on the kernel: maxima are exact, sums over the
keys of a split are matrix products, which add the keys in their order, and splits are added in their order. A head's
channels are a tuple of parts, and a matrix product takes one part at a time, so that a warp needs registers only for a
part of a block. On a GPU the parts change no bit: scores are added in the order of the channels, and each channel of
the values is a sum of its own. Triton functions. Not responsible for: where keys and values are (see decode.py,
prompt.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

MASKED = tl.constexpr(float("-inf"))


@triton.jit
def parts_of(BLOCK_D: tl.constexpr, PART: tl.constexpr) -> tl.tuple:
    """Return the channels of a head, a part after the other."""
    channels = ()
    for i in tl.static_range(BLOCK_D // PART):
        channels += (tl.arange(i * PART, (i + 1) * PART),)  # type: ignore[assignment]
    return channels


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
def add_split(whole: tl.tuple, kept: tl.tensor, acc: tl.tuple, weight: tl.tensor) -> tl.tuple:
    """Return the sums of what there is and of a split, with their factors."""
    sums = ()
    for i in tl.static_range(len(acc)):
        sums += (tl.fma(acc[i], weight[:, None], whole[i] * kept[:, None]),)  # type: ignore[assignment]
    return sums


@triton.jit
def attend(
    q: tl.tuple,
    k_rows: tl.tensor,
    v_rows: tl.tensor,
    inside: tl.tensor,
    channels: tl.tuple,
    token: tl.tensor,
    position: tl.tensor,
    acc: tl.tuple,
    peak: tl.tensor,
    total: tl.tensor,
    low: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    SOFTCAP: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Add the keys and values of positions `token` [N], which begin at `k_rows` and `v_rows` [N], to acc [M, D],
    peak [M] and total [M, ...], whose columns are equal. Those that are not `inside` are not read.

    Query m sees the tokens from `low[m]` up to its own, at `position[m]`. Scores are in powers of 2: `scale` carries
    log2(e) unless SOFTCAP is set. Values are loaded after the weights are known: Triton puts a block into registers
    where its load is written.
    """
    s = tl.zeros([total.shape[0], token.shape[0]], tl.float32)
    for i in tl.static_range(len(channels)):
        real = inside[None, :] & (channels[i] < D)[:, None]
        k = tl.load(k_rows[None, :] + channels[i][:, None], mask=real, other=0.0)
        s = tl.dot(q[i], k, s, input_precision="ieee")
    s *= scale
    if SOFTCAP:
        s = softcap * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
    legal = (token[None, :] <= position[:, None]) & (token[None, :] >= low[:, None])
    s = tl.where(legal, s, MASKED)
    higher = tl.maximum(peak, tl.max(s, axis=1))
    base = tl.where(higher > MASKED, higher, 0.0)
    p = tl.exp2(s - base[:, None]).to(q[0].dtype)
    shrink = tl.exp2(peak - base)
    sums = ()
    for i in tl.static_range(len(channels)):
        real = inside[:, None] & (channels[i] < D)[None, :]
        v = tl.load(v_rows[:, None] + channels[i][None, :], mask=real, other=0.0)
        sums += (tl.dot(p, v, acc[i] * shrink[:, None], input_precision="ieee"),)  # type: ignore[assignment]
    ones = tl.full([token.shape[0], total.shape[1]], 1.0, p.dtype)
    total = tl.dot(p, ones, total * shrink[:, None], input_precision="ieee")
    return sums, higher, total
