"""Rotary embeddings as tables: cosines and sines of every position, computed once at load by the model's own module.

A step then looks positions up. That spares the arithmetic of each step, and it makes rotary types capturable whose
module reads the longest position back from the device (`dynamic`, and `longrope` before transformers 5.23). A module
that reads a tensor back and cannot become a table runs on a CPU; a captured forward rejects it at load.
Invariant: a table has the bits that the module gives for the same positions.
Not responsible for: rotating queries and keys (see kernels/fused.py), the longest position (see loader.py).

Shapes: B sequences, P positions of each, L rows of a table, R rotated channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_engine.model.names import ModelNotSupported

log = logging.getLogger(__name__)

SPARE_ROWS = 64
"""Positions after the last: rejected drafts and padding reach them, and no token depends on them."""

_READS = (
    torch.ops.aten._local_scalar_dense.default,  # item(), bool(), int()
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
)
"""Operators whose result the host reads; a graph capture forbids them."""

_UPDATED_TYPES = {"dynamic", "longrope"}
"""Rotary types of transformers whose forward may compare the longest position on the host."""

_Table = tuple[torch.Tensor, torch.Tensor]


class RotaryTable(nn.Module):
    """Replaces a decoder's rotary embedding: (x, positions [B, P], ...) -> cosines and sines [B, P, R].

    A decoder that also takes images passes positions in time, height and width, [3, B, P]; those of text are equal.

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
        if position_ids.dim() == 3:
            position_ids = position_ids[0]
        cos_LR, sin_LR = self.table(x, rest, options)
        return nn.functional.embedding(position_ids, cos_LR), nn.functional.embedding(position_ids, sin_LR)

    def table(self, x: torch.Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> _Table:
        """Return cosines and sines of every position, [L, R] each, for these further arguments. They belong to the
        module."""
        key = (x.dtype, rest, *sorted(options.items()))
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._made(x, rest, options)
        return table

    @torch.no_grad()
    def _made(self, x: torch.Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> _Table:
        places_1L = torch.arange(self.num_positions, device=x.device)[None]
        cos_1LR, sin_1LR = self.inner(x[:1, :1], places_1L, *rest, **options)
        cos_LR, sin_LR = (
            torch.cat([part[0], part[0, -1:].expand(SPARE_ROWS, -1)]).clone() for part in (cos_1LR, sin_1LR)
        )
        return cos_LR, sin_LR


def install_tables(decoder: nn.Module, num_positions: int, *, captured: bool = False) -> int:
    """Replace the rotary embeddings among the decoder's children; return how many were replaced.

    A module whose result is not a pair [1, P, R] for positions [1, P] is not replaced, and the log names it. Raises
    ModelNotSupported when such a module also reads a tensor back and the forward is `captured`, as on a CUDA device.
    """
    count = 0
    for name, child in list(decoder.named_children()):
        if not type(child).__name__.endswith("RotaryEmbedding"):
            continue
        if _gives_a_pair(child):
            setattr(decoder, name, RotaryTable(child, num_positions))
            count += 1
        elif captured and _reads_back(child):
            raise ModelNotSupported(
                f"model: rotary embedding {type(child).__name__} reads a tensor back from the device, which a captured "
                "forward cannot do, and its result is no pair of tables; it can be served on a CPU"
            )
        else:
            log.info("rotary embedding %s stays as it is: its result is no pair of tables", type(child).__name__)
    return count


@torch.no_grad()
def _gives_a_pair(module: nn.Module) -> bool:
    try:
        results = _trial_results(module)
    except (KeyError, TypeError, ValueError, RuntimeError):
        return False
    return bool(results) and all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and all(part.dim() == 3 and part.shape[:2] == (1, 2) and part.is_floating_point() for part in pair)
        for pair in results
    )


def _trial_results(module: nn.Module) -> list[Any]:
    """Call the module at two positions, once for each of its layer types.

    Empty: it has no buffer, so no frequencies.
    """
    buffer = next(module.buffers(), None)
    if buffer is None:
        return []
    x, places = buffer.new_zeros(1, 1, 1), torch.zeros(1, 2, dtype=torch.long, device=buffer.device)
    types = getattr(module, "layer_types", None) or [None]
    return [module(x, places) if kind is None else module(x, places, kind) for kind in sorted(set(types), key=str)]


class _ReadBacks(TorchDispatchMode):
    """Counts the operators inside the `with` block whose result the host reads."""

    count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in _READS
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _reads_back(module: nn.Module) -> bool:
    """Return whether a trial call reads a tensor on the host; where the call fails, the rotary type decides."""
    reads = _ReadBacks()  # type: ignore[no-untyped-call]
    try:
        with reads:
            called = bool(_trial_results(module))
    except (KeyError, TypeError, ValueError, RuntimeError):
        called = False
    if called or reads.count:
        return reads.count > 0
    kinds = getattr(module, "rope_type", None)
    return bool(_UPDATED_TYPES & set(kinds.values() if isinstance(kinds, dict) else [kinds]))
