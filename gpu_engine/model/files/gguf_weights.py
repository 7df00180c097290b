"""The weights of a GGUF file by the names that transformers gives them, in the order and the form that it gives them.

Invariant: a weight has the bits that transformers' loader gives it. Not responsible for: the header (see
gguf_header.py), what a converter has done (see architectures.py), which weights become quantised products (see
quantised/choice.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize

from gpu_engine.model.files.architectures import ARCHITECTURES
from gpu_engine.model.files.gguf_header import GGUFHeader, GGUFTensor
from gpu_engine.model.files.pieces import FileBytes
from gpu_engine.model.quantised.gguf_kinds import BLOCKS, blocks_of
from gpu_engine.model.quantised.linear import BlockLinear, check_product
from kernels.blocks import BLOCK, BlockKind, Field, PackedBlocks, RawBlocks

_CHECKED = 128
"""Rows of a product that are compared with the library's numbers."""
_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the numbers of a block lie in a file, in bytes from its begin; its scale comes first."""

    kind: BlockKind
    quants: int
    offset: int | None
    """None: the kind has none."""


_LAYOUTS = {
    GGMLQuantizationType.Q4_0: _Layout(BlockKind.Q4, 2, None),
    GGMLQuantizationType.Q4_1: _Layout(BlockKind.Q4, 4, 2),
    GGMLQuantizationType.Q8_0: _Layout(BlockKind.Q8, 2, None),
}
"""The kinds whose blocks are those of a product as they lie in the file. The others are rewritten slab by slab."""


class GGUFWeights:
    """The weights of one file, or of its parts.

    Args:
        header: of a file whose architecture is one of `ARCHITECTURES`.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.header, self._family = header, ARCHITECTURES[header.architecture]
        known = {name: key for key, name in MODEL_ARCH_NAMES.items()}
        self._names = get_tensor_name_map(known[header.architecture], int(header.get("{arch}.block_count", 0)))
        self._bytes = {path: FileBytes(path) for path in dict.fromkeys(t.file for t in header.tensors.values())}
        heads = header.get("{arch}.attention.head_count", 0)
        self._heads = {"attn_q": heads, "attn_k": header.get("{arch}.attention.head_count_kv", heads)}

    def __enter__(self) -> GGUFWeights:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._bytes.values():
            file.close()

    @property
    def quantised(self) -> bool:
        """True: most matrices of the file are quantised."""
        kinds = [tensor.kind in _FLOATS for tensor in self.header.tensors.values() if len(tensor.shape) == 2]
        return sum(kinds) * 2 < len(kinds)

    @property
    def path(self) -> Path:
        """The file."""
        return self.header.path

    def find(self, name: str) -> GGUFTensor | None:
        """Return the tensor of a parameter; None: the file has none."""
        stem, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, dot, suffix = name, "", ""
        return self.header.tensors.get(f"{self._names.get_name(stem)}{dot}{suffix}")

    def unread(self, names: Iterable[str]) -> list[str]:
        """Return the tensors of the file that none of the parameters `names` is."""
        read = {tensor.name for name in names if (tensor := self.find(name)) is not None}
        return sorted(self.header.tensors.keys() - read)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a parameter; None: the file has none of that name."""
        tensor = self.find(name)
        return None if tensor is None else tensor.shape

    def blocks_kind(self, name: str) -> BlockKind | None:
        """Return the kind of the product over a matrix's own blocks; None: it has no such product."""
        form = BLOCKS.get(self._of(name).kind)
        return None if form is None else form.kind

    def kind_name(self, name: str) -> str:
        """Return the name of a parameter's type in the file."""
        return str(self._of(name).kind.name)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter."""
        tensor = self._of(name)
        made = torch.empty(tensor.shape, dtype=dtype)
        rows = made.view(-1, tensor.shape[-1])
        for first, part in self.rows(name, dtype):
            rows[first : first + len(part)] = part
        return made

    def rows(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of a row of a parameter, a multiple of 32, and the next rows from it on, [n, K]."""
        tensor = self._of(name)
        order, num_rows = self._order(tensor), math.prod(tensor.shape[:-1])
        if order is not None:
            yield 0, self._values(tensor, self._whole(tensor)).to(dtype).view(num_rows, -1)[order]
            return
        for first, raw in self._slabs(tensor):
            yield first, self._values(tensor, raw).to(dtype)

    def _values(self, tensor: GGUFTensor, raw: npt.NDArray[np.uint8]) -> torch.Tensor:
        values = torch.from_numpy(dequantize(raw, tensor.kind))
        shifted = self._family.norm_offset and "norm.weight" in tensor.name
        return values - self._family.norm_offset if shifted else values

    def product(self, name: str, bias: torch.Tensor | None) -> BlockLinear:
        """Return the product by the own blocks of a matrix that has a `blocks_kind`. Raises RuntimeError where it
        differs from the matrix."""
        tensor = self._of(name)
        form = BLOCKS[tensor.kind]
        N, K = tensor.shape
        packed = PackedBlocks.unfilled(form.kind, (N, K), offsets=form.has_offsets, bias=bias)
        order = self._order(tensor)
        for first, raw in self._slabs(tensor) if order is None else [(0, self._whole(tensor))]:
            packed.put(first, len(raw), _raw_blocks(raw, tensor.kind), order)
        product = BlockLinear(packed, bias)
        rows_n = torch.linspace(0, N - 1, min(_CHECKED, N)).long()
        from_n = rows_n if order is None else order[rows_n]
        raw = np.concatenate(
            [
                self._bytes[tensor.file].read(tensor.start + at * tensor.row_bytes, tensor.row_bytes)[None]
                for at in from_n.tolist()
            ]
        )
        check_product(name, product, rows_n, torch.from_numpy(dequantize(raw, tensor.kind)))
        return product

    def _of(self, name: str) -> GGUFTensor:
        tensor = self.find(name)
        assert tensor is not None, name
        return tensor

    def _whole(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        return self._bytes[tensor.file].read(tensor.start, tensor.num_bytes).reshape(-1, tensor.row_bytes)

    def _slabs(self, tensor: GGUFTensor) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        return self._bytes[tensor.file].slabs(tensor.start, math.prod(tensor.shape[:-1]), tensor.num_bytes)

    def _order(self, tensor: GGUFTensor) -> torch.Tensor | None:
        """Return the file's row of each row of the model's weight; None: the same."""
        if not self._family.interleaved:
            return None
        heads = next((count for part, count in self._heads.items() if f".{part}." in tensor.name), 0)
        if not heads:
            return None
        N = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        return torch.arange(N).view(heads, N // heads // 2, 2).transpose(1, 2).reshape(N)

    def __repr__(self) -> str:
        return f"<GGUFWeights {self.header!r}>"


def _raw_blocks(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> RawBlocks:
    """Return the blocks of some rows, where they lie if a product takes them as they are."""
    layout = _LAYOUTS.get(kind)
    if layout is None:
        blocks = blocks_of(raw, kind)
        assert blocks is not None, kind
        return RawBlocks.of(blocks)
    memory, row_bytes = torch.from_numpy(raw), raw.shape[1]
    size = layout.quants + (BLOCK if layout.kind is BlockKind.Q8 else BLOCK // 2)
    scales = Field(memory, 0, row_bytes, size)
    offsets = None if layout.offset is None else Field(memory, layout.offset, row_bytes, size)
    if kind is GGMLQuantizationType.Q4_0:  # its integers stand for -8 to 7
        offsets = Field.of(-8 * memory.view(torch.float16).view(len(raw), -1, size // 2)[..., 0])
    return RawBlocks(Field(memory, layout.quants, row_bytes, size), scales, offsets)
