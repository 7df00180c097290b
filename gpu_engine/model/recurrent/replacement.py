"""Replaces transformers' recurrent modules in a loaded model by ours.

Invariant: a replaced module keeps its products, with what quantised them. Not responsible for: comparing the model
before and after (see probe.py), the memory of states (see rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.recurrent.delta_nets import DeltaNet, GroupedDeltaNet
from gpu_engine.model.recurrent.mixers import MatrixMixer, ScanMixer
from gpu_engine.model.recurrent.rows import RecurrentLayer, recurrent_layers
from gpu_engine.model.recurrent.short_convolutions import GatedShortConv

REPLACEMENTS: dict[str, Callable[[Any], nn.Module]] = {
    "BambaMixer": MatrixMixer,
    "FalconH1Mixer": MatrixMixer,
    "GraniteMoeHybridMambaLayer": MatrixMixer,
    "JambaMambaMixer": ScanMixer,
    "Lfm2MoeShortConv": GatedShortConv,
    "Lfm2ShortConv": GatedShortConv,
    "NemotronHMamba2Mixer": MatrixMixer,
    "Qwen3NextGatedDeltaNet": GroupedDeltaNet,
    "Qwen3_5GatedDeltaNet": DeltaNet,
    "Qwen3_5MoeGatedDeltaNet": DeltaNet,
}
"""By the name of the class in transformers."""


def is_replaced(module: nn.Module) -> bool:
    """Return whether `replace_recurrent` replaces a module of transformers."""
    return type(module).__name__ in REPLACEMENTS


def planned_layers(net: nn.Module) -> dict[int, RecurrentLayer]:
    """Return what `replace_recurrent` would, for the sizes of states; the model is not changed, and may have no memory
    yet."""
    found: dict[int, RecurrentLayer] = {}
    for module in net.modules():
        if (make := REPLACEMENTS.get(type(module).__name__)) is not None:
            try:
                found |= recurrent_layers(make(module))
            except ValueError as error:
                raise ModelNotSupported(f"model: {type(module).__name__} has {error}") from error
    return found


def replace_recurrent(net: nn.Module) -> dict[int, RecurrentLayer]:
    """Replace the recurrent modules of a model on its device; return them by the numbers of their layers.

    Raises ModelNotSupported for sizes that the kernels do not take.
    """
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            make = REPLACEMENTS.get(type(child).__name__)
            if make is None:
                continue
            try:
                setattr(parent, name, make(child))
            except ValueError as error:
                raise ModelNotSupported(f"model: {type(child).__name__} has {error}") from error
    return recurrent_layers(net)
