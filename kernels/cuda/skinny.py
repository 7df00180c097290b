"""Products of a few rows with a large matrix: most of the time of a decode step of few sequences.

Reading the weights bounds them, so a program streams a stripe of them through shared memory, many blocks in flight, and
multiplies each by all of the rows at once. A gated block's activation is the end of its product. Invariant: a row's
result has the same bits for any number of rows up to 16, so a token does not depend on the drafts that were verified
next to it. Not responsible for: more rows, which cuBLAS multiplies (see gpu_engine/model/linear.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda.fused import activated
from kernels.fused_arguments import Activation

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


@triton.jit
def skinny_gated_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    WIDTH: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
) -> None:
    """Grid (stripes of WIDTH): out[m, n] = act(gate) * up; gate is column n of `skinny_kernel`, up is n + WIDTH."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    gate = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    gate_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    up_at = gate_at + WIDTH.to(tl.int64) * K
    x_at = x + m[None, :] * x_stride + k[:, None]
    for start in range(0, K, BLOCK_K):
        real_n, real_m = (n < WIDTH)[:, None], (m < M)[None, :]
        if not EVEN:
            real_n, real_m = real_n & (k < K - start)[None, :], real_m & (k < K - start)[:, None]
        v = tl.load(x_at + start, mask=real_m, other=0.0)
        gate_w = tl.load(gate_at + start, mask=real_n, other=0.0, eviction_policy="evict_first")
        up_w = tl.load(up_at + start, mask=real_n, other=0.0, eviction_policy="evict_first")
        gate = tl.dot(gate_w, v, gate, input_precision="ieee")
        up = tl.dot(up_w, v, up, input_precision="ieee")
    if BIAS:
        gate += tl.load(bias + n, mask=n < WIDTH, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + WIDTH + n, mask=n < WIDTH, other=0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    cells = (m < M)[None, :] & (n < WIDTH)[:, None]
    at = out + m[None, :].to(tl.int64) * WIDTH + n[:, None]
    tl.store(at, activated(gate.to(dtype), up.to(dtype), ACT), mask=cells)


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
        """Return the fastest sizes measured on an H200 (docs/log/), within a multiprocessor's shared memory."""
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
        x_MK,
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        out_MN,
        M,
        N,
        x_MK.stride(0),
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


def skinny_gated(
    x_MK: torch.Tensor, weight_JK: torch.Tensor, act: Activation, bias_J: torch.Tensor | None = None
) -> torch.Tensor:
    """Return act(gate) * up, [M, J / 2], of the product x @ weight.T + bias whose columns are gate and then up.

    The bits are those of `skinny_linear` and `kernels.cuda.fused.gated`, in one launch; arguments as in the
    first.
    """
    (M, K), J = x_MK.shape, len(weight_JK)
    assert 1 <= M <= MAX_ROWS, M
    assert x_MK.dtype == weight_JK.dtype, (x_MK.dtype, weight_JK.dtype)
    assert x_MK.dtype in _DTYPES, x_MK.dtype
    assert weight_JK.shape == (J, K), (weight_JK.shape, x_MK.shape)
    assert weight_JK.is_contiguous()
    assert x_MK.stride(1) == 1
    assert J % 2 == 0, J
    assert bias_J is None or (bias_J.shape == (J,) and bias_J.dtype == x_MK.dtype), bias_J
    width = J // 2
    out_MI = torch.empty(M, width, dtype=x_MK.dtype, device=x_MK.device)
    tuning = SkinnyTuning.of(J, K, _shared_bytes(x_MK.device))
    block_n = max(16, tuning.block_n // 2)  # two stripes of weights are in flight
    skinny_gated_kernel[(triton.cdiv(width, block_n),)](
        x_MK,
        weight_JK,
        weight_JK if bias_J is None else bias_J,
        out_MI,
        M,
        width,
        x_MK.stride(0),
        K=K,
        ROWS=MAX_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=tuning.block_k,
        EVEN=K % tuning.block_k == 0,
        BIAS=bias_J is not None,
        ACT=int(act),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out_MI


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
