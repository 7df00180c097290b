"""Products with a matrix of weights in which a row has the same bits beside any number of other rows.

Reading the weights bounds a product of a few rows, so a program streams a stripe of them through shared memory, many
blocks in flight, and multiplies each by a tile of rows. The tile grows with the number of rows. Invariant: an output is
one fp32 accumulator that takes the products in the order of k, 16 at a time, whatever the tile: K is never split, and
no two programs share an output. The matrix instruction of a tile must add 16 products as those of the other tiles do;
gpu_engine/model/linear.py compares them on the device before it uses them. A gated block's activation is the end of
its product. Not responsible for: when the library multiplies instead (see linear.py).

Shapes: M rows, N outputs, K inputs, J outputs of gate and up side by side.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda.fused import activated
from kernels.fused_arguments import EVERYWHERE, Activation

_DTYPES = (torch.bfloat16, torch.float16)
ROW_TILES = (16, 32, 64, 128)
"""The rows that a program may multiply; more rows are several tiles of the largest."""


@triton.jit
def product_kernel(
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
    """Grid (stripes of N * tiles of M): out[m, n] = sum over k of x[m, k] * weight[n, k], in fp32.

    Programs of one stripe are neighbours, so that the tiles of M find its weights in the L2 cache.
    """
    tiles = tl.cdiv(M, ROWS)
    n = (tl.program_id(0) // tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    weight_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + m[None, :].to(tl.int64) * x_stride + k[:, None]
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
def gated_product_kernel(
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
    """Grid as above, over WIDTH: out[m, n] = act(gate) * up; gate is column n of `product_kernel`, up is n + WIDTH."""
    tiles = tl.cdiv(M, ROWS)
    n = (tl.program_id(0) // tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    gate = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    gate_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    up_at = gate_at + WIDTH.to(tl.int64) * K
    x_at = x + m[None, :].to(tl.int64) * x_stride + k[:, None]
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
class Tile:
    """Sizes of a program. None is part of the result's bits: all are speed."""

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, M: int, N: int, K: int, shared_bytes: int) -> Tile:
        """Return the fastest sizes measured on an H100 (docs/log/), within a multiprocessor's shared memory."""
        rows = next((tile for tile in ROW_TILES if tile >= M), ROW_TILES[-1])
        if N * K < 4 << 20:
            # Small matrices end before many blocks are in flight.
            found = cls(16, 16, 128, 2, 6) if rows == 16 else cls(min(rows, 32) if M <= 64 else rows, 64, 64, 4, 6)
        elif N < 16_384:
            # Few programs: each needs many blocks in flight, so two tiles of rows beat one that is twice as large.
            found = {
                16: cls(16, 64, 128, 4, 6),
                32: cls(32, 64, 128, 4, 6),
                64: cls(32, 64, 128, 4, 6),
                128: cls(64 if M <= 128 else 128, 64, 128, 4, 4 if M <= 128 else 3),
            }[rows]
        else:
            found = {
                16: cls(16, 64, 128, 4, 4),
                32: cls(32, 64, 128, 4, 4),
                64: cls(64, 128, 128, 8, 3),
                128: cls(128, 128, 64, 8, 5),
            }[rows]
        return found.within(shared_bytes)

    def within(self, shared_bytes: int) -> Tile:
        """Return the tile with as many stages as a multiprocessor's shared memory holds, two at least."""
        stage = (self.block_n + self.rows) * self.block_k * 2
        held = max(2, (shared_bytes - (4 << 10)) // stage) if shared_bytes else self.num_stages
        return Tile(self.rows, self.block_n, self.block_k, self.num_warps, min(self.num_stages, held))


def product(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, *, tile: Tile | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias, [M, N].

    bfloat16 or float16, products summed in float32. `weight_NK` is contiguous, rows of `x_MK` are. `tile`: None is the
    fastest one.
    """
    M, N, K = _checked(x_MK, weight_NK, bias_N)
    out_MN = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    tile = tile or Tile.of(M, N, K, shared_bytes(x_MK.device))
    product_kernel[(triton.cdiv(N, tile.block_n) * triton.cdiv(M, tile.rows),)](
        x_MK,
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        out_MN,
        M,
        N,
        x_MK.stride(0),
        K=K,
        ROWS=tile.rows,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN=K % tile.block_k == 0,
        BIAS=bias_N is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_MN


def gated_product(
    x_MK: torch.Tensor,
    weight_JK: torch.Tensor,
    act: Activation,
    bias_J: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return act(gate) * up, [M, J / 2], of the product x @ weight.T + bias whose columns are gate and then up.

    The bits are those of `product` and `kernels.cuda.fused.gated`, in one launch; arguments as in the first.
    """
    M, J, K = _checked(x_MK, weight_JK, bias_J)
    assert J % 2 == 0, J
    assert act in EVERYWHERE, act
    width = J // 2
    out_MI = torch.empty(M, width, dtype=x_MK.dtype, device=x_MK.device)
    tile = tile or Tile.of(M, J, K, shared_bytes(x_MK.device))
    block_n = max(16, tile.block_n // 2)  # two stripes of weights are in flight
    gated_product_kernel[(triton.cdiv(width, block_n) * triton.cdiv(M, tile.rows),)](
        x_MK,
        weight_JK,
        weight_JK if bias_J is None else bias_J,
        out_MI,
        M,
        width,
        x_MK.stride(0),
        K=K,
        ROWS=tile.rows,
        BLOCK_N=block_n,
        BLOCK_K=tile.block_k,
        EVEN=K % tile.block_k == 0,
        BIAS=bias_J is not None,
        ACT=int(act),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_MI


def _checked(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> tuple[int, int, int]:
    """Assert what the kernels take; return M, N, K."""
    (M, K), N = x_MK.shape, len(weight_NK)
    assert M >= 1, M
    assert x_MK.dtype == weight_NK.dtype, (x_MK.dtype, weight_NK.dtype)
    assert x_MK.dtype in _DTYPES, x_MK.dtype
    assert weight_NK.shape == (N, K), (weight_NK.shape, x_MK.shape)
    assert weight_NK.is_contiguous()
    assert x_MK.stride(1) == 1
    assert bias_N is None or (bias_N.shape == (N,) and bias_N.dtype == x_MK.dtype), bias_N
    return M, N, K


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory of a multiprocessor; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
