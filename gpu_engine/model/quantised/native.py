"""A fused forward over block-quantised weights as one native call.

Invariant: the native forward runs only after its logits were compared with those of the loop that it replaces. Not
responsible for: the loop (see fused_forward.py), the arithmetic (see kernels/forward.py).

Shapes: B sequences, P positions of each, V columns of the logits.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.fused_forward import FusedForward, Layer, RotaryCall, WholeForward
from gpu_engine.model.fused_layers import (
    ChosenExperts,
    ExpertsApart,
    FusedAttention,
    FusedGated,
    MixedBlock,
    Rotation,
    RowAttention,
)
from gpu_engine.model.fusion import Fused
from gpu_engine.model.latent import LatentAttention
from gpu_engine.model.layer_inputs import LayerInputs
from gpu_engine.model.quantised.linear import BlockLinear
from gpu_engine.model.recording import Distance, distance
from gpu_engine.model.recurrent.mixer import RecurrentMixer
from gpu_engine.model.recurrent.rows import LayerStates, RecurrentPools
from gpu_engine.model.rotary import RotaryTable
from kernels.blocks import PackedBlocks
from kernels.forward import Forward
from kernels.forward_inputs import ForwardInput, ForwardInputs
from kernels.forward_layers import ForwardAttention, ForwardLayer, LatentPart, Norm
from kernels.fused_arguments import Activation, HeadForm, NormKind, RMSNorm
from kernels.kv_pages import KVHeads
from kernels.mixture import GatedBlock, Mixture
from kernels.recurrent_layer import Recurrence
from kernels.step_tensors import StepTensors

log = logging.getLogger(__name__)


class NotNative(Exception):
    """The forward has a part that the native one lacks; the message names it."""


class NativeForward:
    """Has the methods of `FusedForward`. Logits are float32, and the next call overwrites them.

    Args:
        forward: the native part.
        parts: the modules that it stands for, in the order in which adapters number their products.
        recurrent: the numbers of the recurrent layers in the memory of states, in the order of the layers.
    """

    def __init__(self, forward: Forward, parts: Sequence[nn.Module], recurrent: Sequence[int] = ()) -> None:
        self.parts, self._forward, self._recurrent = parts, forward, recurrent
        self._pools: RecurrentPools | None = None
        self._memory: list[LayerStates] = []
        """The layers' parts of `_pools`."""
        self._starts: dict[tuple[int, int], torch.Tensor] = {}
        """By (B, P)."""
        self._nothing = nothing = torch.zeros(0)
        self._given = (nothing, nothing)
        """Tokens and positions of the last call: most steps of an engine have the same two tensors."""
        self._rows = (nothing, nothing, nothing)
        """The same as rows, and where each sequence's begin."""

    @property
    def skips_padding(self) -> bool:
        """True."""
        return True

    @property
    def takes_prompts(self) -> bool:
        """True without recurrent layers, whose states rows of prompts lack."""
        return not self._recurrent

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """Return [B * P, V]; rows of padding have no defined content."""
        return self._run(ids_BP, ctx, ids_BP.numel())

    def masked_head(self, step: StepTensors, num_rows: int) -> None:
        """See `DeferringForward.masked_head`."""
        self._forward.masked_head(step, num_rows=num_rows)

    def fill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        """Write keys and values, and what `ctx.hidden` wants."""
        self._run(ids_BP, ctx, 0)

    def _rows_of(
        self, ids_BP: torch.Tensor, positions_BP: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        B, P = ids_BP.shape
        if (B, P) not in self._starts:
            self._starts[B, P] = torch.arange(0, B * P + 1, max(P, 1), dtype=torch.int32)
        return ids_BP.reshape(-1).contiguous(), positions_BP.reshape(-1).contiguous(), self._starts[B, P]

    def _run(self, ids_BP: torch.Tensor, ctx: AttentionContext, num_logits: int) -> torch.Tensor:
        if self._given[0] is not ids_BP or self._given[1] is not ctx.positions_BP:
            self._rows = self._rows_of(ids_BP, ctx.positions_BP)
            # Rows of tensors that are not contiguous are copies, which the next call must make anew.
            views = ids_BP.is_contiguous() and ctx.positions_BP.is_contiguous()
            self._given = (ids_BP, ctx.positions_BP) if views else (self._nothing, self._nothing)
        (ids_N, positions_N, starts), table_SN = self._rows, ctx.page_table_BN
        if (prompts := ctx.prompts) is not None:
            assert self.takes_prompts, "rows of prompts are not in the order of the lanes"
            ids_N, positions_N = torch.cat([ids_N, prompts.ids_N]), torch.cat([positions_N, prompts.positions_N])
            ends = itertools.accumulate(prompts.counts, initial=ids_BP.numel())
            starts = torch.cat([starts[:-1], torch.tensor(list(ends), dtype=torch.int32)])
            table_SN = torch.cat([table_SN, prompts.page_table_CN])
        recurrent = ctx.recurrent if self._recurrent else None
        if recurrent is not None and recurrent.pools is not self._pools:
            self._pools, self._memory = recurrent.pools, [recurrent.pools.layers[at] for at in self._recurrent]
        taps = {layer: self._forward.new_tap(len(ids_N)) for layer in ctx.hidden or {}}
        logits_NV = self._forward(
            ids_N,
            positions_N,
            starts,
            ctx.pages,
            table_SN,
            num_logits=num_logits,
            defers_head=ctx.defers_head,
            taps=taps,
            adapters=ctx.adapters,
            virtual_VH=ctx.virtual_VH,
            memory=self._memory,
            rows=None if recurrent is None else recurrent.rows,
        )
        if ctx.hidden is not None:
            ctx.hidden.update(taps)
        return logits_NV

    def __repr__(self) -> str:
        return f"<NativeForward: {self._forward}>"


_BLOCKS = 0.1
"""Largest relative distance of the logits: the loop quantises activations that it has rounded to the model's dtype
first, so other integers come out of it."""
_MIXED = 0.2
"""The same with mixtures of experts, where a router with two nearly equal outputs may choose the other one."""
_MOST = 0.5
"""The same of models whose own logits move as far with the order of a sum: deep ones with random weights do."""


def with_native(
    fused: Fused,
    want_NV: torch.Tensor,
    run: Callable[[WholeForward | None], torch.Tensor],
    compare: Distance = distance,
    moves: Callable[[], float] = lambda: 0.0,
    goes_on: Callable[[WholeForward], bool] = lambda forward: True,
) -> Fused:
    """Return `fused` with its loop as one native call, where that gives the same logits; the log says why not.

    `run` computes logits [N, V] of the probe's tokens, `want_NV` are those of the loop's products. `moves` returns the
    distance of two forwards of the model that are both right. `goes_on`: whether a forward has the same bits in several
    calls as in one.
    """
    assert isinstance(fused.forward, FusedForward)
    try:
        native = native_forward_of(fused.forward)
        far = compare(run(native), want_NV)
        if far > (_MIXED if fused.mixtures else _BLOCKS) and far > min(2 * moves(), _MOST):
            raise NotNative(f"its logits are {far:.1e} away")
        if not goes_on(native):
            raise NotNative("it has other logits when a sequence goes on in a second call")
    except (NotNative, AssertionError) as why:
        log.info("not native: %s", why)
        return fused
    return replace(fused, forward=native)


def native_forward_of(fused: FusedForward) -> NativeForward:
    """Return the same forward as one native call. Does not check its numbers.

    Raises NotNative.
    """
    if not isinstance(fused.embedding, nn.Embedding):
        raise NotNative(f"its embedding is a {type(fused.embedding).__name__}")
    head = _packed(fused.head, "head")
    embedding_VH = fused.embedding.weight.detach()
    scale = _embedding_scale(fused.embedding)
    attentions = [layer.attention for layer in fused.layers if layer.attention is not None]
    if len({isinstance(attention, LatentAttention) for attention in attentions}) > 1:
        raise NotNative("only some of its layers have latent attention")
    meant = {(layer.angles, _rotation_of(layer.attention)) for layer in fused.layers if layer.attention is not None}
    tables = {
        (at, rotation): _NO_ANGLES if at is None else _table_of(fused.rotary[at], embedding_VH, rotation)
        for at, rotation in meant
    }
    layers = [_layer_of(layer, tables) for layer in fused.layers]
    heads = {attention.shape.num_heads for attention in attentions}
    if len(heads) != 1:
        raise NotNative(f"its layers have different numbers of query heads: {sorted(heads)}")
    forward = Forward(
        embedding_VH,
        layers,
        _norm(fused.norm),
        head,
        heads.pop(),
        logits_softcap=fused.logits_softcap,
        embedding_scale=scale,
        scales=fused.scales,
        inputs=None if fused.inputs is None else _inputs_of(fused.inputs),
    )
    recurrent = [layer.recurrent.layer_idx for layer in fused.layers if layer.recurrent is not None]
    return NativeForward(forward, [part for layer in fused.layers for part in layer.parts], recurrent)


_NO_ANGLES = (torch.zeros(1, 0), torch.zeros(1, 0))


def _embedding_scale(embedding: nn.Embedding) -> float:
    """Return Gemma's; another kind of embedding that does more gives other logits, and is not used."""
    return float(torch.as_tensor(getattr(embedding, "embed_scale", 1.0)).to(embedding.weight.dtype))


def _inputs_of(inputs: LayerInputs) -> ForwardInputs:
    if not isinstance(inputs.embedding, nn.Embedding):
        raise NotNative(f"its embedding by layer is a {type(inputs.embedding).__name__}")
    norm = _norm(inputs.norm)
    return ForwardInputs(
        _packed(inputs.projection, "product of inputs by layer"),
        inputs.embedding.weight.detach(),
        norm.weight,
        norm.eps,
        inputs.projection_scale,
        _embedding_scale(inputs.embedding),
        inputs.scale,
    )


def _input_of(layer: Layer, act: Activation) -> ForwardInput | None:
    if layer.input is None:
        return None
    if layer.input.act is not act:
        raise NotNative("the input of a layer has another activation than its block")
    gate, projection = (_packed(product, f"{name} of a layer's input") for name, product in layer.input.products())
    norm = _norm(layer.input.norm)
    return ForwardInput(gate, projection, norm.weight, norm.eps)


def _packed(module: nn.Module, name: str) -> PackedBlocks:
    if not isinstance(module, BlockLinear):
        raise NotNative(f"its {name} is no product over blocks")
    return module.packed


def _table_of(call: RotaryCall, weight_VH: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines as the native forward takes them: of no channels where nothing is rotated."""
    if not isinstance(call.module, RotaryTable):
        raise NotNative("its rotary embedding is no table")
    cos_LR, sin_LR = call.module.table(weight_VH[:1, None], call.rest, call.kwargs)
    if rotation is Rotation.NONE:
        cos_LR, sin_LR = cos_LR[:, :0], sin_LR[:, :0]
    cos_LR, sin_LR = rotation.angles(cos_LR, sin_LR)
    return cos_LR.float().contiguous(), sin_LR.float().contiguous()


def _norm(norm: RMSNorm) -> Norm:
    weight = norm.weight_H.float()
    weight = weight + 1.0 if norm.kind is NormKind.ONE_PLUS_SCALE else weight.clone()
    return Norm(weight, norm.eps, norm.kind is NormKind.CENTRED)


def _norm_or_none(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else _norm(norm)


_Tables = dict[tuple[int | None, Rotation], tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines by the call of a rotary embedding, and by what its angles mean."""


def _layer_of(layer: Layer, tables: _Tables) -> ForwardLayer:
    block, act = (None, Activation.SILU) if layer.gated is None else _block_of(layer.gated)
    attention = None
    if layer.attention is not None:
        attention = _attention_of(layer.attention, tables[layer.angles, _rotation_of(layer.attention)])
    return ForwardLayer(
        attention=attention,
        recurrence=None if layer.recurrent is None else _recurrence_of(layer.recurrent),
        block=block,
        act=act,
        pre_attention=_norm_or_none(layer.pre_attention),
        post_attention=_norm_or_none(layer.post_attention),
        pre_block=_norm_or_none(layer.pre_block),
        post_block=_norm_or_none(layer.post_block),
        is_parallel=layer.is_parallel,
        input=_input_of(layer, act),
        stream_scale=layer.scale,
        **_norms_apart(layer.gated),
    )


def _norms_apart(block: nn.Module | None) -> dict[str, Norm]:
    if not isinstance(block, ExpertsApart):
        return {}
    return {"pre_mixture": _norm(block.pre), "post_mixture": _norm(block.post), "post_shared": _norm(block.post_block)}


def _rotation_of(attention: RowAttention) -> Rotation:
    """Return what the angles of a layer mean; latent attention takes them as they are."""
    return attention.rotation if isinstance(attention, FusedAttention) else Rotation.HALVES


def _attention_of(attention: RowAttention, table: tuple[torch.Tensor, torch.Tensor]) -> ForwardAttention:
    if isinstance(attention, LatentAttention):
        return _latent_of(attention, table)
    if not isinstance(attention, FusedAttention):
        raise NotNative(f"its layers have a {type(attention).__name__}")
    shape, (cos_LR, sin_LR) = attention.shape, table
    return ForwardAttention(
        place=attention.layer_idx,
        kv_heads=KVHeads(shape.num_kv_heads, shape.head_dim),
        qkv=_packed(attention.qkv, "q, k, v product"),
        output=_packed(attention.output, "output product"),
        q_norm=_norm_or_none(attention.q_norm),
        k_norm=_norm_or_none(attention.k_norm),
        cos_LR=cos_LR,
        sin_LR=sin_LR,
        scale=shape.scale,
        softcap=shape.softcap,
        window=shape.window,
        sinks_H=attention.sinks_H,
        heads=attention.heads,
        query_gates=attention.query_gates,
        v_norm=_norm_or_none(attention.v_norm),
        key_values=attention.key_values,
        query_factors_L=attention.query_factors_L,
    )


def _latent_of(attention: LatentAttention, table: tuple[torch.Tensor, torch.Tensor]) -> ForwardAttention:
    core, (cos_LR, sin_LR) = attention.core, table
    if 2 * cos_LR.shape[1] == core.shape.rotated:  # one for each pair
        cos_LR, sin_LR = torch.cat([cos_LR, cos_LR], dim=1), torch.cat([sin_LR, sin_LR], dim=1)
    by_head = [part.weights for part in (core.keys, core.values)]
    if any(isinstance(weights, torch.Tensor) for weights in by_head):
        raise NotNative("its products by head are not over blocks")
    keys, values = (tuple(weights) for weights in by_head)
    query = None if attention.query is None else _packed(attention.query, "product of compressed queries")
    return ForwardAttention(
        place=attention.layer_idx,
        kv_heads=core.shape.kv_heads,
        qkv=_packed(attention.first, "product of queries and latents"),
        output=_packed(attention.output, "output product"),
        q_norm=None,
        k_norm=None,
        cos_LR=cos_LR,
        sin_LR=sin_LR,
        scale=core.scale,
        softcap=0.0,
        window=0,
        heads=HeadForm(neighbours=core.neighbours),
        latent=LatentPart(core.shape, _norm(core.norm), keys, values, query, _norm_or_none(attention.query_norm)),
    )


def _recurrence_of(mixer: RecurrentMixer) -> Recurrence:
    native = mixer.native()
    if native is None:
        raise NotNative(f"its layers have a {type(mixer).__name__}")
    first, inner, output = native
    return Recurrence(_packed(first, "product before the state"), inner, _packed(output, "product after the state"))


def _block_of(block: FusedGated | MixedBlock) -> tuple[GatedBlock | Mixture, Activation]:
    if isinstance(block, FusedGated):
        return GatedBlock(_packed(block.gate_up, "gate product"), _packed(block.down, "down product")), block.act
    experts = block.experts if isinstance(block, ChosenExperts) else None
    if not isinstance(block, ChosenExperts) or experts is None:
        raise NotNative("its mixtures of experts have another form")
    shared = block.shared
    if block.has_shared and (shared is None or shared.act is not block.act):
        raise NotNative("the shared expert of its mixtures has another form")
    made = [
        GatedBlock(_packed(gate_up, "experts' gate product"), _packed(down, "experts' down product"))
        for gate_up, down in zip(experts.gate_up, experts.down, strict=True)
    ]
    router_EH = block.router_EH.contiguous()
    of_all = None if shared is None else _block_of(shared)[0]
    assert not isinstance(of_all, Mixture)
    router = (router_EH, block.choice, block.router_bias_E)
    return Mixture(tuple(made), *router, of_all, block.shared_gate_H), block.act
