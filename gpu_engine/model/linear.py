"""Linear layers for CPUs: oneDNN's prepacked products behind `nn.Linear`'s face.

Packing once spares the reorder that a plain product does at every call (2x per step, measured in docs/log.md). One
invariant: a row's result has the same bits for any number of rows; oneDNN keeps it from two rows on, so one row is
doubled. Not here: quantisation.
"""

from __future__ import annotations

import torch
from torch import nn

_ROWS_HINT = 8
"""Rows that the packed layout is tuned for: a verify step of one sequence."""


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight in oneDNN's own layout. Holds no reference to the original weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().contiguous()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; [..., in_features] -> [..., out_features]."""
        if x.numel() == self.in_features:
            pair = torch.cat([x.reshape(1, -1)] * 2)
            y = torch.ops.mkldnn._linear_pointwise(pair, self.packed, self.bias, "none", [], "")
            single: torch.Tensor = y[:1].reshape(*x.shape[:-1], self.out_features)
            return single
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        """Name the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of a CPU model in place; return how many. A no-op where oneDNN is not built in."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)
