"""A model whose products round as on a GPU, and a library that rounds otherwise for each size and graph.

The products are `InvariantLinear`'s, over CPU tensors: inputs and results have 16 bits, up to 64 rows go to our kernel,
and the library multiplies more rows where `BitChecks` finds its bits equal. All else of the model is in float32, so
tokens differ by products only. The stand-in for the library flips the last bit that bfloat16 would have of some
results: other ones for each number of rows, each shape of a call (a prompt's or a step's), and each captured graph.
The interpreter's products are independent of the tile, as a GPU's matrix instructions are, within `ordered_sums`.
Not responsible for: which instructions a GPU has (see tests/kernels/cuda/test_cubins.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_engine.api.config import EngineConfig
from gpu_engine.model import attention
from gpu_engine.model.linear import BitChecks, InvariantLinear
from gpu_engine.model.loader import LoadedModel, prepare
from kernels.cuda.products import Tile
from tests.gpu_engine.device.recorded_stream import is_capturing

_LAST_BIT = 1 << 3
"""Of bfloat16, in a float16: the interpreter multiplies the bits of bfloat16 as integers."""


@dataclass(eq=False)
class Library:
    """The stand-in for cuBLAS. `above`: multiplies more rows than this without a comparison; None: compares."""

    above: int | None = None
    calls: dict[tuple[str, int], int] = field(default_factory=dict)
    """Number of calls, by "eager" or "captured" and rows."""
    kernel_rows: set[int] = field(default_factory=set)
    """Numbers of rows that our kernel multiplied."""

    def flips(self, shape: torch.Size, num_outputs: int) -> torch.Tensor:
        """Return the bits that change in the product of a call with inputs of `shape`, int16 [rows, N]."""
        rows, kind = shape[:-1].numel(), "captured" if is_capturing() else "eager"
        self.calls[kind, rows] = count = self.calls.get((kind, rows), 0) + 1
        graph = count if kind == "captured" else 0  # a capture has the bits of its own
        seed = hash((*shape, num_outputs, graph))
        with _disable_current_modes():  # a replay repeats the numbers of its capture
            chosen = torch.randint(0, 2, (rows, num_outputs), generator=torch.Generator().manual_seed(seed))
            return (chosen * _LAST_BIT).to(torch.int16)


class Checks(BitChecks):
    """Compares as on a GPU: never within a capture. Tiles have more outputs: the interpreter takes a time for each."""

    def __init__(self) -> None:
        super().__init__(most_draws=1)

    def tile_of(self, linear: InvariantLinear, *, smallest: bool = False) -> Tile:
        return Tile(16, 128, 64, 4, 2) if smallest else Tile(64, 128, 64, 4, 2)

    def library_agrees(self, linear: InvariantLinear, rows: int) -> bool:
        known = (linear.kind, rows) in self._library
        if not known and is_capturing():
            return False
        with _disable_current_modes():  # a comparison reads its verdict back, which an eager call may
            return super().library_agrees(linear, rows)


class RoundedLinear(InvariantLinear):
    """A product of a model in float32, in 16 bits."""

    def __init__(self, linear: nn.Linear, checks: Checks, library: Library) -> None:
        half = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, dtype=torch.float16)
        half.load_state_dict(linear.state_dict())
        super().__init__(half.requires_grad_(False), checks)
        self._library = library

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, rows = x.half(), x.numel() // self.in_features
        trusts = self._library.above is not None and rows > self._library.above
        return (self.by_library(half) if trusts else super().forward(half)).to(x.dtype)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        plain = nn.functional.linear(x.float(), self.weight.float(), bias).half()
        flips = self._library.flips(x.shape, self.out_features).view(plain.shape)
        return (plain.view(torch.int16) ^ flips).view(torch.float16)

    def by_kernel(self, x_MK: torch.Tensor, *, smallest_tile: bool = False) -> torch.Tensor:
        self._library.kernel_rows.add(len(x_MK))
        return super().by_kernel(x_MK, smallest_tile=smallest_tile)


def load_rounded(settings: EngineConfig, library: Library) -> LoadedModel:
    """Load the model of `settings` with such products. Within `ordered_sums`."""
    attention.register()
    folder = Path(settings.model)
    net: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention.NAME, use_safetensors=True
    )
    checks = Checks()
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RoundedLinear(child, checks, library))
    model = prepare(settings, net, AutoTokenizer.from_pretrained(folder))
    library.calls.clear()  # of the comparisons at load
    library.kernel_rows.clear()
    return model
