"""The memory in which recurrent layers keep their states, and what a forward hands to them.

`RecurrentRows` says what is committed, pending and taken again (kernels/recurrent_rows.py). Invariant: every row goes
through the same operations in the same order, so it has the same bits in a decode step, a verification of any number of
drafts, a mixed batch and a chunk of a prompt. Not responsible for: which sequence has which place, and how many rows
were accepted (see core/).

Shapes: S places, R pending rows at most, W floats of a row that is saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from kernels import recurrent
from kernels.kv_pages import untouched_zeros
from kernels.recurrent import RecurrentKernels
from kernels.recurrent_rows import NO_PLACE, RecurrentRows

__all__ = [
    "CPU",
    "NO_PLACE",
    "LayerStates",
    "RecurrentForward",
    "RecurrentLayer",
    "RecurrentPools",
    "RecurrentRows",
    "layer_of",
    "pending_bytes",
    "recurrent_layers",
    "state_bytes",
]

CPU = torch.device("cpu")


class RecurrentLayer(Protocol):
    """A module with a state."""

    layer_idx: int
    """Its layer, which has at most one module of this kind."""
    state_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the parts of a state, such as the last inputs of a convolution and the matrix of each head."""
    pending_width: int
    """Floats that are saved of a row which may be taken again."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The memory of one layer, float32 and contiguous. On a CPU it is not resident until a sequence has the place."""

    states: tuple[torch.Tensor, ...]
    """[S, *shape] for each shape of the layer."""
    pending_SRW: torch.Tensor

    @classmethod
    def allocate(
        cls, layer: RecurrentLayer, num_places: int, max_pending: int, device: torch.device = CPU
    ) -> LayerStates:
        """Return memory of zeros for `num_places` sequences."""
        shapes = *layer.state_shapes, (max_pending, layer.pending_width)
        *states, pending = (untouched_zeros((num_places, *shape), torch.float32, device) for shape in shapes)
        return cls(tuple(states), pending)


class RecurrentPools:
    """The memory of all recurrent layers of a model, by layer.

    Args:
        layers: by their numbers in the model.
        num_places: S.
        max_pending: R, the most rows that a verification has: all of them may be pending.
        device: the model's.
    """

    def __init__(
        self, layers: Mapping[int, RecurrentLayer], num_places: int, max_pending: int, device: torch.device = CPU
    ) -> None:
        self.num_places, self.max_pending = num_places, max_pending
        sizes = num_places, max_pending, device
        self.layers = {number: LayerStates.allocate(layer, *sizes) for number, layer in layers.items()}

    def of(self, place: int, *, pending: bool = False) -> list[torch.Tensor]:
        """Return the parts of the state at a place, of every layer; with its pending rows if `pending`."""
        return [
            part[place]
            for layer in self.layers.values()
            for part in (*layer.states, *([layer.pending_SRW] if pending else []))
        ]

    def __repr__(self) -> str:
        return f"<RecurrentPools of {len(self.layers)} layers, {self.num_places} places, {self.max_pending} pending>"


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentForward:
    """What a forward of a model with recurrent layers needs next to its attention context."""

    pools: RecurrentPools
    rows: RecurrentRows
    kernels: RecurrentKernels = recurrent
    """The kernels of the device that has the states."""


def layer_of(forward: RecurrentForward | None, layer_idx: int) -> tuple[RecurrentKernels, LayerStates, RecurrentRows]:
    """Return the kernels, the memory of a layer and the rows of its forward. Raises RuntimeError where the forward has
    no states."""
    if forward is None:
        raise RuntimeError(f"layer {layer_idx} has a state, and the forward brings none")
    return forward.kernels, forward.pools.layers[layer_idx], forward.rows


def recurrent_layers(net: nn.Module) -> dict[int, RecurrentLayer]:
    """Return the modules with a state by the numbers of their layers; empty for a model of attention only."""
    found: dict[int, RecurrentLayer] = {}
    for module in net.modules():
        if hasattr(module, "state_shapes"):
            layer: Any = module
            assert layer.layer_idx not in found, layer
            found[layer.layer_idx] = layer
    return found


def state_bytes(layers: Mapping[int, RecurrentLayer]) -> int:
    """Return the bytes of one sequence's committed state, without its pending rows."""
    return 4 * sum(math.prod(shape) for layer in layers.values() for shape in layer.state_shapes)


def pending_bytes(layers: Mapping[int, RecurrentLayer]) -> int:
    """Return the bytes of one pending row."""
    return 4 * sum(layer.pending_width for layer in layers.values())
