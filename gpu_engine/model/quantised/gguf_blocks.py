"""Reads the quantised matrices of a GGUF file as they are, for the products of a model that was loaded from it.

A matrix is found by the library's own table of names. Invariant: blocks are used only where they give the weight that
was loaded; the rows that a converter has reordered for the rotary embedding are put back. Not responsible for: loading
the model (see loader.py), the bytes of a matrix (see gguf_kinds.py), multiplying (see kernels/blocks.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFReader, get_tensor_name_map
from torch import nn

from gpu_engine.model.quantised.gguf_kinds import blocks_of
from gpu_engine.model.recording import distance
from kernels.blocks import BlockKind, Blocks, quantised

log = logging.getLogger(__name__)

_SAME = 1e-2
"""Largest relative distance of two roundings of one matrix; a matrix in another order is more than 1 away."""

_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


class GGUFBlocks:
    """The matrices of one GGUF file, by the names that a transformers model gives them."""

    def __init__(self, file: Path) -> None:
        self._reader = GGUFReader(file)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        arch = self._field("general.architecture")
        known = {name: key for key, name in MODEL_ARCH_NAMES.items()}
        layers = int(self._field(f"{arch}.block_count"))
        self._names = get_tensor_name_map(known[arch], layers)
        self._heads = [int(self._field(f"{arch}.attention.{name}")) for name in ("head_count", "head_count_kv")]
        self.used: Counter[str] = Counter()
        """Matrices that `of` returned as they are, by their type in the file."""
        self.requantised: Counter[str] = Counter()
        """Matrices whose type has no product here, or that were not found: 8 bits now."""

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return field.contents() if field is not None else 0

    @property
    def quantised(self) -> bool:
        """True: most matrices of the file are quantised."""
        kinds = [tensor.tensor_type in _FLOATS for tensor in self._tensors.values() if len(tensor.shape) == 2]
        return sum(kinds) * 2 < len(kinds)

    def of(self, name: str, linear: nn.Linear) -> Blocks:
        """Return the blocks of a product: the file's own, where it has them in a type that is multiplied here."""
        tensor = self._tensors.get(f"{self._names.get_name(name)}.weight")
        if tensor is None and name == "lm_head":
            tensor = self._tensors.get("token_embd.weight")  # tied to the embedding
        blocks = None if tensor is None else blocks_of(np.asarray(tensor.data), tensor.tensor_type)
        if blocks is not None:
            blocks = self._in_order(blocks, linear.weight)
        if tensor is None or blocks is None:
            self.requantised["missing" if tensor is None else tensor.tensor_type.name] += 1
            return quantised(linear.weight, BlockKind.Q8)
        self.used[tensor.tensor_type.name] += 1
        return blocks

    def _in_order(self, blocks: Blocks, weight_NK: torch.Tensor) -> Blocks | None:
        """Return the blocks with the rows of the loaded weight, or None when no known order gives it."""
        want_NK = weight_NK.float()
        for heads in (0, *self._heads):
            if blocks.shape != tuple(want_NK.shape) or (heads and len(want_NK) % (2 * heads)):
                continue
            tried = _rows_put_back(blocks, heads) if heads else blocks
            if distance(tried.dequantised(), want_NK) < _SAME:
                return tried
        return None

    def __str__(self) -> str:
        """Return the kinds of the products, for the log: those of the file, and those that were rounded again."""
        kinds = [f"{count} of {kind}" for kind, count in sorted(self.used.items())]
        again = sum(self.requantised.values())
        return ", ".join([*kinds, *([f"{again} rounded again"] if again else [])])

    def __repr__(self) -> str:
        return (
            f"<GGUFBlocks {len(self._tensors)} tensors, used {dict(self.used)}, requantised {dict(self.requantised)}>"
        )


def _rows_put_back(blocks: Blocks, heads: int) -> Blocks:
    """Undo llama.cpp's order of a head's rows, which interleaves the halves that rotate together."""
    N = blocks.shape[0]
    order = torch.arange(N).view(heads, N // heads // 2, 2).transpose(1, 2).reshape(N)
    return blocks.rows(order)
