"""The expansion of latent attention, which a GGUF file has in two tensors: of keys, transposed, and of values.

llama.cpp multiplies queries by the one and outputs by the other. The model has one matrix, with the rows of a head's
keys and then of its values. Not responsible for: reading the tensors (see gguf_weights.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # the library of GGUF files is loaded for one
    from gpu_engine.model.files.gguf_header import GGUFTensor


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Sizes of such a matrix."""

    heads: int
    keys: int
    """Channels of a head's keys that do not rotate."""
    values: int
    """Channels of a head's values."""
    latent: int

    @classmethod
    def of(cls, tensors: Sequence[GGUFTensor]) -> LatentHeads | None:
        """Return the matrix that tensors of one parameter make; None: they make another. Raises ValueError for shapes
        that do not fit."""
        if len(tensors) != 2 or len(tensors[0].shape) != 3:
            return None
        heads, latent, keys = tensors[0].shape
        if tensors[1].shape[::2] != (heads, latent):
            raise ValueError(f"{tensors[0]} and {tensors[1]} are not of the same heads")
        return cls(heads, keys, tensors[1].shape[1], latent)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.heads * (self.keys + self.values), self.latent

    def rows(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the matrix by the rows of both tensors."""
        keys_HKL = keys.view(self.heads, self.latent, self.keys).transpose(1, 2)
        values_HVL = values.view(self.heads, self.values, self.latent)
        return torch.cat([keys_HKL, values_HVL], dim=1).flatten(0, 1)
