"""The kinds of quantised matrices in GGUF files, as blocks that a product reads and as numbers.

The kinds of BLOCKS have integers with one scale for every 32 inputs, or for every 16 (Q3_K and Q6_K), so their blocks
are exact but for the scale, which is rounded to half precision (a relative error of at most 5e-4). IQ4_NL and IQ4_XS
have codes of integers in their place, and MXFP4 has those of floats (see mxfp4.py). Q2_K, which has an offset for every
16 inputs, and the IQ kinds of 3 bits and fewer, whose values no byte holds, are not there: their matrices are rounded
to 8 bits.
Invariant: the blocks of a matrix are those of its rows, whatever part of them is read at once.
Not responsible for: the names of tensors and the order of their rows (see gguf_blocks.py), the bytes of a block (see
kernels/unpack.py), the product (see kernels/blocks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from gpu_engine.model.quantised.mxfp4 import half_scales
from kernels import unpack
from kernels.blocks import BlockKind, Blocks, Field, PackedBlocks, RawBlocks


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What the blocks of a kind of matrix are."""

    kind: BlockKind
    has_offsets: bool


BLOCKS = {
    Kind.Q4_0: BlockForm(BlockKind.Q4, has_offsets=False),
    **dict.fromkeys((Kind.Q4_1, Kind.Q4_K), BlockForm(BlockKind.Q4, has_offsets=True)),
    Kind.Q5_0: BlockForm(BlockKind.Q5, has_offsets=False),
    **dict.fromkeys((Kind.Q5_1, Kind.Q5_K), BlockForm(BlockKind.Q5, has_offsets=True)),
    Kind.Q3_K: BlockForm(BlockKind.P4, has_offsets=False),
    Kind.Q6_K: BlockForm(BlockKind.Q6, has_offsets=False),
    Kind.Q8_0: BlockForm(BlockKind.Q8, has_offsets=False),
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS), BlockForm(BlockKind.L4, has_offsets=False)),
    Kind.MXFP4: BlockForm(BlockKind.F4, has_offsets=False),
}
"""The kinds that have blocks, and what these are."""
_UNPACKED = frozenset((*BLOCKS, Kind.Q2_K))
"""The kinds whose numbers kernels/unpack.py reads."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the numbers of a block lie in a file, in bytes from its begin; its scale comes first."""

    quants: int
    offset: int | None
    """None: the kind has none."""


_LAYOUTS = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q8_0, Kind.IQ4_NL), _Layout(2, None)),
    Kind.Q4_1: _Layout(4, 2),
}
"""The kinds whose blocks are those of a product as they lie in the file. The others are rewritten."""


def raw_blocks(raw: npt.NDArray[np.uint8], kind: Kind, order: torch.Tensor | None = None) -> RawBlocks:
    """Return the blocks of some rows of a kind in BLOCKS: where they lie, if a product takes them as they are.

    Raises ModelNotSupported for a scale of MXFP4 that half precision does not hold.

    Args:
        raw: [N, bytes of a row].
        kind: one of BLOCKS.
        order: int64 [B], the block in the file of each block; None: the same order.
    """
    memory, form, layout = torch.from_numpy(np.ascontiguousarray(raw)), BLOCKS[kind], _LAYOUTS.get(kind)
    if kind is Kind.MXFP4:
        return _float_blocks(memory, order)
    if layout is None or order is not None:
        inputs, offsets = _inputs(raw, kind), form.has_offsets
        return unpack.unpacked(memory, kind.value, inputs, form.kind, offsets=offsets, order=order)
    row_bytes = raw.shape[1]
    size = layout.quants + form.kind.block_bytes
    scales = Field(memory, 0, row_bytes, size)
    offsets_field = None if layout.offset is None else Field(memory, layout.offset, row_bytes, size)
    return RawBlocks(Field(memory, layout.quants, row_bytes, size), scales, offsets_field)


def _float_blocks(memory_Nk: torch.Tensor, order: torch.Tensor | None) -> RawBlocks:
    """Return the blocks of rows of MXFP4: an exponent each, then the codes in the order of a product."""
    (N, row_bytes), size = memory_Nk.shape, 1 + BlockKind.F4.block_bytes
    blocks_NBk = memory_Nk.view(N, -1, size)
    if order is not None:
        blocks_NBk = blocks_NBk[:, order]
    codes = Field(memory_Nk, 1, row_bytes, size) if order is None else Field.of(blocks_NBk[..., 1:])
    return RawBlocks(codes, Field.of(half_scales(blocks_NBk[..., 0])), None)


def blocks_of(raw: npt.NDArray[Any], kind: Kind) -> Blocks | None:
    """Return the blocks of a matrix's bytes, uint8 [N, bytes of a row]; None for a kind that is not in BLOCKS."""
    if kind not in BLOCKS:
        return None
    raw_Nk = np.require(
        raw.view(np.uint8).reshape(raw.shape[0], -1), requirements=["C", "W"]
    )  # torch takes no mapped file
    form, shape = BLOCKS[kind], (len(raw_Nk), _inputs(raw_Nk, kind))
    packed = PackedBlocks.unfilled(form.kind, shape, offsets=form.has_offsets)
    packed.put(0, shape[0], raw_blocks(raw_Nk, kind))
    return packed.unpacked()


def numbers_of(raw: npt.NDArray[np.uint8], kind: Kind, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of some rows, [N, K]: the gguf package's, in `dtype`. `raw`: [N, bytes of a row]."""
    if kind in _UNPACKED and dtype in (torch.float32, torch.bfloat16):
        memory = torch.from_numpy(np.ascontiguousarray(raw))
        return unpack.dequantised(memory, kind.value, _inputs(raw, kind), dtype)
    return torch.from_numpy(dequantize(raw, kind)).to(dtype)


def _inputs(raw: npt.NDArray[np.uint8], kind: Kind) -> int:
    """Return K of rows, [N, bytes of a row]."""
    in_block, num_bytes = GGML_QUANT_SIZES[kind]
    return int(raw.shape[1] // num_bytes * in_block)
