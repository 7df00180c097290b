"""Reads the quantised matrices of GGUF files: as the blocks of a product, or as numbers.

A kind is the number that ggml gives it. Invariant: numbers have the bits of the gguf package's dequantisation, and a
row's have them whatever rows are read with it. Not responsible for: which kinds are read as blocks (see
gpu_engine/model/quantised/gguf_kinds.py), rounding floats (see blocks.py).
"""

from __future__ import annotations

import ctypes

import torch

from kernels.blocks import BLOCK, BlockKind, Field, RawBlocks
from kernels.library import native


class _UnpackArgs(ctypes.Structure):
    """Mirror of `struct unpack_args`."""

    _fields_ = [
        ("raw", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("rows", "row_bytes", "blocks", "kind")],
        *[(name, ctypes.c_void_p) for name in ("quants", "scales", "offsets")],
    ]


class _DequantiseArgs(ctypes.Structure):
    """Mirror of `struct dequantise_args`."""

    _fields_ = [
        ("raw", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("rows", "row_bytes", "blocks", "kind", "bf16")],
        ("out", ctypes.c_void_p),
    ]


def unpacked(
    raw_Nk: torch.Tensor, number: int, num_inputs: int, kind: BlockKind, *, offsets: bool, order: torch.Tensor | None
) -> RawBlocks:
    """Return the blocks of some rows.

    Args:
        raw_Nk: uint8 [N, bytes of a row], contiguous.
        number: the kind in the file; Q2_K has no blocks, and those of MXFP4 are not unpacked.
        num_inputs: K, a multiple of 32.
        kind: of the blocks.
        offsets: the blocks have them; those of Q4_0 do not.
        order: int64 [B], the block in the file of each block; None: the same order.
    """
    N, B = len(raw_Nk), num_inputs // BLOCK
    quants_NBk = torch.empty(N, B, kind.block_bytes, dtype=torch.uint8)
    scales_NBs = torch.empty(N, B, kind.scales, dtype=torch.float16)
    offsets_NB = torch.empty(N, B, dtype=torch.float16) if offsets else None
    assert raw_Nk.is_contiguous()
    args = _UnpackArgs(
        raw_Nk.data_ptr(),
        N,
        raw_Nk.shape[1],
        B,
        number,
        quants_NBk.data_ptr(),
        scales_NBs.data_ptr(),
        None if offsets_NB is None else offsets_NB.data_ptr(),
    )
    native().lockstep_unpack_blocks(ctypes.byref(args))
    if order is not None:
        quants_NBk, scales_NBs = quants_NBk[:, order], scales_NBs[:, order]
        offsets_NB = None if offsets_NB is None else offsets_NB[:, order]
    scales = Field.of(scales_NBs.reshape(N, -1))
    return RawBlocks(Field.of(quants_NBk), scales, None if offsets_NB is None else Field.of(offsets_NB))


def dequantised(raw_Nk: torch.Tensor, number: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of some rows, [N, K] in float32, or rounded from it to bfloat16.

    `raw_Nk`: uint8 [N, bytes of a row], contiguous. `number`: the kind in the file.
    """
    assert dtype in (torch.float32, torch.bfloat16), dtype
    assert raw_Nk.is_contiguous()
    out_NK = torch.empty(len(raw_Nk), num_inputs, dtype=dtype)
    args = _DequantiseArgs(
        raw_Nk.data_ptr(),
        len(raw_Nk),
        raw_Nk.shape[1],
        num_inputs // BLOCK,
        number,
        dtype is torch.bfloat16,
        out_NK.data_ptr(),
    )
    native().lockstep_dequantise(ctypes.byref(args))
    return out_NK
