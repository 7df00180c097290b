"""Shared noise and ordered floats for the sampling kernels: the device's counterpart of kernels/native/accept.h.

Invariant: the noise of (seed, position, token) is the CPU's value to a few ulp, whatever tile the token lies in, so
a token drawn on either device is the same. Triton functions, called from other kernels. Not responsible for: launches
(see accept.py).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_normal(x: tl.tensor) -> tl.tensor:
    """Natural logarithm of normal positive fp32, within 2 ulp (Cephes logf).

    The hardware's approximation is absolute near 1, where the largest draws come from.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = m < 0.707106781186547524
    exponent = tl.where(low, exponent - 1, exponent).to(tl.float32)
    m = tl.where(low, m + m, m) - 1.0
    z = m * m
    p = m * 7.0376836292e-2 - 1.1514610310e-1
    p = p * m + 1.1676998740e-1
    p = p * m - 1.2420140846e-1
    p = p * m + 1.4249322787e-1
    p = p * m - 1.6668057665e-1
    p = p * m + 2.0000714765e-1
    p = p * m - 2.4999993993e-1
    p = p * m + 3.3333331174e-1
    y = p * m * z + exponent * -2.12194440e-4 - 0.5 * z
    return m + y + exponent * 0.693359375


@triton.jit
def gumbel_of_word(word: tl.tensor) -> tl.tensor:
    """-log(-log u) of a random 32-bit word: 23 bits and a half, never 0, never 1."""
    u = ((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return 0.0 - log_normal(0.0 - log_normal(u))


@triton.jit
def gumbel_tile(seed: tl.tensor, position: tl.tensor, first: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Noise of the ROWS * 32 tokens from `first` (a multiple of 4), as [ROWS, 32]: one Philox call for four tokens."""
    counter = (first // 4 + tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]).to(tl.uint32)
    zero = tl.zeros([ROWS, 8], tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS, 8, 2, 2]: the token is the row-major index
    return gumbel_of_word(tl.reshape(words, [ROWS, 32]))


@triton.jit
def gumbel_at(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Noise of any tokens, in their shape: four times the work of `gumbel_tile`."""
    zero = (token * 0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, (token // 4).to(tl.uint32), zero + position.to(tl.uint32), zero, zero)
    lane = token % 4
    return gumbel_of_word(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def order_of(x: tl.tensor) -> tl.tensor:
    """fp32 as int64 in [0, 2^32) with the same order, so that a threshold can be bisected exactly."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit
def float_of(order: tl.tensor) -> tl.tensor:
    """Inverse of `order_of`."""
    bits = tl.where(order >= 0x80000000, order - 0x80000000, 0xFFFFFFFF - order)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def noise_kernel(out: tl.tensor, seed: tl.tensor, position: tl.tensor, n: tl.tensor, ROWS: tl.constexpr) -> None:
    """out[0..n) := the noise of one position."""
    first = tl.program_id(0) * ROWS * 32
    token = first + tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    position = tl.cast(position, tl.int32)
    tl.store(out + token, gumbel_tile(tl.cast(seed, tl.int64), position, first, ROWS), mask=token < n)
