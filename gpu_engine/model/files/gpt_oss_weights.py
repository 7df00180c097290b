"""The weights of gpt-oss in Hugging Face's format, by expert: of MXFP4, as they are published, or of floats.

A tensor has all experts of a layer, and the outputs of gate and up in turn; here the gate's come first (see
model/experts.py). Matrices of floats are transposed, those of MXFP4 are not. Invariant: a weight has the bits that
transformers' loader gives it. Not responsible for: tensors outside the experts (see safetensors_weights.py), blocks of
MXFP4 (see quantised/mxfp4.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gpu_engine.model.files.pieces import EXPERT, GROUP, check_parts
from gpu_engine.model.files.safetensors_weights import Place, SafetensorsWeights
from gpu_engine.model.quantised.linear import BlockLinear, check_product, some_rows
from gpu_engine.model.quantised.mxfp4 import mxfp4_blocks, mxfp4_numbers
from kernels.blocks import BLOCK, BlockKind, PackedBlocks

_BLOCKS, _SCALES = "_blocks", "_scales"
_STEP = 8 * GROUP
"""Rows that are dequantised at once."""


class _Matrix(NamedTuple):
    """An expert's matrix in MXFP4."""

    blocks: Place
    """Bytes [N, B, 16]."""
    scales: Place
    """Bytes [N, B]."""

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        return self.blocks.bytes(), self.scales.bytes()


class GptOssWeights(SafetensorsWeights):
    """The tensors of a folder with a gpt-oss."""

    @property
    def plain(self) -> bool:
        """True: every tensor has a type that is read here."""
        packed = (_BLOCKS, _SCALES)
        return bool(self._places) and all(
            place.dtype is not None or name.endswith(packed) for name, place in self._places.items()
        )

    @property
    def quantised(self) -> bool:
        """True: the experts are in MXFP4."""
        return any(name.endswith(_BLOCKS) for name in self._places)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a parameter; None: the files have none of that name."""
        if (expert := EXPERT.fullmatch(name)) is None:
            return super().shape(name)
        if (matrix := self._matrix(name)) is not None:
            N, B, _ = matrix.blocks.shape
            return N, B * BLOCK
        floats = self._floats(expert)
        return None if floats is None else floats.shape[::-1]

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter in memory of its own."""
        expert = EXPERT.fullmatch(name)
        if expert is None:
            return super().tensor(name, dtype)
        if expert[4] == "weight":
            shape = self.shape(name)
            assert shape is not None, name
            made = torch.empty(shape, dtype=dtype)
            for first, part in self.rows(name, dtype):
                made[first : first + len(part)] = part
            return made
        floats = self._floats(expert)
        assert floats is not None, name
        return floats.values()[_order(expert, floats.shape[0])].to(dtype)

    def rows(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of a row of a parameter, a multiple of 32, and the next rows from it on, [n, K]."""
        if (expert := EXPERT.fullmatch(name)) is None:
            yield from super().rows(name, dtype)
            return
        matrix, floats = self._matrix(name), self._floats(expert)
        if matrix is not None:
            blocks_NBk, scales_NB = matrix.read()
            for first, rows in _steps(_order(expert, len(blocks_NBk))):
                yield first, mxfp4_numbers(blocks_NBk[rows], scales_NB[rows], dtype)
        elif floats is not None:
            values_NK = floats.values().T
            for first, rows in _steps(_order(expert, len(values_NK))):
                yield first, values_NK[rows].to(dtype).contiguous()

    def blocks_kind(self, name: str) -> BlockKind | None:
        """Return the kind of the product over a matrix's own blocks; None: it has no such product."""
        return None if self._matrix(name) is None else BlockKind.F4

    def has_offsets(self, name: str) -> bool:
        """Return False: no block has an offset."""
        return False

    def kind_name(self, name: str) -> str:
        """Return the name of the type of a matrix in blocks."""
        return "MXFP4"

    def product(self, name: str, bias: torch.Tensor | None) -> BlockLinear:
        """Return the product by the own blocks of a matrix that has a `blocks_kind`. Raises RuntimeError where it
        differs from the matrix."""
        expert, matrix = EXPERT.fullmatch(name), self._matrix(name)
        assert expert is not None, name
        assert matrix is not None, name
        blocks_NBk, scales_NB = matrix.read()
        N, B, _ = blocks_NBk.shape
        order = _order(expert, N)
        packed = PackedBlocks.unfilled(BlockKind.F4, (N, B * BLOCK), offsets=False, bias=bias)
        packed.put(0, N, mxfp4_blocks(blocks_NBk, scales_NB), order)
        product, rows_n = BlockLinear(packed, bias), some_rows(N)
        from_n = order[rows_n]
        check_product(name, product, rows_n, mxfp4_numbers(blocks_NBk[from_n], scales_NB[from_n], torch.float32))
        return product

    def _matrix(self, name: str) -> _Matrix | None:
        """Return where an expert's matrix in MXFP4 lies, or None. Raises ValueError for tensors of another form."""
        expert = EXPERT.fullmatch(name)
        if expert is None or expert[4] != "weight":
            return None
        whole = f"{expert[1]}.{expert[2]}_proj"
        blocks, scales, number = self._place(f"{whole}{_BLOCKS}"), self._place(f"{whole}{_SCALES}"), int(expert[3])
        if blocks is None or scales is None:
            return None
        shapes = f"{whole} has blocks of {[*blocks.shape]} and scales of {[*scales.shape]}"
        if len(blocks.shape) != 4 or blocks.shape[3] != BLOCK // 2 or scales.shape != blocks.shape[:3]:
            raise ValueError(f"{shapes}, which are not [E, N, B, {BLOCK // 2}] and [E, N, B]")
        if any(place.num_bytes != math.prod(place.shape) for place in (blocks, scales)):
            raise ValueError(f"{shapes}, which are not bytes")
        return _Matrix(blocks.part(number), scales.part(number)) if number < blocks.shape[0] else None

    def _floats(self, expert: re.Match[str]) -> Place | None:
        """Return where an expert's bias [N], or its matrix of floats [K, N], lies, or None."""
        of, dims = ("_bias", 2) if expert[4] == "bias" else ("", 3)
        whole, number = self._place(f"{expert[1]}.{expert[2]}_proj{of}"), int(expert[3])
        if whole is None:
            return None
        (whole,) = check_parts(expert[0], dims, [whole])
        return whole.part(number) if number < whole.shape[0] else None


def _order(expert: re.Match[str], count: int) -> torch.Tensor:
    """Return the file's row of each row of a product."""
    rows = torch.arange(count)
    return torch.cat([rows[0::2], rows[1::2]]) if expert[2] == "gate_up" else rows


def _steps(order: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of a row, a multiple of 32, and the file's rows of the next ones."""
    for first in range(0, len(order), _STEP):
        yield first, order[first : first + _STEP]
