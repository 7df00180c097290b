"""The kinds of quantised matrices in GGUF files, as blocks that a product reads.

These kinds have integers with one scale for every 32 inputs, so their blocks are exact but for the scale, which is
rounded to half precision (a relative error of at most 5e-4). Q2_K, Q3_K, Q6_K and the IQ kinds of 3 bits and fewer have
a scale for every 16 inputs or values that no byte holds, and are not here: their matrices are rounded to 8 bits.
Invariant: the blocks of a matrix are those of its rows, whatever part of them is read at once.
Not responsible for: the names of tensors and the order of their rows (see gguf_blocks.py), the product (see
kernels/blocks.py).

The layouts are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from kernels.blocks import BLOCK, BlockKind, Blocks, quantised

_Bytes = npt.NDArray[np.uint8]

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of e2m1, in the order of its codes."""


def blocks_of(raw: npt.NDArray[Any], kind: Kind) -> Blocks | None:
    """Return the blocks of a matrix's bytes, uint8 [N, bytes of a row]; None for a kind that is not in BLOCKS."""
    raw_Nk = raw.view(np.uint8).reshape(raw.shape[0], -1)
    return _READERS[kind](raw_Nk) if kind in BLOCKS else None


def _halves(raw_NBk: _Bytes) -> torch.Tensor:
    """Two bytes of every block as float16, [N, B]."""
    return torch.from_numpy(np.ascontiguousarray(raw_NBk).view(np.float16)[..., 0].copy())


def _nibbles(raw_NBk: _Bytes) -> _Bytes:
    """Low halves, then high halves of every block's bytes."""
    return np.concatenate([raw_NBk & 15, raw_NBk >> 4], axis=-1)


def _fifth_bits(raw_NB4: _Bytes) -> _Bytes:
    """32 bits of every block, each as 0 or 16, [N, B, 32]."""
    return np.unpackbits(raw_NB4, axis=-1, bitorder="little") * np.uint8(16)


def _in_rows(quants_NBk: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(quants_NBk.reshape(len(quants_NBk), -1)))


def _q8_0(raw_Nk: _Bytes) -> Blocks:
    raw_NBk = raw_Nk.reshape(len(raw_Nk), -1, 2 + BLOCK)
    quants_NBk = np.ascontiguousarray(raw_NBk[..., 2:]).view(np.int8)
    return Blocks(BlockKind.Q8, _in_rows(quants_NBk).clone(), _halves(raw_NBk[..., :2]), None)


def _q4_0(raw_Nk: _Bytes) -> Blocks:
    raw_NBk = raw_Nk.reshape(len(raw_Nk), -1, 2 + BLOCK // 2)
    scales_NB = _halves(raw_NBk[..., :2])
    return Blocks(BlockKind.Q4, _in_rows(_nibbles(raw_NBk[..., 2:])), scales_NB, -8 * scales_NB)


def _q4_1(raw_Nk: _Bytes) -> Blocks:
    raw_NBk = raw_Nk.reshape(len(raw_Nk), -1, 4 + BLOCK // 2)
    quants_NK = _in_rows(_nibbles(raw_NBk[..., 4:]))
    return Blocks(BlockKind.Q4, quants_NK, _halves(raw_NBk[..., :2]), _halves(raw_NBk[..., 2:4]))


def _q5_0(raw_Nk: _Bytes) -> Blocks:
    raw_NBk = raw_Nk.reshape(len(raw_Nk), -1, 6 + BLOCK // 2)
    quants_NBk = (_nibbles(raw_NBk[..., 6:]) | _fifth_bits(raw_NBk[..., 2:6])).astype(np.int8) - 16
    return Blocks(BlockKind.Q8, _in_rows(quants_NBk), _halves(raw_NBk[..., :2]), None)


def _q5_1(raw_Nk: _Bytes) -> Blocks:
    raw_NBk = raw_Nk.reshape(len(raw_Nk), -1, 8 + BLOCK // 2)
    quants_NBk = (_nibbles(raw_NBk[..., 8:]) | _fifth_bits(raw_NBk[..., 4:8])).astype(np.int8)
    return Blocks(BlockKind.Q8, _in_rows(quants_NBk), _halves(raw_NBk[..., :2]), _halves(raw_NBk[..., 2:4]))


def _scales_and_minima(raw_NSk: _Bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and offsets of Q4_K and Q5_K, [N, B]: two halves for 256 inputs, and 6 bits for each block."""
    N = len(raw_NSk)
    d_NS1, least_NS1 = (_halves(raw_NSk[..., at : at + 2]).float()[..., None] for at in (0, 2))
    packed = raw_NSk[..., 4:16].reshape(N, -1, 3, 4)
    low, high, mixed = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate([low & 63, (mixed & 15) | ((low >> 2) & 48)], axis=-1)
    minima = np.concatenate([high & 63, (mixed >> 4) | ((high >> 2) & 48)], axis=-1)
    scales_NB = (d_NS1 * torch.from_numpy(scales.astype(np.float32))).half().reshape(N, -1)
    return scales_NB, (-least_NS1 * torch.from_numpy(minima.astype(np.float32))).half().reshape(N, -1)


def _q4_k(raw_Nk: _Bytes) -> Blocks:
    raw_NSk = raw_Nk.reshape(len(raw_Nk), -1, 144)
    quants_NSk = _nibbles(raw_NSk[..., 16:].reshape(len(raw_Nk), -1, 4, BLOCK))
    return Blocks(BlockKind.Q4, _in_rows(quants_NSk), *_scales_and_minima(raw_NSk))


def _q5_k(raw_Nk: _Bytes) -> Blocks:
    N = len(raw_Nk)
    raw_NSk = raw_Nk.reshape(N, -1, 176)
    low_NS8k = _nibbles(raw_NSk[..., 48:].reshape(N, -1, 4, BLOCK)).reshape(N, -1, 8, BLOCK)
    # Bit b of byte i is the fifth bit of input i of block b.
    fifth_NS8k = raw_NSk[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Blocks(BlockKind.Q8, _in_rows((low_NS8k | fifth_NS8k << 4).astype(np.int8)), *_scales_and_minima(raw_NSk))


def _iq4_nl(raw_Nk: _Bytes) -> Blocks:
    raw_NBk = raw_Nk.reshape(len(raw_Nk), -1, 2 + BLOCK // 2)
    return Blocks(BlockKind.Q8, _in_rows(_IQ4[_nibbles(raw_NBk[..., 2:])]), _halves(raw_NBk[..., :2]), None)


def _iq4_xs(raw_Nk: _Bytes) -> Blocks:
    N = len(raw_Nk)
    raw_NSk = raw_Nk.reshape(N, -1, 136)
    d_NS1 = _halves(raw_NSk[..., :2]).float()[..., None]
    high_NS1 = np.ascontiguousarray(raw_NSk[..., 2:4]).view(np.uint16)
    block = np.arange(8, dtype=np.uint8)
    low_NS8 = raw_NSk[..., 4:8][..., block // 2] >> (4 * (block % 2)) & 15
    scales_NS8 = (low_NS8 | ((high_NS1 >> (2 * block).astype(np.uint16)) & 3) << 4).astype(np.float32) - 32
    quants_NS8k = _IQ4[_nibbles(raw_NSk[..., 8:].reshape(N, -1, 8, BLOCK // 2))]
    scales_NB = (d_NS1 * torch.from_numpy(scales_NS8)).half().reshape(N, -1)
    return Blocks(BlockKind.Q8, _in_rows(quants_NS8k), scales_NB, None)


def _mxfp4(raw_Nk: _Bytes) -> Blocks:
    """Scales are powers of two. One below half precision's becomes 0; with one above it these rows are rounded."""
    raw_NBk = raw_Nk.reshape(len(raw_Nk), -1, 1 + BLOCK // 2)
    scales_NB = torch.from_numpy(np.ldexp(np.float32(1), raw_NBk[..., 0].astype(np.int32) - 128)).half()
    if not bool(scales_NB.isfinite().all()):
        return quantised(torch.from_numpy(dequantize(raw_Nk, Kind.MXFP4)), BlockKind.Q8)
    return Blocks(BlockKind.Q8, _in_rows(_MXFP4[_nibbles(raw_NBk[..., 1:])]), scales_NB, None)


_READERS: dict[Kind, Callable[[_Bytes], Blocks]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.IQ4_NL: _iq4_nl,
    Kind.IQ4_XS: _iq4_xs,
    Kind.MXFP4: _mxfp4,
}


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What the blocks of a kind of matrix are."""

    kind: BlockKind
    has_offsets: bool


BLOCKS = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q4_1, Kind.Q4_K), BlockForm(BlockKind.Q4, has_offsets=True)),
    **dict.fromkeys((Kind.Q5_1, Kind.Q5_K), BlockForm(BlockKind.Q8, has_offsets=True)),
    **dict.fromkeys(
        (Kind.Q5_0, Kind.Q8_0, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4), BlockForm(BlockKind.Q8, has_offsets=False)
    ),
}
"""The kinds that this module reads, and their blocks."""
