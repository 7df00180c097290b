"""The places where a LoRA adapter's matrices belong in a loaded model, by the paths that PEFT's files have.

Products that the model joined (q, k and v; gate and up) are one product here, with a place for each of its parts.
Invariant: a path without a place has a reason. Not responsible for: the matrices (see pool.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from gpu_engine.model.adapters.peft_files import AdapterNotSupported, LoraFiles, stored_dtype
from gpu_engine.model.experts import WideGate
from gpu_engine.model.fused_layers import FusedAttention, FusedGated
from gpu_engine.model.linear import InvariantLinear, PackedLinear
from gpu_engine.model.quantised.linear import BlockLinear
from gpu_engine.model.quantised.scaled import ScaledLinear
from gpu_engine.model.recurrent.delta_nets import JoinedDeltaNet
from kernels.low_rank import LowRankPart
from kernels.low_rank_stacks import ProductShape

PRODUCTS = (nn.Linear, PackedLinear, InvariantLinear, BlockLinear, ScaledLinear)

JoinedProducts = FusedAttention | FusedGated | JoinedDeltaNet
"""Modules that say which modules of the model each of their products has joined."""
Forward = Callable[[torch.Tensor], torch.Tensor]
Wrap = Callable[[int, nn.Module], nn.Module]
"""Returns a product that also adds what adapters have for it; its number comes first."""


@dataclass(frozen=True, slots=True)
class Place:
    """The outputs of one module among those of a product."""

    product: int
    begin: int
    outputs: int
    inputs: int


class Places:
    """Every place of a model. Numbers its products in the order of its modules.

    Args:
        net: the transformers model, with its parts fused.
        first: the modules whose products come first, in this order; None: in the order of the model.
        folded: by the path of a product whose weights have taken a multiplier of its outputs: the factors, [O].
    """

    def __init__(
        self, net: Any, first: Sequence[nn.Module] = (), folded: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> None:
        self._net, self._folded = net, folded
        self.by_path: dict[str, Place] = {}
        """As PEFT's files name the modules."""
        self.shapes: list[ProductShape] = []
        """The places of the products, by number."""
        head = net.get_output_embeddings()
        self._owners: list[tuple[int, nn.Module, str]] = []
        """(product, the module that calls it, its name there)."""
        ranks = {module: rank for rank, module in enumerate(first)}
        for path, module in sorted(net.named_modules(), key=lambda named: self._rank(named[0], ranks)):
            if isinstance(module, JoinedProducts):
                for name, product in module.products():
                    self._number(
                        module, name, product, [(f"{path}.{part}", size) for part, size in module.sources[name]]
                    )
            elif isinstance(module, PRODUCTS) and module is not head and not self._inside(path):
                parent, _, name = path.rpartition(".")
                owner = net.get_submodule(parent)
                named = parent if isinstance(owner, WideGate) else path
                self._number(owner, name, module, [(named, int(module.out_features))])

    def _inside(self, path: str) -> bool:
        """Return whether a module belongs to a fused part, or to experts, which see other rows than the forward's."""
        above = itertools.islice(self._along(path), path.count(".") + 1)
        inside = any(isinstance(module, JoinedProducts) for module in above)
        return "experts" in path.split(".")[:-1] or inside

    def _rank(self, path: str, ranks: Mapping[nn.Module, int]) -> int:
        """Return the rank of a module, or of one that has it; those without come last."""
        return next((ranks[module] for module in self._along(path) if module in ranks), len(ranks))

    def _along(self, path: str) -> Iterator[nn.Module]:
        """Yield the modules from the model on that have the one at `path`, then itself."""
        parts = path.split(".")
        return (self._net.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1))

    def _number(self, owner: nn.Module, name: str, product: Any, parts: list[tuple[str, int]]) -> None:
        number, begin = self.num_products, 0
        self.shapes.append(ProductShape(int(product.in_features), tuple(outputs for _, outputs in parts)))
        self._owners.append((number, owner, name))
        for path, outputs in parts:
            self.by_path[path] = Place(number, begin, outputs, int(product.in_features))
            begin += outputs

    @property
    def num_products(self) -> int:
        """The number of products."""
        return len(self.shapes)

    @property
    def owners(self) -> Iterator[tuple[int, nn.Module, str]]:
        """Yield each product's number, the module that calls it and its name there."""
        return iter(self._owners)

    def check(self, files: LoraFiles) -> None:
        """Raise AdapterNotSupported where a matrix has no place; it names the tensor, and both shapes."""
        for path, matrices in files.modules.items():
            place = self.by_path.get(path)
            if place is None:
                raise AdapterNotSupported(f"{path}: {self._why_not(path)}")
            for side, shape, want in (
                ("A", matrices.a_RI.shape[1:], place.inputs),
                ("B", matrices.b_OR.shape[:1], place.outputs),
            ):
                if shape != (want,):
                    rank = len(matrices.a_RI)
                    wanted, has = ([rank, want], [rank, *shape]) if side == "A" else ([want, rank], [*shape, rank])
                    raise AdapterNotSupported(
                        f"base_model.model.{path}.lora_{side}.weight: has the shape {has}, and the model needs {wanted}"
                    )
            if not (matrices.a_RI.isfinite().all() and matrices.b_OR.isfinite().all()):
                raise AdapterNotSupported(f"{path}: has a number that is not finite")

    def parts_of(self, files: LoraFiles) -> dict[int, list[LowRankPart]]:
        """Return the matrices of an adapter that was checked, by product."""
        found: dict[int, list[LowRankPart]] = {}
        for path, matrices in files.modules.items():
            place = self.by_path[path]
            dtype = stored_dtype(matrices)
            b_OR = matrices.b_OR if path not in self._folded else matrices.b_OR.float() * self._folded[path][:, None]
            a_RI, b_RO = matrices.a_RI.to(dtype).contiguous(), b_OR.to(dtype).T.contiguous()
            found.setdefault(place.product, []).append(LowRankPart(a_RI, b_RO, place.begin, matrices.scale))
        for parts in found.values():
            parts.sort(key=lambda part: part.begin)
        return found

    def _why_not(self, path: str) -> str:
        if "experts" in path.split("."):
            return "the experts of a mixture have no place for an adapter"
        try:
            module = self._net.get_submodule(path)
        except AttributeError:
            return f"the model has no such product; it has {self._some_names()}"
        if module is self._net.get_output_embeddings():
            return "the output head has no place for an adapter"
        return f"a {type(module).__name__} has no place for an adapter"

    def _some_names(self) -> str:
        return ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in self.by_path)) or "none"

    def __repr__(self) -> str:
        return f"<Places of {len(self.by_path)} modules in {self.num_products} products>"


def wrap_products(places: Places, wrap: Wrap, adapts: Callable[[], bool] | None = None) -> None:
    """Replace every product of the model by one that also adds what adapters have for it.

    `adapts` returns whether they have anything for the forward that runs. A product and its activation stay one
    kernel in the other forwards; None: in none.
    """
    for number, owner, name in places.owners:
        if isinstance(owner, FusedGated):
            owner.replace_product(name, wrap(number, dict(owner.products())[name]), adapts)
        elif isinstance(owner, JoinedProducts):
            owner.replace_product(name, wrap(number, dict(owner.products())[name]))
        else:
            setattr(owner, name, wrap(number, getattr(owner, name)))


class AddsProducts(Protocol):
    """Adds what the rows' adapters have; `pool.AdapterPool` and `device_pool.DeviceAdapterPool` do."""

    def add(self, product: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add it to the output `y` of a product with the input `x`, in place."""


class AdaptedProduct(nn.Module):
    """A product that also adds what the rows' adapters have for it."""

    def __init__(self, product: nn.Module, number: int, pool: AddsProducts) -> None:
        super().__init__()
        self._product, self._number, self._pool = [product], number, pool  # no submodule: its result lacks adapters
        self.in_features, self.out_features = product.in_features, product.out_features
        self._run = product.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        y: torch.Tensor = self._run(x)
        self._pool.add(self._number, x, y)
        return y
