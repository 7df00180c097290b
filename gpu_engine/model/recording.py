"""The arguments and the result of every module of a model in one forward.

Invariant: values are those of the model as it was loaded; a fused module is measured against them. Not responsible for:
comparing (see fusion.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def tensor(self) -> torch.Tensor:
        """Return the output, or its first element if it is a tuple; raise TypeError if the result is not a tensor."""
        first = self.output[0] if isinstance(self.output, tuple) else self.output
        if not isinstance(first, torch.Tensor):
            raise TypeError(f"no tensor came out but {type(first).__name__}")
        return first


@dataclass(slots=True)
class Recording:
    """The calls of one forward, by module."""

    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)

    def only(self, module: nn.Module) -> Call:
        """Return the one call of a module; raise ValueError when there was none, or more."""
        calls = self.calls.get(module, [])
        if len(calls) != 1:
            raise ValueError(f"{type(module).__name__} was called {len(calls)} times")
        return calls[0]

    def forget(self, kind: type[nn.Module]) -> None:
        """Forget the calls of the modules of a class, and with them the modules."""
        self.calls = {module: calls for module, calls in self.calls.items() if type(module) is not kind}

    def __repr__(self) -> str:
        return f"<Recording of {len(self.calls)} modules>"


@contextmanager
def recording(model: nn.Module) -> Iterator[Recording]:
    """Record every call of every module below `model` while the context is open."""
    made = Recording()

    def hook_of(module: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            made.calls.setdefault(module, []).append(Call(args, kwargs, output))

        return hook

    handles = [item.register_forward_hook(hook_of(item), with_kwargs=True) for item in model.modules()]
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative distance of two results; infinite where shapes differ or a number is not finite."""
    if got.shape != want.shape:
        return float("inf")
    wide = want.float()
    far = float((got.float() - wide).norm() / wide.norm().clamp(min=1e-20))
    return far if far == far else float("inf")


Distance = Callable[[torch.Tensor, torch.Tensor], float]
"""Compares logits [N, V] with those that are wanted."""


def typical_distance(got_NV: torch.Tensor, want_NV: torch.Tensor) -> float:
    """Return the median over the rows of their relative distances.

    Rounding to 16 bits changes some rows of some models a lot. The norm after a recurrent layer divides by a row's
    size, which may be small, and a router with two nearly equal outputs may choose the other expert. A wrong formula
    changes every row.
    """
    far = sorted(distance(got_V, want_V) for got_V, want_V in zip(got_NV, want_NV, strict=True))
    return far[len(far) // 2]
