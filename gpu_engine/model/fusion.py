"""Replaces parts of a loaded model by fused ones, in place, and checks whether its forward is one loop over them.

Invariant: no fused part runs before it was compared, at load, with the module that it replaces: it must give the same
output for the recorded input. A part that differs is not replaced, and the log names it.
Not responsible for: kernels (see kernels/fused.py), the parts (see fused_layers.py), the loop (see fused_forward.py).
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from gpu_engine.model.attention import LayerAttention, Temperature
from gpu_engine.model.experts import Experts, WideGate
from gpu_engine.model.fused_forward import NotALoop, WholeForward, fused_forward_of
from gpu_engine.model.fused_layers import (
    ChosenExperts,
    FusedAttention,
    FusedGated,
    FusedNorm,
    Rotation,
    RowAttention,
)
from gpu_engine.model.linear import Product, has_weights, is_product, joined
from gpu_engine.model.recording import Call, Distance, Recording, distance, typical_distance
from gpu_engine.model.recurrent.delta_nets import DeltaNet, JoinedDeltaNet
from gpu_engine.model.rotary import SPARE_ROWS
from kernels.fused_arguments import EVERYWHERE, Activation, KeyValues, NormKind, RMSNorm
from kernels.mixture import Choice

log = logging.getLogger(__name__)

_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest relative distances that count as equal:
    more than rounding, and less than the effect of a wrong formula."""

    norm: float
    block: float
    """A gated block or an attention: its products round in another order."""
    logits: float
    most: float
    """The bound on logits if the model's own forwards differ by as much: deep ones in a 16-bit type do."""

    @classmethod
    def of(cls, dtype: torch.dtype, *, rough: bool = False) -> Bounds:
        """Return the bounds of a model's dtype. `rough`: inputs of products are rounded to 8 bits by row, so that a
        rounding before them may become a hundred times as large."""
        if rough:
            return cls(1e-3, 5e-2, 0.1, 0.25)
        return cls(1e-5, 1e-4, 1e-3, 1e-3) if dtype == torch.float32 else cls(1e-3, 1e-2, 4e-2, 8e-2)


class NotRecognised(Exception):
    """A module has no fused form; the message says why."""


def norm_of(module: nn.Module, record: Recording, bound: float) -> FusedNorm:
    """Return the fused form of a norm that has no bias; its weights are ones if it has none. Raise NotRecognised."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = parameters.pop("weight", None)
    if parameters or (weight is not None and weight.dim() != 1) or not isinstance(eps, float):
        raise NotRecognised("is no norm with a weight and no bias")
    call = _only(record, module)
    x = call.tensor()
    weight_H = x.new_ones(x.shape[-1]) if weight is None else weight.detach()
    return _closest((FusedNorm(RMSNorm(weight_H, eps, kind)) for kind in NormKind), call, bound)


_GATED_BLOCKS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "output_linear"),
)
"""The names of a gated block's products: gate, up and down, or both and down, or up and down without a gate."""


def gated_of(module: nn.Module, record: Recording, bound: float) -> FusedGated:
    """Return the fused form of a block of products around an activation, with or without a gate. Raise
    NotRecognised."""
    linears = _linears(module)
    call = _only(record, module)
    *parts, last = next((names for names in _GATED_BLOCKS if set(names) == set(linears)), ("",))
    if not parts:
        raise NotRecognised(f"has the products {sorted(linears)}")
    gate_up, down = _joined([linears[name] for name in parts]), _joined([linears[last]])
    # Two activations differ by far more than the bound, so the second is tried only where the first is not the one.
    acts = (Activation.RELU_SQUARED,) if parts == ["up_proj"] else EVERYWHERE
    fused = _closest((FusedGated(gate_up, down, act) for act in acts), call, bound, enough=bound)
    fused.sources = {"gate_up": _sources(linears, parts), "down": _sources(linears, [last])}
    return fused


_ROUTERS = ({"weight"}, {"weight", "bias"})
"""The parameters of routers."""


def chosen_experts_of(module: nn.Module, record: Recording, bound: float) -> ChosenExperts:
    """Return a mixture of experts as the known form; raise NotRecognised."""
    experts = [child for child in module.children() if type(child) is Experts]
    router = getattr(module, "router", None)
    if len(experts) == 1 and isinstance(router, nn.Module) and not _is_router(router):
        return _experts_of_layer(module, experts[0], record, bound)
    routers = [child for child in module.children() if _is_router(child)]
    if len(experts) != 1 or len(routers) != 1:
        raise NotRecognised(f"has the parts {sorted(type(child).__name__ for child in module.children())}")
    call, routed, given = _only(record, module), _only(record, routers[0]), _only(record, experts[0])
    router_EH, outputs = routers[0].get_parameter("weight").detach(), routed.output
    bias_E = routers[0]._parameters.get("bias")
    router_bias_E = None if bias_E is None else bias_E.detach().float().contiguous()
    if not isinstance(outputs, tuple) or len(outputs) != 3:
        raise NotRecognised("its router returns no outputs, weights and numbers of experts")
    outputs_NE, weights_Nk, chosen_Nk = outputs
    rows_NH = routed.args[0].reshape(-1, router_EH.shape[1])
    inputs = zip((call.args[0], *given.args), (routed.args[0], routed.args[0], chosen_Nk, weights_Nk), strict=True)
    if any(distance(part.flatten(), wanted.flatten()) > bound for part, wanted in inputs):
        raise NotRecognised("its experts do not get its input, and what its router returns")
    if distance(nn.functional.linear(rows_NH.float(), router_EH.float(), router_bias_E), outputs_NE) > bound:
        raise NotRecognised("its router is no product")
    shared, shared_gate_H, added = _shared_expert(module, {experts[0], routers[0]}, record)
    if distance(given.tensor().flatten() + added, call.tensor().flatten()) > bound:
        raise NotRecognised("its output is not the experts'")
    dense_NE = _dense(outputs_NE, weights_Nk, chosen_Nk)
    forms = _choices(module, routers[0], len(router_EH), chosen_Nk.shape[1])
    # A router that rounds its shares may take the other one of two that are nearly equal, in some rows.
    far = {form: typical_distance(_dense(outputs_NE, *form(outputs_NE)), dense_NE) for form in forms}
    choice = min(far, key=far.__getitem__)
    if far[choice] > bound:
        raise NotRecognised("its router does not take the highest outputs by their softmax or sigmoid")
    act = experts[0].activation(rows_NH.dtype, bound)
    if act is None:
        raise NotRecognised("its experts have another activation")
    return ChosenExperts(module, router_EH, router_bias_E, choice, act, shared, shared_gate_H)


def _experts_of_layer(layer: Any, experts: Experts, record: Recording, bound: float) -> ChosenExperts:
    """Return the experts that are children of a layer with a block next to them, as in Gemma 4; raise NotRecognised.

    The router's own norm has the sum of squares of the experts' norm, so one product over the experts' input gives its
    outputs.
    """
    router, norm_H = layer.router, layer.pre_feedforward_layernorm_2.weight.detach().float()
    if norm_H.abs().min() < _SMALL * norm_H.abs().max():
        raise NotRecognised("its experts' norm leaves too little of some channels for the router")
    scales_H = router.scale.detach().float() * router.scalar_root_size / norm_H
    router_EH = (router.proj.weight.detach().float() * scales_H).contiguous()
    (rows_NH, chosen_Nk, weights_Nk), routed = _only(record, experts).args, _only(record, router)
    inputs = zip((chosen_Nk, weights_Nk), (routed.output[2], routed.output[1]), strict=True)
    if any(distance(part.flatten(), wanted.flatten()) > bound for part, wanted in inputs):
        raise NotRecognised("its experts do not get what its router returns")
    outputs_NE = nn.functional.linear(rows_NH.float(), router_EH)
    choice = Choice(
        chosen_Nk.shape[1], renormalises=True, scales_E=router.per_expert_scale.detach().float().contiguous()
    )
    dense_NE = _dense(outputs_NE, weights_Nk, chosen_Nk)
    if typical_distance(_dense(outputs_NE, *choice(outputs_NE)), dense_NE) > bound:
        raise NotRecognised("its router does not take the highest outputs by their softmax")
    act = experts.activation(rows_NH.dtype, bound)
    if act is None:
        raise NotRecognised("its experts have another activation")
    return ChosenExperts(layer, router_EH, None, choice, act)


_SMALL = 1e-4
"""The least weight of a norm, as a share of the largest, that a router's product may be divided by."""


def _is_router(module: nn.Module) -> bool:
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return own in _ROUTERS and module.get_parameter("weight").dim() == 2 and not is_product(module)


def _dense(like_NE: torch.Tensor, weights_Nk: torch.Tensor, chosen_Nk: torch.Tensor) -> torch.Tensor:
    """Return the weight of each expert in each row, [N, E]; 0: it is not chosen. The order of a choice is not seen."""
    return torch.zeros_like(like_NE, dtype=torch.float32).scatter(1, chosen_Nk, weights_Nk.float())


def _choices(module: nn.Module, router: nn.Module, E: int, k: int) -> Iterator[Choice]:
    """Yield what may become of a router's outputs. Raises NotRecognised for groups of experts that are not equal."""
    groups, kept = 1, 1
    for of in (router, module):
        number = getattr(of, "num_group", None) or getattr(of, "n_group", None) or 1
        some = getattr(of, "topk_group", None) or number
        if number > some and getattr(of, "topk_method", None) != "greedy":
            groups, kept = number, some
    if E % groups:
        raise NotRecognised(f"its {E} experts are in {groups} groups")
    # One that moves no choice of the recorded rows moves others.
    corrections: list[torch.Tensor | None] = [
        each.detach().flatten().float().contiguous()
        for name, each in itertools.chain(module.named_parameters(), module.named_buffers())
        if re.search(r"(correction|expert)_bias$", name) and each.numel() == E and each.any()
    ]
    corrections = corrections or [None]
    scales = dict.fromkeys((1.0, *(float(getattr(of, "routed_scaling_factor", 1.0)) for of in (router, module))))
    for correction_E, scale, by_two, of_sigmoid, renormalises in itertools.product(
        corrections, scales, (False, True) if groups > 1 else (False,), (False, True), (True, False)
    ):
        yield Choice(k, renormalises, of_sigmoid, correction_E, scale, groups=groups, kept=kept, by_two=by_two)


def _shared_expert(
    module: nn.Module, known: Collection[nn.Module], record: Recording
) -> tuple[str | None, torch.Tensor | None, torch.Tensor | float]:
    """Return the name of the expert that every row takes, the weights of its gate, and what it adds, flat."""
    others = {name: child for name, child in module.named_children() if child not in known and has_weights(child)}
    gates = [child for child in others.values() if type(child) is WideGate]
    blocks = [name for name, child in others.items() if type(child) is not WideGate]
    if not others:
        return None, None, 0.0
    if len(blocks) != 1 or len(gates) > 1:
        raise NotRecognised(f"has the further parts {sorted(others)}")
    added = _only(record, others[blocks[0]]).tensor().flatten()
    if not gates:
        return blocks[0], None, added
    gate_H = gates[0].inner.get_parameter("weight").detach().flatten().float().contiguous()
    return blocks[0], gate_H, added * _only(record, gates[0]).tensor().flatten().sigmoid()


_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
"""The names of the norms of queries and keys."""
_LAST_NORMS = ("query_layernorm", "key_layernorm")
"""HunYuan's, which come after the rotation."""
_ATTENTIONS = {
    ("q_proj", "k_proj", "v_proj", "o_proj"): KeyValues.OWN,
    ("qkv_proj", "o_proj"): KeyValues.OWN,
    ("q_proj", "k_proj", "v_proj", "out_proj"): KeyValues.OWN,
    ("q_proj", "k_proj", "o_proj"): KeyValues.FROM_KEYS,
    ("q_proj", "o_proj"): KeyValues.SHARED,
}
"""The names of an attention's products, the ones that are joined and the output's; and where its keys and values come
from."""


def attention_of(
    module: nn.Module,
    record: Recording,
    shape: LayerAttention,
    layer_idx: int,
    bounds: Bounds,
    num_positions: int,
    *,
    on_cpu: bool,
) -> FusedAttention:
    """Return the fused form of an attention: q, k, v and output products, head norms, rotary. Raise NotRecognised.

    `num_positions`: how many the model is served with; the record has only the first of them. `on_cpu`: forms that only
    a CPU has will do.
    """
    if shape.chunk or shape.padded:
        raise NotRecognised("has chunks or heads of other sizes")
    growth = _growth_of_queries(module, num_positions)
    call = _only(record, module)
    if growth is not None:
        call = _from_position(_FAR * int(growth.floor_scale), call)
    call = _with_other_angles(module, call)
    sinks = module._parameters.get("sinks") if shape.sinks else None
    if sinks is not None and not on_cpu:
        raise NotRecognised("has sinks, whose fused form only a CPU has")
    norms, norms_last = _norms_of_heads(module)
    v_norm = getattr(module, "v_norm", None)
    if isinstance(v_norm, nn.Module):
        norms["v"] = v_norm
    linears = _linears(module, but=norms.values(), own=() if sinks is None else ("sinks",))
    *parts, last = names = next((names for names in _ATTENTIONS if set(names) == set(linears)), ("",))
    if not parts:
        raise NotRecognised(f"has the products {sorted(linears)}")
    key_values = _ATTENTIONS[names]
    if not on_cpu and (v_norm is not None or key_values is not KeyValues.OWN):
        raise NotRecognised("has normed or shared values, whose fused form only a CPU has")
    found = {of: norm_of(norm, record, bounds.norm).norm for of, norm in norms.items()}
    if "v" in found and "q" in found and not any(norms["v"].parameters()):
        found["v"] = replace(found["v"], kind=found["q"].kind)  # weights of ones are the same in each kind
    qkv, output = _joined([linears[name] for name in parts]), _joined([linears[last]])
    sinks_H = None if sinks is None else sinks.detach().float().contiguous()
    made_of = (qkv, output, shape, layer_idx, found.get("q"), found.get("k"), sinks_H, found.get("v"))
    if norms_last and not on_cpu:
        raise NotRecognised("has norms after the rotation, which only a CPU has")
    rotations = _rotations(call, shape, on_cpu=on_cpu)
    if not rotations:
        raise NotRecognised("has no angles, and only a CPU has that form")
    gates = len(parts) == 3 and linears[parts[0]].out_features == 2 * shape.num_heads * shape.head_dim
    more: dict[str, Any] = {"key_values": key_values, "norms_last": norms_last, "query_gates": gates}
    factors_L = None
    if growth is not None:  # transformers rounds a factor to the dtype of the queries
        positions_L, dtype = torch.arange(num_positions + SPARE_ROWS, device=call.tensor().device), call.tensor().dtype
        factors_L = growth.factors(positions_L).to(dtype).float()
        more["query_factors_L"] = growth.factors(positions_L + _FAR * growth.floor_scale).to(dtype).float()
    forms = (FusedAttention(*made_of, rotation=rotation, **more) for rotation in rotations)
    fused = _closest(forms, call, bounds.block, enough=bounds.block / 8)
    fused.query_factors_L = factors_L
    fused.sources = {"qkv": _sources(linears, parts), "output": _sources(linears, [last])}
    return fused


_FAR = 10
"""A position of so many times the length from which queries grow has a factor of 1.24 where the usual growth is 0.1. A
larger one makes attention so sharp that it follows roundings."""


def _growth_of_queries(module: nn.Module, num_positions: int) -> Temperature | None:
    """Return the growth of a module's queries, as of Ministral 3's; None: at these positions they do not grow."""
    rotation: Any = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    length, beta = rotation.get("original_max_position_embeddings"), rotation.get("llama_4_scaling_beta")
    return Temperature(beta, length, first=0) if beta and length < num_positions else None


def _from_position(first: int, call: Call) -> Call:
    """Return the arguments of a call from another first position on. Raises NotRecognised."""
    positions = call.kwargs.get("position_ids")
    if not isinstance(positions, torch.Tensor):
        raise NotRecognised("has queries that grow, and gets no positions")
    return Call(call.args, {**call.kwargs, "position_ids": positions + first}, None)


def _norms_of_heads(module: nn.Module) -> tuple[dict[str, nn.Module], bool]:
    """Return the norms of queries and keys by "q" and "k", and whether they come after the rotation."""
    for names in (*_HEAD_NORMS, _LAST_NORMS):
        norms = {of: getattr(module, name, None) for of, name in zip("qk", names, strict=True)}
        if found := {of: norm for of, norm in norms.items() if isinstance(norm, nn.Module)}:
            return found, names == _LAST_NORMS
    return {}, False


def _with_other_angles(module: nn.Module, call: Call) -> Call:
    """Return a call of an attention with angles of its own, in which every channel that rotates turns by far.

    The first positions turn most channels so little that a form without rotation, or with other pairs, would be within
    the bound. Channels of equal frequencies keep equal angles. Raises NotRecognised.
    """
    given = call.kwargs.get("position_embeddings")
    if not isinstance(given, tuple) or len(given) != 2 or any(part.dim() != 3 or part.shape[1] < 2 for part in given):
        return call  # no cosines and sines of several positions, so no form takes them
    cos_BPR, sin_BPR = given
    per_position_R = torch.atan2(sin_BPR[0, 1].float(), cos_BPR[0, 1].float())
    size_BPR = torch.hypot(sin_BPR.float(), cos_BPR.float())
    spread_R = torch.where(per_position_R == 0, 0.0, 0.5 + (per_position_R.abs().clamp(min=1e-30).log() * 7.3) % 2.0)
    angle_PR = torch.arange(cos_BPR.shape[1], device=cos_BPR.device)[:, None] * spread_R
    other = ((size_BPR * angle_PR.cos()).to(cos_BPR.dtype), (size_BPR * angle_PR.sin()).to(sin_BPR.dtype))
    kwargs = {**call.kwargs, "position_embeddings": other}
    try:
        return Call(call.args, kwargs, module(*call.args, **kwargs))
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise NotRecognised(f"cannot be called with other angles: {error}") from error


def _rotations(call: Call, shape: LayerAttention, *, on_cpu: bool) -> list[Rotation]:
    """Return what the angles of an attention's call may mean. Neighbours, and heads without angles, need a CPU."""
    angles = call.kwargs.get("position_embeddings")
    if angles is None:
        return [Rotation.NONE] if on_cpu else []
    halved = 2 * angles[0].shape[-1] <= shape.head_dim
    left_out = set() if halved else {Rotation.HALVES_BY_PAIR}
    return [rotation for rotation in Rotation if rotation not in left_out and (on_cpu or not rotation.of_neighbours)]


def _sources(linears: dict[str, Product], names: list[str]) -> tuple[tuple[str, int], ...]:
    """Return the modules of a joined product, with their outputs."""
    return tuple((name, linears[name].out_features) for name in names)


def _only(record: Recording, module: nn.Module) -> Call:
    try:
        return record.only(module)
    except ValueError as error:
        raise NotRecognised(str(error)) from error


def _linears(module: nn.Module, but: Iterable[nn.Module] = (), own: Collection[str] = ()) -> dict[str, Product]:
    """Return the products among a module's children; raise NotRecognised where another part has weights, or the module
    has parameters that are not in `own`."""
    left = set(but)
    children = {name: child for name, child in module.named_children() if child not in left}
    linears = {name: child for name, child in children.items() if is_product(child)}
    rest = [name for name, child in children.items() if name not in linears and has_weights(child)]
    rest += [name for name, _ in module.named_parameters(recurse=False) if name not in own]
    if rest:
        raise NotRecognised(f"has weights of its own: {rest}")
    return linears


def _joined(linears: list[Product]) -> nn.Module:
    try:
        return joined(linears)
    except ValueError as error:
        raise NotRecognised(str(error)) from error


def _closest(candidates: Iterable[_M], call: Call, bound: float, *, enough: float = 0.0) -> _M:
    """Return the candidate that repeats the recorded call best; raise NotRecognised when none is within the bound.

    `enough`: the first that is no further away will do. A candidate that does not take the call is left out.
    """
    best, least, refusal = None, float("inf"), ""
    for candidate in candidates:
        try:
            got = candidate(*call.args, **call.kwargs)
            far = distance(got[0] if isinstance(got, tuple) else got, call.tensor())
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            refusal = f"does not take the fused form: {error}"
            continue
        if far < least:
            best, least = candidate, far
        if least <= enough:
            break
    if best is None or least > bound:
        raise NotRecognised(f"its fused form is {least:.1e} away from it" if best is not None else refusal)
    return best


def joined_delta_net_of(module: DeltaNet, record: Recording, bound: float) -> JoinedDeltaNet:
    """Return a delta net with two products for what rows bring; raise NotRecognised. It writes the states of the
    record's forward again."""
    try:
        joined_net = JoinedDeltaNet(module)
    except ValueError as error:
        raise NotRecognised(str(error)) from error
    return _closest([joined_net], _only(record, module), bound)


class FusedModelDiffers(RuntimeError):
    """Each fused part agrees with the model, but the fused model does not: it must be loaded again, unfused."""


@dataclass(frozen=True, slots=True)
class Fused:
    """The result of fusing a model."""

    norms: int = 0
    blocks: int = 0
    attentions: int = 0
    delta_nets: int = 0
    mixtures: Mapping[nn.Module, ChosenExperts] = field(default_factory=dict)
    """The mixtures of a known form, by the model's own module, which stays in its place."""
    forward: WholeForward | None = None
    """None where the model's own forward runs, over the parts."""
    left: tuple[str, ...] = ()
    """The reasons why modules were not replaced, one line each."""

    def __repr__(self) -> str:
        parts = f"{self.attentions} attentions, {self.blocks} blocks, {self.norms} norms"
        parts += f", {self.delta_nets} delta nets" if self.delta_nets else ""
        parts += f", {len(self.mixtures)} mixtures" if self.mixtures else ""
        return f"<Fused {parts}, {'one loop' if self.forward else 'no loop'}, {len(self.left)} reasons>"


def fuse_parts(
    net: Any, record: Recording, layer_attention: Mapping[int, LayerAttention], bounds: Bounds, num_positions: int
) -> Fused:
    """Replace every recognised module of `net`.

    `record` is of a forward over our attention, and `layer_attention` holds the parameters of that attention by layer.
    `num_positions`: as in `attention_of`.
    A replaced module is also removed from the record, which releases its weights: memory holds at most one layer twice.
    """
    counts, left = Counter[str](), dict[str, None]()
    mixtures: dict[nn.Module, ChosenExperts] = {}
    on_cpu = next(net.parameters()).device.type == "cpu"

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
        is_attention = "o_proj" in parts or {"q_proj", "out_proj"} <= parts
        if is_attention and isinstance(layer_idx, int) and layer_idx in layer_attention:
            of_layer = (layer_attention[layer_idx], layer_idx, bounds, num_positions)
            make = functools.partial(attention_of, child, record, *of_layer, on_cpu=on_cpu)
            attempt("attentions", parent, name, child, make)
        elif type(child) is DeltaNet and on_cpu:
            joined_net = functools.partial(joined_delta_net_of, child, record, bounds.block)
            attempt("delta nets", parent, name, child, joined_net)
        elif any(names[-1] in parts for names in _GATED_BLOCKS):
            attempt("blocks", parent, name, child, functools.partial(gated_of, child, record, bounds.block))
        elif any(isinstance(part, Experts) for part in child.children()):
            try:
                mixtures[child] = chosen_experts_of(child, record, bounds.block)
            except (NotRecognised, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as why:
                left[f"mixtures: {type(child).__name__} {why}"] = None
    for parent, name, child in _children(net):
        if hasattr(child, "weight") and (hasattr(child, "eps") or hasattr(child, "variance_epsilon")):
            attempt("norms", parent, name, child, functools.partial(norm_of, child, record, bounds.norm))
    attentions = sum(isinstance(module, RowAttention) for module in net.modules())
    return Fused(counts["norms"], counts["blocks"], attentions, counts["delta nets"], mixtures, left=tuple(left))


def verified(
    net: Any,
    fused: Fused,
    record: Recording,
    want_NV: torch.Tensor,
    run: Callable[[WholeForward | None], torch.Tensor],
    bounds: Bounds,
    noise: float = 0.0,
    compare: Distance = distance,
) -> Fused:
    """Return `fused` with the fused forward where it gives the logits of the model as it came; raise FusedModelDiffers.

    `run` computes logits [N, V] of the recorded tokens by a fused forward, or by the model's own forward. `noise` is
    the relative distance of two forwards of the model that are both right: deep ones in bfloat16 have more than the
    bound.
    """
    bound = max(bounds.logits, min(2 * noise, bounds.most))
    try:
        own = compare(run(None), want_NV)
    except KeyError as missing:  # keys and values of a layer that is fused, in a layer that shares them and is not
        raise FusedModelDiffers(f"a part lacks {missing}") from missing
    if own > bound:
        raise FusedModelDiffers(f"fused parts give logits that are {own:.1e} away")
    try:
        forward = fused_forward_of(net, record, fused.mixtures)
        far = compare(run(forward), want_NV)
        if far > bound:
            raise NotALoop(f"its logits are {far:.1e} away")
    except (NotALoop, AssertionError, RuntimeError, TypeError, ValueError) as why:
        result = replace(fused, left=(*fused.left, f"forward: {why}"))
    else:
        result = replace(fused, forward=forward)
    for reason in result.left:
        log.info("not fused: %s", reason)
    return result


def _children(net: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every module with its parent and its name there, as they were at the call. Keeps those that come yet only, so
    that a module whose place was taken is freed."""
    left = deque((parent, name, child) for parent in net.modules() for name, child in parent.named_children())
    return (left.popleft() for _ in range(len(left)))
