"""Arguments of a native forward for inputs by layer (Gemma 4 E2B and E4B); see native/layer_inputs.h.

Not responsible for: the forward (see forward.py).

Shapes: V tokens of the vocabulary, H hidden size, L layers, I channels of a layer's input.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.blocks import BLOCK, BlockWeightsArgs, PackedBlocks


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInput:
    """At the end of a layer: x += norm(projection(act(gate(x)) * input))."""

    gate: PackedBlocks
    """H -> I; the activation is the layer's."""
    projection: PackedBlocks
    """I -> H."""
    norm_H: torch.Tensor
    """float32."""
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInputs:
    """The inputs of all layers: scale * (norm(projection_scale * projection(x)) + embedding_scale * embedding)."""

    projection: PackedBlocks
    """H -> L * I, of the first layer's input."""
    embedding_VX: torch.Tensor
    """[V, L * I], contiguous, in the dtype of the model's embedding."""
    norm_I: torch.Tensor
    """float32."""
    eps: float
    projection_scale: float
    embedding_scale: float
    scale: float


class LayerInputArgs(ctypes.Structure):
    """Mirror of `struct layer_input`."""

    _fields_ = [
        *[(name, BlockWeightsArgs) for name in ("gate", "projection")],
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    ]

    @classmethod
    def of(cls, made: ForwardInput) -> LayerInputArgs:
        """Return the arguments. `made` outlives them."""
        return cls(made.gate.args, made.projection.args, made.norm_H.data_ptr(), made.eps)


class LayerInputsArgs(ctypes.Structure):
    """Mirror of `struct layer_inputs`."""

    _fields_ = [
        ("projection", BlockWeightsArgs),
        *[(name, ctypes.c_void_p) for name in ("embedding", "norm")],
        ("width", ctypes.c_int64),
        *[(name, ctypes.c_float) for name in ("projection_scale", "embedding_scale", "scale", "eps")],
    ]

    @classmethod
    def of(cls, made: ForwardInputs) -> LayerInputsArgs:
        """Return the arguments. `made` outlives them."""
        pointers = (made.embedding_VX.data_ptr(), made.norm_I.data_ptr())
        scales = (made.projection_scale, made.embedding_scale, made.scale)
        return cls(made.projection.args, *pointers, len(made.norm_I), *scales, made.eps)


def check_inputs(inputs: ForwardInputs | None, layers: list[ForwardInput | None], embedding_VH: torch.Tensor) -> None:
    """Assert what the native code relies on. `layers`: what each layer does with its input."""
    if inputs is None:
        assert not any(layers), "a layer has an input that nothing makes"
        return
    (V, H), width = embedding_VH.shape, len(inputs.norm_I)
    assert width % BLOCK == 0, width
    assert inputs.projection.num_inputs == H, inputs.projection
    assert inputs.projection.num_outputs == len(layers) * width, inputs.projection
    assert inputs.embedding_VX.shape == (V, len(layers) * width), inputs.embedding_VX.shape
    assert inputs.embedding_VX.dtype == embedding_VH.dtype, inputs.embedding_VX.dtype
    assert inputs.embedding_VX.is_contiguous()
    assert inputs.norm_I.dtype == torch.float32
    for layer in layers:
        assert layer is not None, "a layer has no input"
        assert (layer.gate.num_inputs, layer.gate.num_outputs) == (H, width), layer.gate
        assert (layer.projection.num_inputs, layer.projection.num_outputs) == (width, H), layer.projection
        assert layer.norm_H.shape == (H,), layer.norm_H.shape
        assert layer.norm_H.dtype == torch.float32
