"""Finds the modules of a decoder that fused ones can stand in for, by their parts, and proves each by its numbers.

One invariant: a module is replaced only when the replacement, given what the module was given in a recorded forward,
gives what the module gave; everything else stays as it is. Not here: the order of the layers (walk.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from gpu_engine.model.attention import LayerAttention
from gpu_engine.model.fused_layers import FusedAttention, FusedGated, FusedNorm
from gpu_engine.model.linear import joined
from gpu_engine.model.recording import Call, Recording, distance
from kernels.fused import Activation, NormKind, RMSNorm

_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest relative distances that count as equal: rounding, and nothing that a wrong formula would hide in."""

    norm: float
    block: float
    """A gated block or an attention: its products round in another order."""
    logits: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Bounds:
        """Return those of a model's dtype."""
        return cls(1e-5, 1e-4, 1e-3) if dtype == torch.float32 else cls(1e-3, 1e-2, 4e-2)


class NotRecognised(Exception):
    """A module is not what it looked like; the message says why."""


def norm_of(module: nn.Module, record: Recording, bound: float) -> FusedNorm:
    """Return the fused form of an RMSNorm; raise NotRecognised."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or not isinstance(eps, float):
        raise NotRecognised("is no RMSNorm")
    call = _only(record, module)
    weight_H = parameters["weight"].detach()
    return _closest((FusedNorm(RMSNorm(weight_H, eps, kind)) for kind in NormKind), call, bound)


def gated_of(module: nn.Module, record: Recording, bound: float) -> FusedGated:
    """Return the fused form of a gated block: gate, up and down products around an activation. Raise NotRecognised."""
    linears = _linears(module)
    call = _only(record, module)
    if set(linears) == {"gate_proj", "up_proj", "down_proj"}:
        parts = [linears["gate_proj"], linears["up_proj"]]
    elif set(linears) == {"gate_up_proj", "down_proj"}:
        parts = [linears["gate_up_proj"]]
    else:
        raise NotRecognised(f"has the products {sorted(linears)}")
    gate_up, down = _joined(parts), _joined([linears["down_proj"]])
    return _closest((FusedGated(gate_up, down, act) for act in Activation), call, bound)


def attention_of(
    module: nn.Module, record: Recording, shape: LayerAttention, layer_idx: int, bounds: Bounds
) -> FusedAttention:
    """Return the fused form of an attention: q, k, v and output products, head norms, rotary. Raise NotRecognised."""
    norms = {name: getattr(module, name, None) for name in ("q_norm", "k_norm")}
    linears = _linears(module, but=[norm for norm in norms.values() if isinstance(norm, nn.Module)])
    call = _only(record, module)
    if set(linears) == {"q_proj", "k_proj", "v_proj", "o_proj"}:
        parts = [linears[name] for name in ("q_proj", "k_proj", "v_proj")]
    elif set(linears) == {"qkv_proj", "o_proj"}:
        parts = [linears["qkv_proj"]]
    else:
        raise NotRecognised(f"has the products {sorted(linears)}")
    found = {
        name: norm_of(norm, record, bounds.norm).norm for name, norm in norms.items() if isinstance(norm, nn.Module)
    }
    fused = FusedAttention(_joined(parts), _joined([linears["o_proj"]]), shape, layer_idx, **found)
    return _closest([fused], call, bounds.block)


def _only(record: Recording, module: nn.Module) -> Call:
    try:
        return record.only(module)
    except ValueError as error:
        raise NotRecognised(str(error)) from error


def _linears(module: nn.Module, but: Iterable[nn.Module] = ()) -> dict[str, nn.Linear]:
    """Return the products among a module's children; raise NotRecognised where another part has weights."""
    left = set(but)
    children = {name: child for name, child in module.named_children() if child not in left}
    linears = {name: child for name, child in children.items() if type(child) is nn.Linear}
    rest = [
        name for name, child in children.items() if name not in linears and next(child.parameters(), None) is not None
    ]
    rest += [name for name, _ in module.named_parameters(recurse=False)]
    if rest:
        raise NotRecognised(f"has weights of its own: {rest}")
    return linears


def _joined(linears: list[nn.Linear]) -> nn.Module:
    try:
        return joined(linears)
    except ValueError as error:
        raise NotRecognised(str(error)) from error


def _closest(candidates: Iterable[_M], call: Call, bound: float) -> _M:
    """Return the candidate that repeats the recorded call best; raise NotRecognised when none is within the bound."""
    best, least = None, float("inf")
    for candidate in candidates:
        try:
            got = candidate(*call.args, **call.kwargs)
            far = distance(got[0] if isinstance(got, tuple) else got, call.tensor())
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise NotRecognised(f"does not take the fused form: {error}") from error
        if far < least:
            best, least = candidate, far
    if best is None or least > bound:
        raise NotRecognised(f"its fused form is {least:.1e} away from it")
    return best
