"""Fuses a loaded model in place: what is recognised is replaced part by part, and walked in one loop where that holds.

One invariant: nothing fused runs that was not compared, at load, with the model as it came; a part that differs is left
alone and named in the log. Not here: kernels, and the parts themselves.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gpu_engine.model.attention import LayerAttention
from gpu_engine.model.recognise import Bounds, NotRecognised, attention_of, gated_of, norm_of
from gpu_engine.model.recording import Recording, distance
from gpu_engine.model.walk import NoWalk, Walk, walk_of

log = logging.getLogger(__name__)


_MOST = 8e-2
"""Largest distance of logits that rounding in a 16-bit type may explain."""


class FusedModelDiffers(RuntimeError):
    """The parts agree with the model's own and the whole does not: the model must be loaded again, unfused."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What was replaced."""

    norms: int = 0
    blocks: int = 0
    attentions: int = 0
    walk: Walk | None = None
    """None where the model's own forward runs, over the parts."""
    left: tuple[str, ...] = ()
    """Why something stayed as it was, a line for each reason."""

    def __repr__(self) -> str:
        parts = f"{self.attentions} attentions, {self.blocks} blocks, {self.norms} norms"
        return f"<Fused {parts}, {'walk' if self.walk else 'no walk'}, {len(self.left)} reasons>"


def fuse_parts(net: Any, record: Recording, asked: Mapping[int, LayerAttention], dtype: torch.dtype) -> Fused:
    """Replace what is recognised in `net`; `record` is of a forward over our attention, which asked for `asked`.

    What is replaced leaves the record too, so that its weights are released: memory holds one layer twice at most.
    """
    bounds, counts, left = Bounds.of(dtype), dict.fromkeys(("norms", "blocks", "attentions"), 0), dict[str, None]()

    def attempt(kind: str, parent: nn.Module, name: str, child: nn.Module, make: Callable[[], nn.Module]) -> None:
        try:
            fused = make()
        except NotRecognised as why:
            left[f"{kind}: {type(child).__name__} {why}"] = None
            return
        setattr(parent, name, fused)
        counts[kind] += 1
        for module in child.modules():
            record.calls.pop(module, None)

    for parent, name, child in _children(net):
        parts = {part for part, _ in child.named_children()}
        layer_idx = getattr(child, "layer_idx", None)
        if "o_proj" in parts and isinstance(layer_idx, int) and layer_idx in asked:
            make = functools.partial(attention_of, child, record, asked[layer_idx], layer_idx, bounds)
            attempt("attentions", parent, name, child, make)
        elif "down_proj" in parts:
            attempt("blocks", parent, name, child, functools.partial(gated_of, child, record, bounds.block))
    for parent, name, child in _children(net):
        if hasattr(child, "weight") and (hasattr(child, "eps") or hasattr(child, "variance_epsilon")):
            attempt("norms", parent, name, child, functools.partial(norm_of, child, record, bounds.norm))
    return Fused(counts["norms"], counts["blocks"], counts["attentions"], left=tuple(left))


def settle(
    net: Any,
    fused: Fused,
    record: Recording,
    want_NV: torch.Tensor,
    run: Callable[[Walk | None], torch.Tensor],
    dtype: torch.dtype,
    noise: float = 0.0,
) -> Fused:
    """Return `fused` with the walk where it gives the logits of the model as it came; raise FusedModelDiffers.

    `run` computes logits [N, V] of the recorded tokens by a walk, or by the model's own forward. `noise` is the
    relative distance of two forwards of the model that are both right: deep ones in bfloat16 have more than the bound.
    """
    bound = Bounds.of(dtype).logits
    if dtype != torch.float32:
        bound = max(bound, min(2 * noise, _MOST))
    own = distance(run(None), want_NV)
    if own > bound:
        raise FusedModelDiffers(f"fused parts give logits that are {own:.1e} away")
    try:
        walk = walk_of(net, record)
        far = distance(run(walk), want_NV)
        if far > bound:
            raise NoWalk(f"its logits are {far:.1e} away")
    except (NoWalk, AssertionError, RuntimeError, TypeError, ValueError) as why:
        result = replace(fused, left=(*fused.left, f"walk: {why}"))
    else:
        result = replace(fused, walk=walk)
    for reason in result.left:
        log.info("not fused: %s", reason)
    return result


def _children(net: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Every module with its parent and its name there, as they are now."""
    return [(parent, name, child) for parent in net.modules() for name, child in parent.named_children()]
