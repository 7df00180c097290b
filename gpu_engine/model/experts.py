"""Experts of a mixture on a CPU, as products like any other, and routers whose product is packed.

transformers multiplies an expert's rows by a slice of one tensor, in a product whose rounding depends on the number of
rows. Here each expert has two linear layers, which `pack_linears` packs, and a router's product is packed in place.
Invariant: a row has the same bits whatever rows come with it, so drafts stay lossless. On a GPU transformers' grouped
products run, or the model is refused. Not responsible for: the choice of experts (the model's own router).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gpu_engine.model.linear import PackedLinear, can_pack
from gpu_engine.model.names import ModelNotSupported
from gpu_engine.model.quantised.linear import is_router
from gpu_engine.model.recording import distance
from kernels.fused import gated
from kernels.fused_arguments import Activation
from kernels.mixture import MixtureProducts

log = logging.getLogger(__name__)

_LIBRARY = "transformers.integrations.moe"
"""The module of the gate that most families' experts have."""
_OF_GPT_OSS = "GptOssExperts"
"""The experts with biases, whose weights have the outputs of gate and up in turn."""
_MOST = 8192
"""Experts of a mixture: each takes two modules, and a damaged configuration may have any number."""
_GROUPED = (9, 10)
"""Major compute capabilities for which torch has a kernel of grouped products."""
_VECTORS = 32
"""Rows that are whole vectors for any number of experts."""
_SAME = 2e-2
"""Largest relative distance of an expert's output from transformers': rounding of bfloat16."""


class Experts(nn.Module):
    """Replaces transformers' experts: (rows [N, H], chosen experts [N, k], their weights [N, k]) -> [N, H].

    An expert's first product has the outputs of the gate, and then those of up, also where `inner` has them in turn.
    Takes the weights of `inner` away, which keeps its gate function.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        own: Any = inner
        transposed, biased = getattr(own, "is_transposed", True), getattr(own, "has_bias", False)
        alternates = not getattr(own, "is_concatenated", True)
        name = _first_of(inner) or ""
        bias_EN = getattr(own, f"{name}_bias") if biased else None
        self.gate_up = _linears(getattr(own, name), bias_EN, transposed, alternates)
        self.down = _linears(own.down_proj, own.down_proj_bias if biased else None, transposed)
        self.width = int(self.down[0].in_features)  # type: ignore[arg-type]
        """Channels between an expert's two products."""
        self.inner = inner
        self._of_inner: Callable[[torch.Tensor], torch.Tensor] = getattr(own, "_apply_gate", self._halves)
        self.has_gate = own.__dict__.get("has_gate", True)
        gate = self._alternating if alternates else self._of_inner
        self._gate: Callable[[torch.Tensor], torch.Tensor] = gate if self.has_gate else own.act_fn
        self.native: MixtureProducts | None = None
        """All products in one call, where they are over blocks; quantised/mixtures.py sets it."""

    def take_weights(self) -> None:
        """Remove the weights of the replaced module."""
        first = _first_of(self.inner) or ""
        for name in (first, "down_proj", f"{first}_bias", "down_proj_bias"):
            if name in self.inner._parameters:
                delattr(self.inner, name)

    def gate(self, gate_up_NC: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the second product by the outputs of the first, [N, C] -> [N, I]."""
        return self._gate(gate_up_NC)

    def _alternating(self, gate_up_NC: torch.Tensor) -> torch.Tensor:
        """Call a gate that takes the outputs of gate and up in turn."""
        return self._of_inner(gate_up_NC.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))

    def _halves(self, gate_up_NC: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_NC.chunk(2, dim=-1)
        out: torch.Tensor = up * self.inner.act_fn(gate)  # type: ignore[operator]
        return out

    def one(self, expert: int, rows_NH: torch.Tensor) -> torch.Tensor:
        """Return one expert's output, [N, H]."""
        out_NH: torch.Tensor = self.down[expert](self._gate(self.gate_up[expert](rows_NH)))
        return out_NH

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self.down)

    def activation(self, dtype: torch.dtype, bound: float) -> Activation | None:
        """Return the activation that gives the outputs of the gate in this dtype, up to a relative distance; None: it
        is another one."""
        channels = self.width * (2 if self.has_gate else 1)
        gate_up_NC = torch.randn(4, channels, generator=torch.Generator().manual_seed(0)).to(dtype)
        ranges = (gate_up_NC, 100.0 * gate_up_NC)  # some activations differ near 0, and others have a bound
        acts = (act for act in Activation if act.has_gate == self.has_gate)
        return next((act for act in acts if all(distance(gated(x, act), self.gate(x)) <= bound for x in ranges)), None)

    def keep(self, own: range) -> None:
        """Forget the weights of the experts that are not in `own`. The others keep their numbers."""
        self.native = None
        for expert in set(range(self.count)) - set(own):
            self.gate_up[expert] = self.down[expert] = nn.Identity()

    def forward(self, hidden_states: torch.Tensor, chosen_Nk: torch.Tensor, weights_Nk: torch.Tensor) -> torch.Tensor:
        """Add the experts' outputs in the order of the experts, or in that of a row's choice in the native call."""
        if self.native is not None:
            added_NH = self.native(hidden_states.contiguous(), chosen_Nk, weights_Nk)
            if added_NH is not None:
                return added_NH
        out_NH = torch.zeros_like(hidden_states)
        for expert in chosen_Nk.unique().tolist():
            if not 0 <= expert < len(self.down):
                continue
            rows, places = torch.where(chosen_Nk == expert)
            part_NH = self.one(expert, hidden_states[rows]) * weights_Nk[rows, places, None]
            out_NH.index_add_(0, rows, part_NH.to(out_NH.dtype))
        return out_NH


class WideGate(nn.Module):
    """Replaces the product of one output that gates a shared expert: its output once for each channel of that.

    torch computes what is left after the last whole vectors of a tensor by another function, so the bits of a sigmoid
    over one number a row would depend on the number of rows.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        out: torch.Tensor = self.inner(hidden_states).expand(hidden_states.shape).contiguous()
        return out


class WeightedExperts(Experts):
    """Llama 4's experts: every row once for each expert, weighted already, [E * N, H] -> [E * N, H]."""

    def forward(self, routed_MH: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Skip rows of zeros, whose output is zero: their expert was not chosen."""
        routed_ENH = routed_MH.view(len(self.down), -1, routed_MH.shape[-1])
        out_ENH = torch.zeros_like(routed_ENH)
        for expert, rows_NH in enumerate(routed_ENH):
            (chosen,) = torch.where(rows_NH.any(-1))
            if len(chosen):
                out_ENH[expert, chosen] = self.one(expert, rows_NH[chosen])
        return out_ENH.view_as(routed_MH)


def split_experts(net: nn.Module) -> int:
    """Replace the experts of a model that has no weights yet; return how many.

    It takes experts of the form that most families have, gate, then up, without biases, those without a gate, and those
    of gpt-oss. It needs no comparison for them. Raises ModelNotSupported for more experts than any model has.
    """
    count = 0
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if (first := _first_of(child)) is not None and _is_known(child, first):
                if (number := len(child.get_parameter(first))) > _MOST:
                    raise ModelNotSupported(f"model: its mixtures have {number} experts, and at most {_MOST} are read")
                made = Experts(child)
                made.take_weights()
                made.inner._is_hf_initialized = True  # type: ignore[assignment]  # it has nothing to fill in any more
                setattr(parent, name, made)
                count += 1
    return count


def _is_known(module: nn.Module, first: str) -> bool:
    """Return whether experts have the form that transformers' decorator of experts gives a class without settings, or
    that of gpt-oss. `first`: the name of their first weights.

    Some versions of the library have not all of these settings. A family with a gate of its own defines it.
    """
    own, weight = module.__dict__, module.get_parameter(first)
    form = {"has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False}
    of_library = getattr(getattr(type(module), "_apply_gate", None), "__module__", "") == _LIBRARY
    if type(module).__name__ == _OF_GPT_OSS:
        form, of_library = form | {"has_bias": True, "is_transposed": True, "is_concatenated": False}, True
    same = all(own.get(name, value) is value for name, value in form.items())
    has_gate = own.get("has_gate", None if first == "gate_up_proj" else True)
    return weight.dim() == 3 and has_gate is (first == "gate_up_proj") and of_library and same


def replace_experts(net: nn.Module) -> int:
    """Replace the experts of a model on a CPU, and pack the products of its routers; return the mixtures that it has.

    Experts of a form that is not known stay, and the log names them.
    """
    count = sum(isinstance(module, Experts) for module in net.modules())
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            gate = getattr(child, "shared_expert_gate", None)
            if isinstance(gate, nn.Module) and getattr(gate, "out_features", 0) == 1:
                child.shared_expert_gate = WideGate(gate)
            if _first_of(child) is None:
                continue
            if (experts := _replaced(child)) is not None:
                setattr(parent, name, experts)
                count += 1
    if count and can_pack():
        for module in net.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and is_router(module):
                _pack_router(module, weight)
    return count


@torch.no_grad()
def _replaced(module: nn.Module) -> Experts | None:
    """Return the replacement, if it gives the outputs of the module for a few rows."""
    kind, own = type(module).__name__, module.__dict__
    weights: Any = getattr(module, _first_of(module) or "")
    if weights.dim() != 3 or own.get("has_post_expert_norm", False):
        log.info("the experts %s stay as they are: an unknown form", kind)
        return None
    made = Experts(module) if "has_gate" in own else WeightedExperts(module)
    num_experts = len(weights)
    width = weights.shape[1 if getattr(module, "is_transposed", True) else 2]
    rows_NH = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(weights)
    if type(made) is Experts:
        chosen_Nk = torch.arange(8).view(4, 2) % num_experts
        call: tuple[torch.Tensor, ...] = (rows_NH, chosen_Nk, torch.rand(4, 2).to(weights))
    else:
        call = (rows_NH.repeat(num_experts, 1),)
    try:
        far = distance(made(*call), module(*call))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        log.info("the experts %s stay as they are: %s", kind, error)
        return None
    if far > _SAME:
        log.info("the experts %s stay as they are: their products are %.1e away", kind, far)
        return None
    made.take_weights()
    return made


def _first_of(module: nn.Module) -> str | None:
    """Return the name of the experts' first weights; None: the module is no experts. Those without a gate have only
    `up_proj`."""
    held = {name for name, weight in module._parameters.items() if weight is not None}
    return next((name for name in ("gate_up_proj", "up_proj") if {name, "down_proj"} <= held), None)


def _linears(
    weight_ENK: torch.Tensor, bias_EN: torch.Tensor | None, transposed: bool, alternates: bool = False
) -> nn.ModuleList:
    """Return the products of the experts. `alternates`: the outputs of gate and up come in turn."""

    def in_halves(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if alternates else rows

    made = []
    for expert, weight in enumerate(weight_ENK.detach()):
        weight_NK = in_halves(weight.T if transposed else weight).contiguous()
        linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=bias_EN is not None, device="meta")
        linear.weight = nn.Parameter(weight_NK, requires_grad=False)
        if bias_EN is not None:
            linear.bias = nn.Parameter(in_halves(bias_EN.detach()[expert]), requires_grad=False)
        made.append(linear)
    return nn.ModuleList(made)


def refuse_grouped_products(net: nn.Module, capability_of: Callable[[], tuple[int, int]]) -> None:
    """Raise ModelNotSupported where the experts' grouped products read their sizes on the host, as no graph can.

    torch has a kernel for bfloat16 on GPUs of compute capability 9 and 10. Elsewhere it loops over the experts.
    `capability_of` returns the device's, and is called only for a mixture.
    """
    for module in net.modules():
        weights = module._parameters.get("gate_up_proj")
        # Others multiply every row by every expert, in batched products.
        if weights is None or "has_gate" not in module.__dict__:
            continue
        capability = capability_of()
        if weights.dtype != torch.bfloat16 or capability[0] not in _GROUPED:
            found = f"{str(weights.dtype).removeprefix('torch.')} on compute capability {capability[0]}.{capability[1]}"
            raise ModelNotSupported(
                f"model: torch has no grouped product for experts in {found}, and what it does instead cannot be "
                "captured in a graph. Serve the model in bfloat16 on compute capability 9 or 10, or with "
                "enforce_eager = true, or on a CPU"
            )


class _PackedProduct(TorchFunctionMode):
    """Sends products by one weight to a packed one, inside the `with` block."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight
        self._packed: dict[torch.dtype, PackedLinear] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not nn.functional.linear or args[1].shape != self._weight.shape:
            return func(*args, **(kwargs or {}))
        x, weight = args[:2]
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        if weight.dtype not in self._packed:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(self._weight.detach().to(weight.dtype), requires_grad=False)
            self._packed[weight.dtype] = PackedLinear(linear)
        out = self._packed[weight.dtype](x)
        return out if bias is None else out + bias


def _pack_router(router: nn.Module, weight: torch.Tensor) -> None:
    """Let a router's forward run as it is, over a packed product and whole vectors.

    torch computes what is left after the last whole vectors of a tensor by another function, so the bits of a sigmoid
    over few experts would depend on the number of rows.
    """
    inner, product = router.forward, _PackedProduct(weight)

    def forward(hidden_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
        rows_NH = hidden_states.reshape(-1, hidden_states.shape[-1])
        count = len(rows_NH)
        with product:
            out = inner(nn.functional.pad(rows_NH, (0, 0, 0, -count % _VECTORS)), *rest, **options)
        return tuple(part[:count] for part in out) if isinstance(out, tuple) else out[:count]

    router.forward = forward
