"""The layers of a native forward: their weights and numbers, what the native code relies on, and its arguments.

Invariant: layers that pass `check_layers` have every shape and dtype that the native code assumes. Not responsible for:
the call (see forward.py), inputs by layer (see forward_inputs.py), mixtures (see mixture.py), recurrences (see
recurrent_layer.py).

Shapes: H hidden size, D head size, L positions of a rotary table, R rotated channels, E experts of a mixture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.blocks import BLOCK, BlockWeightsArgs, PackedBlocks
from kernels.forward_inputs import ForwardInput, LayerInputArgs
from kernels.fused_arguments import LLAMA_HEADS, Activation, HeadForm, KeyValues
from kernels.kv_pages import MAX_WIDTH, KVHeads, check_limits
from kernels.latent import LatentShape
from kernels.mixture import MOST_GROUPS, GatedBlock, Mixture, RoutedArgs, check_blocks
from kernels.recurrent_layer import Recurrence


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm: float32 [H], or of a head [D], or of all heads; and its epsilon."""

    weight: torch.Tensor
    eps: float
    centred: bool = False
    """The mean is taken off first."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentPart:
    """What latent attention has between a layer's first product and its last one. The first gives queries, the latent
    and the shared key."""

    shape: LatentShape
    norm: Norm
    """Of the latent."""
    keys: tuple[PackedBlocks, ...]
    """By head: its query's channels that do not rotate -> the latent's."""
    values: tuple[PackedBlocks, ...]
    """By head: the latent's channels -> its own."""
    query: PackedBlocks | None = None
    """Of compressed queries, which the first product gives then; None: it gives the queries."""
    query_norm: Norm | None = None
    """Of compressed queries."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardAttention:
    """The weights and numbers of one layer's attention."""

    place: int
    """The pages' index in the cache."""
    kv_heads: KVHeads
    """Query heads have the same width."""
    qkv: PackedBlocks
    output: PackedBlocks
    q_norm: Norm | None
    k_norm: Norm | None
    cos_LR: torch.Tensor
    """float32, contiguous; R may be 0, for layers without rotation. As in `rotate`."""
    sin_LR: torch.Tensor
    scale: float
    softcap: float
    """0: none."""
    window: int
    """0: none."""
    sinks_H: torch.Tensor | None = None
    """float32, contiguous: see `paged_attention`."""
    heads: HeadForm = LLAMA_HEADS
    query_gates: bool = False
    """After each query head, `qkv` gives as many channels of a gate: the head is multiplied by the sigmoid of it."""
    v_norm: Norm | None = None
    """Of each value head."""
    key_values: KeyValues = KeyValues.OWN
    query_factors_L: torch.Tensor | None = None
    """float32, contiguous: a factor of the queries at each position; None: there is none."""
    latent: LatentPart | None = None
    """Of latent attention, whose `qkv` gives queries, latent and shared key. `kv_heads` is that of its shape."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardLayer:
    """The parts of one layer: x += post(attention(pre(x))), then the same with the block.

    A recurrence takes the place of the attention, or adds what it gives for the same input. A layer may also have
    no block, or only a block, and no norm but `pre_attention` then. `is_parallel`: x += attention(pre(x)) +
    block(pre(x)), with no other norm. Then the layer's input (see forward_inputs.py), and x *= stream_scale.
    """

    attention: ForwardAttention | None
    recurrence: Recurrence | None
    block: GatedBlock | Mixture | None
    act: Activation
    """Of the block."""
    pre_attention: Norm | None
    post_attention: Norm | None
    pre_block: Norm | None
    post_block: Norm | None
    is_parallel: bool = False
    input: ForwardInput | None = None
    stream_scale: float = 1.0
    pre_mixture: Norm | None = None
    """Of a mixture whose experts have an input of their own. That of its shared expert is the block's."""
    post_mixture: Norm | None = None
    """Of what the experts of such a mixture give together."""
    post_shared: Norm | None = None
    """Of what its shared expert gives."""


LAYER_PRODUCTS = ("qkv", "output", "gate_up", "down")
"""The products of a layer in the order in which a `LowRankTable` numbers them: four a layer."""

_NORMS = ("pre_attention", "post_attention", "pre_block", "post_block", "pre_mixture", "post_mixture", "post_shared")
_HEAD_NORMS = ("q_norm", "k_norm", "v_norm")
_PAGES = ("k_pages", "v_pages", "k_scales", "v_scales")


class _LatentArgs(ctypes.Structure):
    """Mirror of `struct latent_layer`."""

    _fields_ = [
        ("query", BlockWeightsArgs),
        *[(name, ctypes.POINTER(BlockWeightsArgs)) for name in ("keys", "values")],
        *[(name, ctypes.c_void_p) for name in ("query_norm", "norm")],
        *[(name, ctypes.c_float) for name in ("query_eps", "eps")],
    ]

    @classmethod
    def of(cls, latent: LatentPart) -> _LatentArgs:
        """Return the arguments; the part outlives them."""
        by_head = BlockWeightsArgs * len(latent.keys)
        args = cls(norm=latent.norm.weight.data_ptr(), eps=latent.norm.eps)
        args.keys, args.values = (by_head(*(each.args for each in part)) for part in (latent.keys, latent.values))
        if latent.query is not None and latent.query_norm is not None:
            args.query, args.query_eps = latent.query.args, latent.query_norm.eps
            args.query_norm = latent.query_norm.weight.data_ptr()
        return args


class LatentSizes(ctypes.Structure):
    """Mirror of `struct latent_sizes`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("latent", "unrotated", "rotated", "values", "width", "rank")]

    @classmethod
    def of(cls, latent: LatentPart) -> LatentSizes:
        """Return the sizes of every layer of a model with this one."""
        shape, rank = _form(latent)
        return cls(shape.latent, shape.unrotated, shape.rotated, shape.values, shape.kv_heads.width, rank)


class LayerArgs(ctypes.Structure):
    """Mirror of `struct forward_layer`."""

    _fields_ = [
        *[(name, BlockWeightsArgs) for name in ("qkv", "output", "gate_up", "down")],
        ("mixture", RoutedArgs),
        ("input", LayerInputArgs),
        *[(name, ctypes.c_void_p) for name in (*_NORMS, *_HEAD_NORMS, "cos", "sin", "factors")],
        *[(name, ctypes.c_void_p) for name in ("sinks", *_PAGES, "tap")],
        *[(name, ctypes.c_int64) for name in ("rotated", "head_dim", "num_kv_heads")],
        *[(f"{name.removesuffix('_norm')}_eps", ctypes.c_float) for name in (*_NORMS, *_HEAD_NORMS)],
        *[(name, ctypes.c_float) for name in ("scale", "softcap", "stream_scale")],
        *[(name, ctypes.c_int32) for name in ("window", "act", "neighbours", "whole_norms", "norms_last")],
        *[(name, ctypes.c_int32) for name in ("is_parallel", "key_values", "tiles")],
        ("recurrent", ctypes.c_void_p),
        ("latent", ctypes.POINTER(_LatentArgs)),
    ]

    @classmethod
    def of(cls, layer: ForwardLayer) -> LayerArgs:
        """Return the arguments that no call changes. The layer outlives them."""
        args = cls(act=layer.act, is_parallel=layer.is_parallel, stream_scale=layer.stream_scale)
        if isinstance(layer.block, Mixture):
            args.mixture = RoutedArgs.of(layer.block)
        block = layer.block.shared if isinstance(layer.block, Mixture) else layer.block
        if block is not None:
            args.gate_up, args.down = block.gate_up.args, block.down.args
        args._use_norms(layer, _NORMS)
        if layer.attention is not None:
            args._use_attention(layer.attention)
        if layer.input is not None:
            args.input = LayerInputArgs.of(layer.input)
        return args

    def _use_norms(self, part: ForwardLayer | ForwardAttention, names: Sequence[str]) -> None:
        for name in names:
            norm = getattr(part, name)
            if norm is not None:
                setattr(self, name, norm.weight.data_ptr())
                setattr(self, f"{name.removesuffix('_norm')}_eps", norm.eps)

    def _use_attention(self, part: ForwardAttention) -> None:
        self.qkv, self.output = part.qkv.args, part.output.args
        self._use_norms(part, _HEAD_NORMS)
        self.cos, self.sin, self.rotated = part.cos_LR.data_ptr(), part.sin_LR.data_ptr(), part.cos_LR.shape[1]
        self.factors = None if part.query_factors_L is None else part.query_factors_L.data_ptr()
        self.sinks = None if part.sinks_H is None else part.sinks_H.data_ptr()
        self.scale, self.softcap, self.window = part.scale, part.softcap, part.window
        self.neighbours, self.whole_norms = part.heads.neighbours, part.heads.whole_norms
        self.norms_last, self.key_values = part.heads.norms_last, part.key_values
        self.num_kv_heads, self.head_dim = part.kv_heads[:2]
        if part.latent is not None:
            self.latent = ctypes.pointer(_LatentArgs.of(part.latent))


def _form(latent: LatentPart) -> tuple[LatentShape, int]:
    """Return what all layers have in common."""
    return latent.shape, 0 if latent.query is None else latent.query.num_inputs


def _check_attention(part: ForwardAttention, H: int, num_heads: int) -> None:
    """Assert what the native code relies on."""
    heads, head_dim = (num_heads, part.kv_heads.number), part.kv_heads.width
    channels = num_heads * head_dim
    assert channels % BLOCK == 0, channels
    assert head_dim % 16 == 0, head_dim
    assert MAX_WIDTH["cpu"] >= head_dim, head_dim
    assert num_heads % part.kv_heads.number == 0, heads
    shapes = [(product.num_inputs, product.num_outputs) for product in (part.qkv, part.output)]
    outputs = part.key_values.product_heads(heads) + (num_heads if part.query_gates else 0)
    assert shapes == [(H, outputs * head_dim), (channels, H)], shapes
    assert not (part.query_gates and part.heads.whole_norms), "a norm of all queries would have their gates"
    assert part.cos_LR.shape == part.sin_LR.shape, part.cos_LR.shape
    assert part.cos_LR.dtype == part.sin_LR.dtype == torch.float32
    assert part.cos_LR.is_contiguous()
    assert part.sin_LR.is_contiguous()
    assert part.cos_LR.shape[1] % 2 == 0, part.cos_LR.shape
    assert part.cos_LR.shape[1] <= head_dim, part.cos_LR.shape
    if (factors_L := part.query_factors_L) is not None:
        assert factors_L.shape == part.cos_LR.shape[:1], factors_L.shape
        assert factors_L.dtype == torch.float32, factors_L.dtype
        assert factors_L.is_contiguous()
    check_limits(part.window, 0, part.sinks_H, num_heads)
    wide = [number * head_dim if part.heads.whole_norms else head_dim for number in heads]
    for norm, width in zip((part.q_norm, part.k_norm, part.v_norm), (*wide, head_dim), strict=True):
        assert norm is None or (norm.weight.shape == (width,) and not norm.centred), norm
    if part.key_values is KeyValues.SHARED:
        assert part.k_norm is part.v_norm is None, "norms of keys and values that the layer has not"


def _check_latent(part: ForwardAttention, H: int, num_heads: int) -> None:
    """Assert what the native code relies on in latent attention."""
    latent = part.latent
    assert latent is not None
    shape, wide = latent.shape, latent.shape.unrotated + latent.shape.rotated
    assert num_heads == shape.heads == len(latent.keys) == len(latent.values), (shape, num_heads)
    assert part.kv_heads == shape.kv_heads, part.kv_heads
    assert MAX_WIDTH["cpu"] >= shape.kv_heads.width, shape
    assert shape.latent % 16 == shape.rotated % 2 == 0, shape
    assert max(wide, shape.values) <= shape.latent, "queries and values have the memory of latents"
    assert {(each.num_inputs, each.num_outputs) for each in latent.keys} == {(shape.unrotated, shape.latent)}
    assert {(each.num_inputs, each.num_outputs) for each in latent.values} == {(shape.latent, shape.values)}
    rank = num_heads * wide if latent.query is None else latent.query.num_inputs
    assert (part.qkv.num_inputs, part.qkv.num_outputs) == (H, rank + shape.latent + shape.rotated), part.qkv
    assert (part.output.num_inputs, part.output.num_outputs) == (num_heads * shape.values, H), part.output
    assert part.output.num_inputs % BLOCK == 0, part.output
    assert latent.norm.weight.shape == (shape.latent,), latent.norm.weight.shape
    assert (latent.query is None) == (latent.query_norm is None)
    if latent.query is not None and latent.query_norm is not None:
        assert latent.query.num_outputs == num_heads * wide, latent.query
        assert latent.query_norm.weight.shape == (rank,), latent.query_norm.weight.shape
    assert part.cos_LR.shape == part.sin_LR.shape == (len(part.cos_LR), shape.rotated), part.cos_LR.shape
    assert part.cos_LR.dtype == part.sin_LR.dtype == torch.float32
    assert part.cos_LR.is_contiguous()
    assert part.sin_LR.is_contiguous()
    assert part.q_norm is part.k_norm is part.v_norm is None
    assert part.sinks_H is None
    assert part.query_factors_L is None
    assert not part.query_gates
    for norm in (latent.norm, latent.query_norm):
        assert norm is None or (norm.weight.dtype == torch.float32 and norm.weight.is_contiguous()), norm
        assert norm is None or not norm.centred, norm
    assert (part.softcap, part.window, part.key_values) == (0.0, 0, KeyValues.OWN)


def _check_mixtures(layers: Sequence[ForwardLayer], H: int) -> None:
    mixtures = [layer.block for layer in layers if isinstance(layer.block, Mixture)]
    if mixtures:
        (act,) = {layer.act for layer in layers if isinstance(layer.block, Mixture)}
        check_blocks([expert for mixture in mixtures for expert in mixture.experts], H, act)
        check_blocks([mixture.shared for mixture in mixtures if mixture.shared is not None], H, act)
    assert len({(len(each.experts), each.choice.chosen, each.shared is None) for each in mixtures}) <= 1
    for mixture in mixtures:
        E, choice = len(mixture.experts), mixture.choice
        assert mixture.router_EH.shape == (E, H), mixture.router_EH.shape
        assert mixture.router_EH.dtype in (torch.bfloat16, torch.float32), mixture.router_EH.dtype
        assert mixture.router_EH.is_contiguous()
        vectors = (mixture.router_bias_E, choice.correction_E, choice.scales_E, mixture.shared_gate_H)
        for vector, size in zip(vectors, (E, E, E, H), strict=True):
            if vector is not None:
                assert vector.shape == (size,), vector.shape
                assert vector.dtype == torch.float32, vector.dtype
                assert vector.is_contiguous()
        assert mixture.shared is not None or mixture.shared_gate_H is None
        assert 0 < choice.chosen <= E // choice.groups * choice.kept, choice
        assert 0 < choice.kept <= choice.groups <= MOST_GROUPS, choice
        assert E % choice.groups == 0, choice
        assert not choice.by_two or E // choice.groups > 1, choice


def check_layers(layers: Sequence[ForwardLayer], norm: Norm, H: int, num_heads: int) -> None:
    """Assert what the native code relies on. `norm`: before the head."""
    for layer in layers:
        if isinstance(layer.block, GatedBlock):
            check_blocks([layer.block], H, layer.act)
    _check_mixtures(layers, H)
    attentions = [layer.attention for layer in layers if layer.attention is not None]
    forms = {None if part.latent is None else _form(part.latent) for part in attentions}
    assert len(forms) == 1, "layers have attentions of different forms"
    assert len({part.query_gates for part in attentions}) == 1, "only some queries have gates"
    for part in attentions:
        (_check_attention if part.latent is None else _check_latent)(part, H, num_heads)
    for layer in layers:
        of_stream = [each for each in (getattr(layer, name) for name in _NORMS) if each is not None]
        assert all(each.centred == norm.centred for each in of_stream), "norms of two kinds"
        assert layer.attention or layer.recurrence or layer.block, "a layer of nothing"
        if layer.recurrence is not None:
            layer.recurrence.check(H)
            assert layer.attention is None or layer.attention.latent is None, "latent attention next to a state"
        if layer.block is None or (layer.attention is None and layer.recurrence is None):
            assert of_stream == [layer.pre_attention], "a layer of one part has other norms"
            assert layer.input is None, "a layer of one part has an input of its own"
        elif layer.is_parallel:
            assert of_stream == [layer.pre_attention], "a block next to the attention has norms of its own"
            assert isinstance(layer.block, GatedBlock), layer.block
        apart = [each is not None for each in (layer.pre_mixture, layer.post_mixture, layer.post_shared)]
        if any(apart):
            assert all(apart), "a mixture with some norms of its own"
            assert isinstance(layer.block, Mixture), layer.block
            assert layer.block.shared is not None, "a norm of a shared expert that is not there"
            assert layer.block.shared_gate_H is None, "a norm of a shared expert that has a gate"
