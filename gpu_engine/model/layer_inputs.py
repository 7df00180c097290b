"""Inputs by layer: each layer also gets a few channels of its own of every token (Gemma 4 E2B and E4B).

A token's inputs are the sum of an embedding, by its id, and of a product of the first layer's input. At the end of a
layer x += norm(project(act(gate(x)) * input)). Invariant: the inputs were compared with those of a recorded forward.
Not responsible for: the rest of the loop (see fused_forward.py).

Shapes: B sequences, P positions of each, N rows, H hidden size, L layers, I channels of a layer's input.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gpu_engine.model.fused_layers import FusedNorm
from gpu_engine.model.recording import Recording, distance
from kernels.fused import Activation, RMSNorm, gated, rms_norm
from kernels.fused_arguments import EVERYWHERE

_ROUNDING = 2e-2
"""Largest relative distance that rounding to a 16-bit type explains."""


class OtherInputs(Exception):
    """A decoder or a layer has the names of this form, and computes something else; the message says what."""


class LayerInputs:
    """Computes the inputs of all layers. The decoder keeps the products, which adapters may replace there.

    Args:
        decoder: transformers' decoder.
        norm: of the product, [I].
    """

    def __init__(self, decoder: Any, norm: RMSNorm, num_layers: int) -> None:
        self._decoder, self.norm, self._num_layers = decoder, norm, num_layers
        self.projection_scale = float(decoder.per_layer_model_projection_scale)
        self.scale = float(decoder.per_layer_input_scale)
        """Multiplies the sum."""

    @property
    def embedding(self) -> nn.Module:
        """The embedding, of L * I channels."""
        embedding: nn.Module = self._decoder.embed_tokens_per_layer
        return embedding

    @property
    def projection(self) -> nn.Module:
        """The product, H -> L * I."""
        projection: nn.Module = self._decoder.per_layer_model_projection
        return projection

    def of(self, ids_BP: torch.Tensor, x_BPH: torch.Tensor) -> torch.Tensor:
        """Return [L, B * P, I]."""
        projected = (self.projection(x_BPH) * self.projection_scale).view(-1, len(self.norm.weight_H))
        embedded: torch.Tensor = self.embedding(ids_BP)
        sum_XI = (rms_norm(projected, self.norm) + embedded.view(projected.shape)) * self.scale
        return sum_XI.view(ids_BP.numel(), self._num_layers, -1).transpose(0, 1)


class LayerInput:
    """What one layer does with its input. The layer keeps the products, as in `LayerInputs`."""

    def __init__(self, layer: Any, act: Activation, norm: RMSNorm) -> None:
        self._layer, self.act, self.norm = layer, act, norm

    def products(self) -> list[tuple[str, nn.Module]]:
        """Return the products by name, in the order of their use: H -> I and I -> H."""
        return [("gate", self._layer.per_layer_input_gate), ("projection", self._layer.per_layer_projection)]

    def of_rows(self, x_NH: torch.Tensor, input_NI: torch.Tensor) -> torch.Tensor:
        """Return what is added to the residual stream, [N, H]."""
        gate_NI = self._layer.per_layer_input_gate(x_NH)
        active_NI = gated(torch.cat([gate_NI, input_NI], dim=1), self.act)
        out_NH: torch.Tensor = self._layer.per_layer_projection(active_NI)
        return rms_norm(out_NH, self.norm)


def layer_inputs_of(
    decoder: nn.Module, embedding: nn.Module, layers: Iterable[nn.Module], record: Recording
) -> LayerInputs | None:
    """Return the inputs by layer of a decoder; None: it has none. Raises OtherInputs."""
    names = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
    _, projection, norm = (getattr(decoder, name, None) for name in names)
    if projection is None:
        return None
    if not isinstance(norm, FusedNorm):
        raise OtherInputs("the norm of inputs by layer is not fused")
    try:
        given = [record.only(layer).args[1] for layer in layers]
        call = record.only(embedding)
        inputs = LayerInputs(decoder, norm.norm, len(given))
        made_LNI = inputs.of(call.args[0], call.tensor())
    except (AttributeError, IndexError, RuntimeError, ValueError) as error:
        raise OtherInputs(f"inputs by layer of another form: {error}") from error
    far = distance(made_LNI, torch.stack([part.reshape(made_LNI.shape[1:]) for part in given]))
    if far > _ROUNDING:
        raise OtherInputs(f"inputs by layer are {far:.1e} away")
    return inputs


def layer_input_of(layer: nn.Module, record: Recording) -> LayerInput | None:
    """Return what a layer does with its input; None: it has none. Raises OtherInputs."""
    if not hasattr(layer, "per_layer_input_gate"):
        return None
    norm, act_fn = getattr(layer, "post_per_layer_input_norm", None), getattr(layer, "act_fn", None)
    if not isinstance(norm, FusedNorm) or not isinstance(act_fn, nn.Module):
        raise OtherInputs("a layer's input has another form")
    try:
        call = record.only(act_fn)
    except ValueError as error:
        raise OtherInputs(str(error)) from error
    gate_NI, want_NI = (part.reshape(-1, part.shape[-1]) for part in (call.args[0], call.tensor()))
    both_NJ = torch.cat([gate_NI, torch.ones_like(gate_NI)], dim=1)
    far, act = min((distance(gated(both_NJ, act), want_NI), act) for act in EVERYWHERE)
    if far > _ROUNDING:
        raise OtherInputs("a layer's input has an activation without a kernel")
    return LayerInput(layer, act, norm.norm)
