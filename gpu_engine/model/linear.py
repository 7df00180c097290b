"""Linear layers for CPUs: oneDNN's prepacked products behind `nn.Linear`'s face.

Packing once spares the reorder that a plain product does at every call (2x per step, measured in docs/log.md). One
invariant: a row's result has the same bits for any number of rows; oneDNN keeps it from two rows on, so one row is
doubled. Not here: quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; [..., in_features] -> [..., out_features]."""
        if x.numel() == self.in_features:
            pair = torch.cat([x.reshape(1, -1)] * 2)
            y = self._product(pair, self.packed, self.bias, "none", [], "")
            single: torch.Tensor = y[:1].reshape(*x.shape[:-1], self.out_features)
            return single
        out: torch.Tensor = self._product(x, self.packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        """Name the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


def can_pack() -> bool:
    """Whether oneDNN's prepacked products are built in."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def joined(linears: Sequence[nn.Linear]) -> nn.Module:
    """Return one product for several of the same input, outputs side by side; packed where it is on a CPU.

    Holds a copy of the weights. Raises ValueError when inputs or biases differ in kind.
    """
    first, biases = linears[0], [_bias(item) for item in linears]
    given = [bias for bias in biases if bias is not None]
    if any(item.in_features != first.in_features for item in linears) or len(given) not in (0, len(linears)):
        raise ValueError(f"products with different inputs or biases: {list(linears)}")
    if len(linears) == 1:
        whole = first
    else:
        whole = nn.Linear(first.in_features, sum(item.out_features for item in linears), device="meta")
        whole.weight = nn.Parameter(torch.cat(tuple(item.weight for item in linears)), requires_grad=False)
        bias = nn.Parameter(torch.cat(given), requires_grad=False) if given else None
        whole.register_parameter("bias", bias)
    return PackedLinear(whole) if first.weight.device.type == "cpu" and can_pack() else whole


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return linear.bias


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of a CPU model in place; return how many. A no-op where oneDNN is not built in."""
    if not can_pack():
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
