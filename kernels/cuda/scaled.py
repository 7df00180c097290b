"""Rows in 8 bits with a scale each, for torch's scaled products: one kernel before a product, one after int8's.

A row's scale is its largest magnitude over the largest number of the type, so it follows from only that row
(dynamic, per token). Invariants: a row's result has the same bits for any number of rows; scales and values are
correctly rounded, so they have the same bits on every device. Not responsible for: the products (`torch._scaled_mm`,
`torch._int_mm`), and weights (see gpu_engine/model/quantised/scaled.py).

Shapes: M rows, L rows with padding, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each type."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 1024


@triton.jit
def nearest_float8(y: tl.tensor) -> tl.tensor:
    """Round fp32 of at most 448 to the nearest number of e4m3, ties to even, so that the conversion is exact.

    The conversion of Triton's interpreter is not: it loses the carry of a mantissa.
    """
    bits = y.to(tl.int32, bitcast=True)
    near = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2^-6 the numbers are 2^-9 apart, as floats from 2^14 on are.
    small = (y + 24576.0) - 24576.0
    return tl.where(tl.abs(y) < 0.015625, small, near)


@triton.jit
def quantise_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    MOST: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (L,): one row. WHOLE: integers. Rows from M on are 0."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    v = tl.load(x + row * x_stride + k, mask=k < tl.where(row < M, K, 0), other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(v), axis=0)
    scale = tl.where(peak > 0.0, tl.div_rn(peak, MOST), 1.0)
    y = tl.div_rn(v, scale)
    if WHOLE:
        y = tl.floor(y + 0.5)
    y = tl.minimum(tl.maximum(y, -MOST), MOST)
    if not WHOLE:
        y = nearest_float8(y)
    tl.store(scales + row, scale)
    tl.store(out + row * K + k, y.to(out.dtype.element_ty), mask=k < K)


def quantise_rows(x_MK: torch.Tensor, dtype: torch.dtype, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values [L, K] of `dtype`, scales fp32 [L, 1]) with x = values * scales; L = `num_rows`, at least M.

    `dtype` is int8 or float8_e4m3fn; rows of `x_MK` are contiguous. Rows after M have values 0 and scale 1.
    """
    M, K = x_MK.shape
    assert x_MK.dtype in _DTYPES, x_MK.dtype
    assert x_MK.stride(1) == 1
    assert num_rows >= M, (num_rows, M)
    out_LK = torch.empty(num_rows, K, dtype=dtype, device=x_MK.device)
    scales_L1 = torch.empty(num_rows, 1, dtype=torch.float32, device=x_MK.device)
    block = triton.next_power_of_2(K)
    quantise_kernel[(num_rows,)](
        x_MK,
        out_LK,
        scales_L1,
        M,
        K,
        x_MK.stride(0),
        MOST=MOST[dtype],
        WHOLE=dtype is torch.int8,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out_LK, scales_L1


@triton.jit
def rescale_kernel(
    sums: tl.tensor,
    row_scales: tl.tensor,
    column_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (M, blocks of N): sums of int8 products to numbers."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    y = tl.load(sums + row * N + n, mask=inside, other=0).to(tl.float32) * tl.load(row_scales + row)
    y = y * tl.load(column_scales + n, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, y.to(out.dtype.element_ty), mask=inside)


def rescale(
    sums_LN: torch.Tensor,
    row_scales_L1: torch.Tensor,
    column_scales_N: torch.Tensor,
    bias_N: torch.Tensor | None,
    num_rows: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return sums * row scale * column scale + bias of the first M = `num_rows` rows, [M, N] of `dtype`.

    `sums_LN` int32; scales fp32; all contiguous.
    """
    N = sums_LN.shape[1]
    assert sums_LN.dtype == torch.int32
    assert row_scales_L1.dtype == column_scales_N.dtype == torch.float32
    assert sums_LN.is_contiguous()
    assert column_scales_N.shape == (N,)
    assert bias_N is None or bias_N.shape == (N,)
    assert dtype in _DTYPES, dtype
    out_MN = torch.empty(num_rows, N, dtype=dtype, device=sums_LN.device)
    rescale_kernel[(num_rows, triton.cdiv(N, _BLOCK))](
        sums_LN,
        row_scales_L1,
        column_scales_N,
        sums_LN if bias_N is None else bias_N,
        out_MN,
        N,
        BIAS=bias_N is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out_MN
