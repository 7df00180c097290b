"""A decoder's whole forward over block-quantised weights in one native call, on a CPU.

Invariant: a row depends only on its own sequence, bit for bit, whatever else is in the call; padding is not computed.
Between products everything is float32; keys and values have the pages' dtype. Not responsible for: which models have
this form (see gpu_engine/model/quantised/native.py), the layers' weights and their checks (see forward_layers.py), and
the ownership of pages (see gpu_engine/core/kv_cache.py).

Shapes: N rows, S sequences, V columns of the logits, H hidden size, D head size.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.accept import accept_arguments
from kernels.blocks import BLOCK, BlockWeightsArgs, PackedBlocks
from kernels.forward_inputs import ForwardInputs, LayerInputsArgs, check_inputs
from kernels.forward_layers import LAYER_PRODUCTS, ForwardLayer, LatentSizes, LayerArgs, Norm, check_layers
from kernels.fused_arguments import UNSCALED, StreamScales
from kernels.kv_pages import KVPages
from kernels.library import native
from kernels.low_rank import LowRankTable
from kernels.mixture import Mixture
from kernels.recurrent import RowsArgs
from kernels.recurrent_layer import LayerMemory, RecurrentLayers, RecurrentSizesArgs
from kernels.recurrent_rows import RecurrentRows
from kernels.step_tensors import StepTensors


@dataclass(frozen=True, slots=True, eq=False)
class SequenceAdapters:
    """The adapters of one call's sequences."""

    table: LowRankTable
    """The number of the forward's products."""
    numbers_S: torch.Tensor
    """int32: 0 is none."""


_POINTERS = ("norm", "embedding", "ids", "positions", "row_starts", "page_table", "logits", "tap", "scratch")
_SIZES = ("hidden", "inner", "num_heads", "page_size", "channels", "attended")
_TILE_LISTS = 2
"""Different numbers of KV heads that layers may have."""


class _ForwardArgs(ctypes.Structure):
    """Mirror of `struct forward_args`."""

    _fields_ = [
        ("layers", ctypes.POINTER(LayerArgs)),
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
        ("latents", LatentSizes),
        ("query_gates", ctypes.c_int64),
    ]


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
        assert self._dtype in (torch.bfloat16, torch.float32), self._dtype
        assert embedding_VH.is_contiguous()
        assert H % BLOCK == 0, H
        assert head.num_inputs == H, head
        check_inputs(inputs, [layer.input for layer in layers], embedding_VH)
        check_layers(layers, norm, H, num_heads)
        self._layers = (LayerArgs * len(layers))(*(LayerArgs.of(layer) for layer in layers))
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
        args.vocabulary = len(embedding_VH)
        args.recurrents = RecurrentSizesArgs(*self._recurrent.sizes, H if both else 0)
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
            args.latents, args.attended = LatentSizes.of(latent), latent.shape.heads * latent.shape.latent
            args.channels = self._attending[0][0].qkv.num_outputs

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
