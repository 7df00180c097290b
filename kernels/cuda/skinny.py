"""Products of a few rows with a large matrix: most of the time of a decode step of few sequences.

Reading the weights bounds them, so a program streams a stripe of them through shared memory, many blocks in flight, and
multiplies each by all of the rows at once. Invariant: a row's result has the same bits for any number of rows up to
16, so a token does not depend on the drafts that were verified beside it. Not responsible for: more rows, which
cuBLAS multiplies (see gpu_engine/model/linear.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_ROWS = 16
_DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def skinny_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """Grid (stripes of N): out[m, n] = sum over k of x[m, k] * weight[n, k], in fp32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    weight_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + m[None, :] * x_stride + k[:, None]
    for start in range(0, K, BLOCK_K):
        # A mask along k would split the 16 bytes that a thread loads at once.
        real_n, real_m = (n < N)[:, None], (m < M)[None, :]
        if not EVEN:
            real_n, real_m = real_n & (k < K - start)[None, :], real_m & (k < K - start)[:, None]
        w = tl.load(weight_at + start, mask=real_n, other=0.0, eviction_policy="evict_first")
        v = tl.load(x_at + start, mask=real_m, other=0.0)
        acc = tl.dot(w, v, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    cells = (m < M)[None, :] & (n < N)[:, None]
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], acc.to(out.dtype.element_ty), mask=cells)


@dataclass(frozen=True, slots=True)
class SkinnyTuning:
    """Sizes of the kernel's blocks; `block_k` is part of the result's bits, the rest is speed. All follow from the
    matrix."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, N: int, K: int, shared_bytes: int) -> SkinnyTuning:
        """Return the fastest sizes measured on an H200 (docs/log.md), within a multiprocessor's shared memory."""
        if N * K < 4 << 20:
            return cls(16, 128, 2, 6)
        # Small matrices end before many blocks are in flight; large ones have enough programs.
        return cls(64, 128, 4, 6 if N < 16_384 and shared_bytes >= 160 << 10 else 4)


def skinny_linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, [M, N], for M from 1 to 16.

    bfloat16 or float16, products summed in float32. `weight_NK` is contiguous, rows of `x_MK` are.
    """
    (M, K), N = x_MK.shape, len(weight_NK)
    assert 1 <= M <= MAX_ROWS, M
    assert x_MK.dtype == weight_NK.dtype, (x_MK.dtype, weight_NK.dtype)
    assert x_MK.dtype in _DTYPES, x_MK.dtype
    assert weight_NK.shape == (N, K), (weight_NK.shape, x_MK.shape)
    assert weight_NK.is_contiguous()
    assert x_MK.stride(1) == 1
    assert bias_N is None or (bias_N.shape == (N,) and bias_N.dtype == x_MK.dtype), bias_N
    out_MN = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    tuning = SkinnyTuning.of(N, K, _shared_bytes(x_MK.device))
    skinny_kernel[(triton.cdiv(N, tuning.block_n),)](
        *(x_MK, weight_NK, weight_NK if bias_N is None else bias_N, out_MN, M, N, x_MK.stride(0)),
        K=K,
        ROWS=MAX_ROWS,
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        EVEN=K % tuning.block_k == 0,
        BIAS=bias_N is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out_MN


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
