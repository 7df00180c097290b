"""Rotary embeddings as tables: cosines and sines of every position, computed once at load by the model's own module.

A step then looks positions up. That spares the arithmetic of each step, and it makes rotary types capturable whose
module reads the longest position back from the device (`dynamic`, and `longrope` before transformers 5.23).
Invariant: a table has the bits that the module gives for the same positions.
Not responsible for: turning queries and keys (kernels/fused.py), or the longest position (loader.py).

Shapes: B sequences, P positions of each, L rows of a table, R channels that turn.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

_SPARE_ROWS = 64
"""Positions behind the last: rejected drafts and padding reach them, and no token depends on them."""

_Table = tuple[torch.Tensor, torch.Tensor]


class RotaryTable(nn.Module):
    """Takes the place of a decoder's rotary embedding: (x, positions [B, P], ...) -> cosines and sines [B, P, R].

    Args:
        inner: the model's module. It is called once for each set of further arguments, at the first such call.
        num_positions: positions that a sequence may have.
    """

    def __init__(self, inner: nn.Module, num_positions: int) -> None:
        super().__init__()
        self.inner, self.num_positions = inner, num_positions
        self._tables: dict[Hashable, _Table] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **options: Any) -> _Table:
        """Look the positions up; `x` gives device and dtype."""
        key = (x.dtype, rest, *sorted(options.items()))
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._made(x, rest, options)
        cos_LR, sin_LR = table
        return nn.functional.embedding(position_ids, cos_LR), nn.functional.embedding(position_ids, sin_LR)

    @torch.no_grad()
    def _made(self, x: torch.Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> _Table:
        places_1L = torch.arange(self.num_positions, device=x.device)[None]
        cos_1LR, sin_1LR = self.inner(x[:1, :1], places_1L, *rest, **options)
        cos_LR, sin_LR = (
            torch.cat([part[0], part[0, -1:].expand(_SPARE_ROWS, -1)]).clone() for part in (cos_1LR, sin_1LR)
        )
        return cos_LR, sin_LR


def install_tables(decoder: nn.Module, num_positions: int) -> int:
    """Replace the rotary embeddings among the decoder's children; return how many were replaced.

    A module whose result is not a pair [1, P, R] for positions [1, P] stays, and the log names it.
    """
    count = 0
    for name, child in list(decoder.named_children()):
        if not type(child).__name__.endswith("RotaryEmbedding"):
            continue
        if _gives_a_pair(child):
            setattr(decoder, name, RotaryTable(child, num_positions))
            count += 1
        else:
            log.info("rotary embedding %s stays as it is: its result is no pair of tables", type(child).__name__)
    return count


@torch.no_grad()
def _gives_a_pair(module: nn.Module) -> bool:
    buffer = next(module.buffers(), None)
    if buffer is None:
        return False
    x, places = buffer.new_zeros(1, 1, 1), torch.zeros(1, 2, dtype=torch.long, device=buffer.device)
    types = getattr(module, "layer_types", None) or [None]
    try:
        results = [
            module(x, places) if kind is None else module(x, places, kind) for kind in sorted(set(types), key=str)
        ]
    except (KeyError, TypeError, ValueError, RuntimeError):
        return False
    return all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and all(part.dim() == 3 and part.shape[:2] == (1, 2) and part.is_floating_point() for part in pair)
        for pair in results
    )
