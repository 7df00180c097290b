"""A decoder's whole forward over block-quantised weights in one native call, on a CPU.

Invariant: a row depends only on its own sequence, bit for bit, whatever else is in the call; padding is not computed.
Between products everything is float32; keys and values have the pages' dtype. Not responsible for: which models have
this form (see gpu_engine/model/quantised/native.py), and the ownership of pages (see gpu_engine/core/kv_cache.py).

Shapes: N rows, S sequences, V columns of the logits, H hidden size, I inner size of the gated block, D head size,
L positions of a rotary table, R rotated channels, E experts of a mixture.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.accept import accept_arguments
from kernels.blocks import BLOCK, BlockWeightsArgs, PackedBlocks
from kernels.forward_inputs import ForwardInput, ForwardInputs, LayerInputArgs, LayerInputsArgs, check_inputs
from kernels.fused_arguments import LLAMA_HEADS, UNSCALED, Activation, HeadForm, KeyValues, StreamScales
from kernels.kv_pages import MAX_WIDTH, KVHeads, KVPages, check_limits
from kernels.latent import LatentShape
from kernels.library import native
from kernels.low_rank import LowRankTable
from kernels.mixture import MOST_GROUPS, GatedBlock, Mixture, RoutedArgs, check_blocks
from kernels.recurrent import RowsArgs
from kernels.recurrent_layer import LayerMemory, Recurrence, RecurrentLayers, RecurrentSizesArgs
from kernels.recurrent_rows import RecurrentRows
from kernels.step_tensors import StepTensors


@dataclass(frozen=True, slots=True, eq=False)
class SequenceAdapters:
    """The adapters of one call's sequences."""

    table: LowRankTable
    """The number of the forward's products."""
    numbers_S: torch.Tensor
    """int32: 0 is none."""


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


class _LatentSizes(ctypes.Structure):
    """Mirror of `struct latent_sizes`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("latent", "unrotated", "rotated", "values", "width", "rank")]


class _LayerArgs(ctypes.Structure):
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
    def of(cls, layer: ForwardLayer) -> _LayerArgs:
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


_POINTERS = ("norm", "embedding", "ids", "positions", "row_starts", "page_table", "logits", "tap", "scratch")
_SIZES = ("hidden", "inner", "num_heads", "page_size", "channels", "attended")
_TILE_LISTS = 2
"""Different numbers of KV heads that layers may have."""

LAYER_PRODUCTS = ("qkv", "output", "gate_up", "down")
"""The products of a layer in the order in which a `LowRankTable` numbers them: four a layer."""


class _ForwardArgs(ctypes.Structure):
    """Mirror of `struct forward_args`."""

    _fields_ = [
        ("layers", ctypes.POINTER(_LayerArgs)),
        ("head", BlockWeightsArgs),
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        *[(name, ctypes.c_int64) for name in ("table_stride", "logits_stride")],
        *[(name, ctypes.c_int64) for name in ("num_rows", "num_sequences", "num_layers", "num_logits", *_SIZES)],
        ("kv_heads", ctypes.c_int64 * _TILE_LISTS),
        *[(name, ctypes.c_float) for name in ("embedding_scale", "norm_eps", "logits_softcap")],
        *[(name, ctypes.c_float) for name in ("virtual_scale", "residual_scale", "logits_scale")],
        *[(name, ctypes.c_int32) for name in ("centred", "bf16", "pages", "defers_head")],
        *[(name, ctypes.c_void_p) for name in ("adapters", "sequence_adapters", "virtual_embedding")],
        *[(name, ctypes.c_int64) for name in ("adapter_rank", "vocabulary")],
        *[(name, ctypes.c_int64) for name in ("experts", "chosen", "expert_inner", "has_shared")],
        ("inputs", LayerInputsArgs),
        ("recurrents", RecurrentSizesArgs),
        ("lanes", RowsArgs),
        ("latents", _LatentSizes),
        ("query_gates", ctypes.c_int64),
    ]


def _form(latent: LatentPart) -> tuple[LatentShape, int]:
    """Return what all layers have in common."""
    return latent.shape, 0 if latent.query is None else latent.query.num_inputs


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


class Forward:
    """The forward of one model. Owns its scratch memory and its logits: not for two threads at once.

    Args:
        embedding_VH: bfloat16 or float32, the dtype of taps; the model owns it. Pages have it, or int8.
        layers: their gated blocks and heads may differ in size, their experts may not. At least one has attention.
        norm: before the head.
        head: the output product.
        num_heads: query heads.
        logits_softcap: 0: none.
        embedding_scale: multiplies the embedding of a token of the vocabulary.
        scales: of any model's input, residual additions and logits.
        inputs: those of the layers; None: they have none.
    """

    def __init__(
        self,
        embedding_VH: torch.Tensor,
        layers: Sequence[ForwardLayer],
        norm: Norm,
        head: PackedBlocks,
        num_heads: int,
        *,
        logits_softcap: float = 0.0,
        embedding_scale: float = 1.0,
        scales: StreamScales = UNSCALED,
        inputs: ForwardInputs | None = None,
    ) -> None:
        self._owned = (embedding_VH, tuple(layers), norm, head, inputs)
        self._dtype, H = embedding_VH.dtype, embedding_VH.shape[1]
        self._check(H, num_heads)
        self._layers = (_LayerArgs * len(layers))(*(_LayerArgs.of(layer) for layer in layers))
        recurrent = {at: layer.recurrence for at, layer in enumerate(layers) if layer.recurrence is not None}
        self._recurrent = RecurrentLayers(list(recurrent.values()))
        both = any(layers[at].attention is not None for at in recurrent)
        for number, at in enumerate(recurrent):
            self._layers[at].recurrent = self._recurrent.address_of(number)
        self._attending = [
            (layer.attention, args)
            for layer, args in zip(layers, self._layers, strict=True)
            if layer.attention is not None
        ]
        """The attentions, which have pages."""
        self._args = _ForwardArgs(self._layers, head.args)
        args = self._args
        args.embedding, args.embedding_scale = embedding_VH.data_ptr(), embedding_scale * scales.input
        args.virtual_scale, args.residual_scale, args.logits_scale = scales.input, scales.residual, scales.logits
        args.centred = norm.centred
        args.norm, args.norm_eps, args.logits_softcap = norm.weight.data_ptr(), norm.eps, logits_softcap
        args.num_layers, args.hidden, args.num_heads = len(layers), H, num_heads
        self._shape_heads()
        if inputs is not None:
            args.inputs = LayerInputsArgs.of(inputs)
        for block in (layer.block for layer in layers):
            if isinstance(block, Mixture):
                args.experts, args.chosen = len(block.experts), block.choice.chosen
                args.expert_inner, args.has_shared = block.experts[0].down.num_inputs, block.shared is not None
            of_all = block.shared if isinstance(block, Mixture) else block
            args.inner = max(args.inner, 0 if of_all is None else of_all.down.num_inputs)
        args.bf16 = self._dtype == torch.bfloat16
        args.vocabulary, args.recurrents = (
            len(embedding_VH),
            RecurrentSizesArgs(*self._recurrent.sizes, H if both else 0),
        )
        self._logits_NV = self._result_NV = torch.empty(0, head.num_outputs)
        """The memory of all logits so far, and the rows of the last call: one tensor while their number is the same."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._reserved = (0, 0, 0, 0, 0, 0)
        """Rows, sequences, logits, `defers_head`, lanes and their pending rows of the last call, which has its memory.
        """
        self._inputs: tuple[torch.Tensor, ...] = ()
        """The last call's, held so that a tensor that is the same object has the same address."""
        self._takes_adapters = all(
            layer.attention is None or (layer.attention.latent is None and layer.recurrence is None) for layer in layers
        )
        self._tapped = False
        """The last call had taps."""
        self._pages: list[KVPages] | None = None
        self._deferred: tuple[torch.Tensor, torch.Tensor] | None = None
        """Positions and row starts of the last call, which `masked_head` reads again; None: it has no head to fill."""
        self._adapted = False
        """The last call had adapters or virtual tokens."""

    def _shape_heads(self) -> None:
        """Note the most channels of a row in any layer, and which layers have tiles of attention in common."""
        args, numbers = self._args, list(dict.fromkeys(part.kv_heads.number for part, _ in self._attending))
        assert len(numbers) <= _TILE_LISTS, numbers
        args.kv_heads[: len(numbers)] = numbers
        args.query_gates = any(part.query_gates for part, _ in self._attending)
        for part, of_layer in self._attending:
            number, width = part.kv_heads[:2]
            of_layer.tiles = numbers.index(number)
            args.attended = max(args.attended, args.num_heads * width)
            queries = 2 * args.num_heads if args.query_gates else args.num_heads
            args.channels = max(args.channels, (queries + 2 * number) * width)
        if (latent := self._attending[0][0].latent) is not None:
            shape, compressed = latent.shape, latent.query
            rank = 0 if compressed is None else compressed.num_inputs
            parts = (shape.latent, shape.unrotated, shape.rotated, shape.values, shape.kv_heads.width, rank)
            args.latents, args.attended = _LatentSizes(*parts), shape.heads * shape.latent
            args.channels = self._attending[0][0].qkv.num_outputs

    def _check(self, H: int, num_heads: int) -> None:
        """Assert what the native code relies on."""
        embedding_VH, layers, _, head, inputs = self._owned
        check_inputs(inputs, [layer.input for layer in layers], embedding_VH)
        for layer in layers:
            if isinstance(layer.block, GatedBlock):
                check_blocks([layer.block], H, layer.act)
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
        assert embedding_VH.dtype in (torch.bfloat16, torch.float32), embedding_VH.dtype
        assert embedding_VH.is_contiguous()
        assert H % BLOCK == 0, H
        assert head.num_inputs == H, head
        gates = set[bool]()
        attentions = [layer.attention for layer in layers if layer.attention is not None]
        forms = {None if part.latent is None else _form(part.latent) for part in attentions}
        assert len(forms) == 1, "layers have attentions of different forms"
        for layer in layers:
            of_stream = [norm for norm in (getattr(layer, name) for name in _NORMS) if norm is not None]
            assert all(norm.centred == self._owned[2].centred for norm in of_stream), "norms of two kinds"
            assert layer.attention or layer.recurrence or layer.block, "a layer of nothing"
            if layer.recurrence is not None:
                layer.recurrence.check(H)
            if layer.block is None or (layer.attention is None and layer.recurrence is None):
                assert of_stream == [layer.pre_attention], "a layer of one part has other norms"
                assert layer.input is None, "a layer of one part has an input of its own"
            elif layer.is_parallel:
                assert of_stream == [layer.pre_attention], "a block next to the attention has norms of its own"
                assert isinstance(layer.block, GatedBlock), layer.block
            apart = [norm is not None for norm in (layer.pre_mixture, layer.post_mixture, layer.post_shared)]
            if any(apart):
                assert all(apart), "a mixture with some norms of its own"
                assert isinstance(layer.block, Mixture), layer.block
                assert layer.block.shared is not None, "a norm of a shared expert that is not there"
                assert layer.block.shared_gate_H is None, "a norm of a shared expert that has a gate"
            if layer.attention is not None:
                gates.add(layer.attention.query_gates)
                assert layer.attention.latent is None or layer.recurrence is None, "latent attention next to a state"
                check = _check_attention if layer.attention.latent is None else _check_latent
                check(layer.attention, H, num_heads)
        assert len(gates) == 1, "only some queries have gates"

    def __call__(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        row_starts: torch.Tensor,
        pages: list[KVPages],
        page_table_SN: torch.Tensor,
        *,
        num_logits: int,
        defers_head: bool = False,
        taps: Mapping[int, torch.Tensor] | None = None,
        adapters: SequenceAdapters | None = None,
        virtual_VH: torch.Tensor | None = None,
        memory: Sequence[LayerMemory] = (),
        rows: RecurrentRows | None = None,
    ) -> torch.Tensor:
        """Store the rows' keys and values; return the logits of the first `num_logits` rows, float32 [num_logits, V].

        The result is a view of memory that the next call overwrites; a row of padding has no defined content. With
        `num_logits` 0 and no tap after the last layer, the last layer only fills pages or states. With `defers_head`
        the logits have no content before `masked_head`, which must be the next call.

        `ids_N` int64, `positions_N` int32: negative is padding, after the other rows of its sequence. `row_starts`
        int32 [S + 1]: sequence s has rows [row_starts[s], row_starts[s + 1]). `page_table_SN` int32. `taps`: layer ->
        [N, H] in the model's dtype, which gets that layer's input; the number of layers stands for the head's input.
        `adapters`: None where no row has one. `virtual_VH`: float32, the embeddings of the ids from V on. `memory`: of
        the recurrent layers, in their order; the same object in calls with the same memory. `rows`: their lanes, by the
        numbers of the call's rows, padding included.
        """
        args, inputs = self._args, (ids_N, positions_N, row_starts, page_table_SN)
        if not self._inputs or not all(map(operator.is_, inputs, self._inputs)):
            self._use_inputs(*inputs)
        assert num_logits <= args.num_rows, (num_logits, args.num_rows)
        self._use_pages(pages)
        assert (rows is None) == (self._recurrent.sizes[0] == 0), "only recurrent layers have lanes, and they must"
        if rows is not None:
            args.lanes = self._recurrent.use(memory, rows, args.num_rows)
        args.num_logits = num_logits
        args.defers_head, self._deferred = defers_head, (positions_N, row_starts) if defers_head else None
        if adapters is not None or virtual_VH is not None or self._adapted:
            self._use_adapters(adapters, virtual_VH)
        self._reserve()
        if taps or self._tapped:
            self._use_taps(taps or {}, args.num_rows)
        native().lockstep_forward(ctypes.byref(args))
        if len(self._result_NV) != num_logits:
            self._result_NV = self._logits_NV[:num_logits]
        return self._result_NV

    def masked_head(self, step: StepTensors, *, num_rows: int) -> None:
        """Fill those logits of the last call, which had `defers_head`, that `accept` may read with the same arguments.

        The others keep what they had. Row j of entry b is b * P + j; `first_row_B` is not supported. A row of kind ALL,
        or with log-probabilities, is filled whole.
        """
        assert self._deferred is not None, "the last call had no defers_head"
        assert step.first_row_B is None
        rows = accept_arguments(step, self._result_NV, num_rows)
        native().lockstep_forward_head(ctypes.byref(self._args), ctypes.byref(rows))
        self._deferred = None

    def new_tap(self, num_rows: int) -> torch.Tensor:
        """Return memory for a tap, [num_rows, H]; rows of padding stay zero."""
        return torch.zeros(num_rows, self._args.hidden, dtype=self._dtype)

    def _use_inputs(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, row_starts: torch.Tensor, page_table_SN: torch.Tensor
    ) -> None:
        """Point the arguments at these tensors, which are not those of the last call."""
        args, N = self._args, len(ids_N)
        assert ids_N.dtype == torch.int64, ids_N.dtype
        assert positions_N.dtype == row_starts.dtype == page_table_SN.dtype == torch.int32
        assert ids_N.is_contiguous()
        assert positions_N.is_contiguous()
        assert row_starts.is_contiguous()
        assert page_table_SN.stride(1) == 1
        assert len(positions_N) == N, (N, len(positions_N))
        assert len(row_starts) <= len(page_table_SN) + 1
        args.num_rows, args.num_sequences = N, len(row_starts) - 1
        args.ids, args.positions, args.row_starts = ids_N.data_ptr(), positions_N.data_ptr(), row_starts.data_ptr()
        args.page_table, args.table_stride = page_table_SN.data_ptr(), page_table_SN.stride(0)
        self._inputs = ids_N, positions_N, row_starts, page_table_SN

    def _use_pages(self, pages: list[KVPages]) -> None:
        """Point the layers at the pages, unless they are those of the last call."""
        if pages is self._pages:
            return
        places, T = {part.place for part, _ in self._attending}, pages[0].v.shape[2]
        assert places == set(range(len(pages))), (places, len(pages))
        for part, args in self._attending:
            page, (Hkv, D) = pages[part.place], part.kv_heads[:2]
            assert not page.token_major, "the pages have the layout of a GPU"
            assert page.k.dtype == page.v.dtype in (self._dtype, torch.int8), (page.k.dtype, self._dtype)
            assert page.joined == (part.latent is not None)
            assert page.joined or page.k.shape == (len(page.v), Hkv, D, T), page.k.shape
            assert page.v.shape[1:] == (Hkv, T, D), page.v.shape
            args.k_pages, args.v_pages = page.k.data_ptr(), page.v.data_ptr()
            args.k_scales, args.v_scales = page.scales
        self._args.page_size, self._args.pages, self._pages = T, pages[0].kind, pages

    def _use_adapters(self, adapters: SequenceAdapters | None, virtual_VH: torch.Tensor | None) -> None:
        args, self._adapted = self._args, adapters is not None or virtual_VH is not None
        args.virtual_embedding = None if virtual_VH is None else virtual_VH.data_ptr()
        if adapters is None:
            args.adapters = None
            return
        assert adapters.table.num_products == len(LAYER_PRODUCTS) * len(self._layers), adapters.table
        assert self._takes_adapters, "adapters of latent attention, or of attention next to a state"
        assert adapters.numbers_S.dtype == torch.int32
        assert adapters.numbers_S.is_contiguous()
        assert len(adapters.numbers_S) == args.num_sequences, (len(adapters.numbers_S), args.num_sequences)
        args.adapters, args.adapter_rank = adapters.table.address, adapters.table.max_rank
        args.sequence_adapters = adapters.numbers_S.data_ptr()

    def _reserve(self) -> None:
        """Have memory for the call. It only grows."""
        args, library = self._args, native()
        lanes = (args.lanes.lanes, args.lanes.max_pending)
        shape = (args.num_rows, args.num_sequences, args.num_logits, args.defers_head, *lanes)
        if shape == self._reserved and not args.adapters:
            return
        library.lockstep_forward_scratch.restype = ctypes.c_int64
        size = library.lockstep_forward_scratch(ctypes.byref(args)) + 64
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
            args.scratch = (self._scratch.data_ptr() + 63) // 64 * 64
        if len(self._logits_NV) < args.num_logits:
            self._logits_NV = torch.empty(args.num_logits, self._logits_NV.shape[1])
            self._result_NV = self._logits_NV[:0]
        args.logits, args.logits_stride = self._logits_NV.data_ptr(), self._logits_NV.shape[1]
        self._reserved = shape

    def _use_taps(self, taps: Mapping[int, torch.Tensor], num_rows: int) -> None:
        for tap in taps.values():
            assert tap.shape == (num_rows, self._args.hidden), tap.shape
            assert tap.dtype == self._dtype, tap.dtype
            assert tap.is_contiguous()
        for at, args in enumerate(self._layers):
            args.tap = taps[at].data_ptr() if at in taps else None
        last, self._tapped = taps.get(len(self._layers)), bool(taps)
        self._args.tap = None if last is None else last.data_ptr()

    def __repr__(self) -> str:
        return f"<Forward of {len(self._layers)} layers, hidden {self._args.hidden}>"
