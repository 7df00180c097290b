"""What the modules with a state have in common: transformers' interface, over a function of rows.

Invariant: `of_rows` does all of the work, so a loop over layers gets what transformers' forward gets. Not responsible
for: the layers (see short_convolutions.py, mixers.py, delta_nets.py), their memory (see rows.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from gpu_engine.model.attention import context_of_forward
from gpu_engine.model.recurrent.rows import RecurrentForward
from kernels.recurrent_layer import Mixer


class RecurrentMixer(nn.Module, ABC):
    """A recurrent layer's module: it takes the place of attention."""

    layer_idx: int
    state_shapes: tuple[tuple[int, ...], ...]
    pending_width: int

    @abstractmethod
    def of_rows(self, x_NH: torch.Tensor, states: RecurrentForward | None) -> torch.Tensor:
        """[N, H] -> [N, H], in the order of the lanes of `states`. Raises RuntimeError without states."""

    def native(self) -> tuple[nn.Module, Mixer, nn.Module] | None:
        """Return the parts of a native forward: the first product, what comes after it, and the last product; None:
        the module has another form."""
        return None

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Return the layer's output, [B, P, H] like its input."""
        return self.of_rows(hidden_states.flatten(0, 1), context_of_forward().recurrent).view(hidden_states.shape)
