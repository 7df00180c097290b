"""A decoder's forward as one loop over fused layers, without a call of transformers' modules.

A residual addition and the norm after it are one kernel, so a layer returns (x, delta): the residual stream, and the
output that the next norm adds to it. Invariant: a fused forward runs only after its logits were compared with those of
the model itself (see fusion.py). Not responsible for: the computation of a layer's parts (see fused_layers.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from gpu_engine.model.attention import AttentionContext, PromptRows
from gpu_engine.model.fused_layers import (
    ChosenExperts,
    ExpertsAndBlock,
    ExpertsApart,
    FusedGated,
    FusedNorm,
    MixedBlock,
    RowAttention,
    angles_by_row,
    no_angles,
)
from gpu_engine.model.layer_inputs import LayerInput, LayerInputs, OtherInputs, layer_input_of, layer_inputs_of
from gpu_engine.model.linear import PackedLinear, has_weights
from gpu_engine.model.quantised.linear import BlockLinear
from gpu_engine.model.recording import Recording
from gpu_engine.model.recurrent.mixer import RecurrentMixer
from kernels.fused import RMSNorm, add_rms_norm, angles_at, rms_norm
from kernels.fused_arguments import KeyValues, StreamScales
from kernels.step_tensors import StepTensors


class NotALoop(Exception):
    """The model's forward is not a plain loop over fused layers; the message says why."""


class WholeForward(Protocol):
    """A forward without transformers' modules."""

    @property
    def skips_padding(self) -> bool:
        """True: rows of padding take no time."""

    @property
    def takes_prompts(self) -> bool:
        """True: `ctx.prompts` may have further rows, and a row has the same bits with and without them."""

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """Return [B * P, V], until the next call. Rows of padding have no defined content."""

    def fill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        """Write keys and values, and the states that `ctx.hidden` wants."""


@runtime_checkable
class DeferringForward(WholeForward, Protocol):
    """A whole forward whose `logits` may leave its last product to `masked_head`."""

    def masked_head(self, step: StepTensors, num_rows: int) -> None:
        """Fill those of the last logits that `accept` may read with these arguments. `ctx.defers_head` was set."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """x += post(attention(pre(x))), then the same with the block; any of the norms may be missing.

    A recurrent layer's module takes the place of the attention, or adds what it gives for the same input. A layer may
    also have no block, or only a block. `is_parallel`: x += attention(pre(x)) + block(pre(x)). Then the layer's input,
    and x *= scale.
    """

    attention: RowAttention | None
    recurrent: RecurrentMixer | None
    gated: FusedGated | MixedBlock | None
    angles: int | None
    """Index into `FusedForward.rotary`: the call whose angles this layer uses. None: nothing is rotated."""
    is_parallel: bool
    input: LayerInput | None
    scale: float
    pre_attention: RMSNorm | None
    post_attention: RMSNorm | None
    pre_block: RMSNorm | None
    post_block: RMSNorm | None

    @property
    def parts(self) -> list[RowAttention | RecurrentMixer | FusedGated | MixedBlock]:
        """The parts that the layer has; with attention next to a recurrence, attention comes first."""
        return [part for part in (self.attention, self.recurrent, self.gated) if part is not None]

    @property
    def stores(self) -> bool:
        """Whether the layer stores keys and values, or a state."""
        return self.recurrent is not None or (
            self.attention is not None and self.attention.key_values is not KeyValues.SHARED
        )


@runtime_checkable
class AngleTables(Protocol):
    """A rotary embedding whose cosines and sines are tables; rotary.py has it."""

    def table(
        self, x: torch.Tensor, rest: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of every position, [L, R] each, for these further arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class RotaryCall:
    """One call of a rotary embedding, without (x, positions), which differ in every forward."""

    module: nn.Module
    rest: tuple[Any, ...]
    kwargs: dict[str, Any]

    def angles(self, x_BPH: torch.Tensor, positions_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [N, R] at int32 positions; padding is negative."""
        if isinstance(self.module, AngleTables):
            return angles_at(positions_BP, *self.module.table(x_BPH, self.rest, self.kwargs))
        places_BP = positions_BP.clamp(min=0).long()
        cos, sin = self.module(x_BPH, places_BP, *self.rest, **self.kwargs)
        return angles_by_row(cos, len(x_BPH)), angles_by_row(sin, len(x_BPH))


@dataclass(frozen=True, slots=True, eq=False)
class FusedForward:
    """The whole forward."""

    embedding: nn.Module
    rotary: tuple[RotaryCall, ...]
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: nn.Module
    logits_softcap: float
    """0: none."""
    scales: StreamScales
    pairs: bool
    """A single row is computed as two equal rows: otherwise each packed product would double it again (see
    linear.py)."""
    takes_prompts: bool
    """The products are packed for a CPU, so that a row has the same bits in any company, and no layer is recurrent."""
    inputs: LayerInputs | None = None

    @property
    def skips_padding(self) -> bool:
        """False: padding is computed like any row."""
        return False

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """Return [B * P, V]."""
        return self._head(self._last(ids_BP, ctx))[: ids_BP.numel()]

    def logits_of(self, ids_BP: torch.Tensor, ctx: AttentionContext, rows_N: torch.Tensor) -> torch.Tensor:
        """Return [N, V], of some of the B * P rows."""
        return self._head(self._last(ids_BP, ctx)[rows_N])

    def _head(self, last_NH: torch.Tensor) -> torch.Tensor:
        logits_NV: torch.Tensor = self.head(last_NH)
        if self.scales.logits != 1.0:
            logits_NV = logits_NV * self.scales.logits
        if self.logits_softcap:
            logits_NV = torch.tanh(logits_NV / self.logits_softcap) * self.logits_softcap
        return logits_NV

    def fill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        """Write keys, values and states; stop after the last layer that stores some, or whose input is wanted."""
        if ctx.hidden is not None and len(self.layers) in ctx.hidden:
            self._last(ids_BP, ctx)
        else:
            self._through(ids_BP, ctx, only_fill=True)

    def _last(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """Return the normed final hidden state, [B * P, H]; store it in `ctx.hidden` if it is wanted."""
        x, delta = self._through(ids_BP, ctx)
        if ctx.prompts is not None:
            B_P = ids_BP.numel()
            x, delta = x[:B_P], None if delta is None else delta[:B_P]
        last_NH = self._normed(x, delta, self.norm)
        if ctx.hidden is not None and len(self.layers) in ctx.hidden:
            ctx.hidden[len(self.layers)] = last_NH[: ids_BP.numel()]
        return last_NH

    def _through(
        self, ids_BP: torch.Tensor, ctx: AttentionContext, *, only_fill: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert ctx.prompts is None or self.takes_prompts, "this forward has no rows of prompts"
        ids, positions = (ids_BP, ctx.positions_BP) if ctx.prompts is None else _with_prompts(ids_BP, ctx, ctx.prompts)
        x_BPH: torch.Tensor = self.embedding(ids)
        if self.scales.input != 1.0:
            x_BPH = x_BPH * self.scales.input
        inputs_LNI = None if self.inputs is None else self.inputs.of(ids, x_BPH)
        rotated = [call.angles(x_BPH, positions) for call in self.rotary]
        unrotated = no_angles(x_BPH, ids.numel())
        x, delta = x_BPH.view(-1, x_BPH.shape[-1]), None
        if self.pairs and len(x) == 1:
            x = torch.cat([x, x])
            inputs_LNI = None if inputs_LNI is None else inputs_LNI.expand(-1, 2, -1)
        end = self._last_filled(ctx) if only_fill else len(self.layers)
        for at, layer in enumerate(self.layers):
            h = self._normed(x, delta, layer.pre_attention)
            if ctx.hidden is not None and at in ctx.hidden:
                ctx.hidden[at] = x[: ids_BP.numel()].clone()
            delta = None if layer.recurrent is None else layer.recurrent.of_rows(h, ctx.recurrent)
            if layer.attention is not None:
                angles = unrotated if layer.angles is None else rotated[layer.angles]
                attended = layer.attention.attend(h, *angles, ctx)
                delta = attended if delta is None else delta + attended
            if at == end:
                break
            if delta is not None and layer.post_attention is not None:
                delta = rms_norm(delta, layer.post_attention)
            if layer.gated is not None:
                between = self._normed(x, delta, layer.pre_block)
                if isinstance(layer.gated, ExpertsApart):
                    delta = layer.gated.of_both(between, x)
                else:
                    delta = layer.gated.of_rows(h if layer.is_parallel else between)
                if layer.post_block is not None:
                    delta = rms_norm(delta, layer.post_block)
            if layer.input is not None and inputs_LNI is not None:
                x = self._normed(x, delta, None)
                delta = layer.input.of_rows(x, inputs_LNI[at])
            if layer.scale != 1.0:
                x, delta = self._normed(x, delta, None).mul_(layer.scale), None
        return x, delta

    def _last_filled(self, ctx: AttentionContext) -> int:
        """Return the last layer that stores keys and values or a state, or whose input is wanted."""
        wanted = [at for at in ctx.hidden or {} if at < len(self.layers)]
        return max(*wanted, *(at for at, layer in enumerate(self.layers) if layer.stores), 0)

    def _normed(self, x_NH: torch.Tensor, delta_NH: torch.Tensor | None, norm: RMSNorm | None) -> torch.Tensor:
        """Add the pending output to the residual stream, in place, and return the norm of the sum."""
        if delta_NH is None:
            return x_NH if norm is None else rms_norm(x_NH, norm)
        if self.scales.residual != 1.0:
            delta_NH = delta_NH * self.scales.residual
        return x_NH.add_(delta_NH) if norm is None else add_rms_norm(x_NH, delta_NH, norm)

    def __repr__(self) -> str:
        return f"<FusedForward of {len(self.layers)} layers>"


_ROWS = 16
"""A forward with prompts has a multiple of this number of rows: oneDNN keeps a plan for each number, for as long as the
process runs. One costs a millisecond and half a megabyte for each product."""


def _with_prompts(
    ids_BP: torch.Tensor, ctx: AttentionContext, prompts: PromptRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and positions [1, N] of the batch, of the prompts after it, and of some padding."""
    padding = -(ids_BP.numel() + len(prompts.ids_N)) % _ROWS
    ids_N = torch.cat([ids_BP.reshape(-1), prompts.ids_N, prompts.ids_N.new_zeros(padding)])
    positions_N = [ctx.positions_BP.reshape(-1), prompts.positions_N, prompts.positions_N.new_full((padding,), -1)]
    return ids_N[None], torch.cat(positions_N)[None]


_NORMS: tuple[tuple[str | None, str | None, str | None, str | None], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("operator_norm", None, "ffn_norm", None),
    ("input_layernorm", None, "pre_ff_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", None, None, None),
    ("norm", None, None, None),
)
"""The names of a layer's norms, before and after the attention, before and after the block: those of Llama, LFM 2,
Bamba, Gemma 2, GLM 4, OLMo 2, and Cohere, whose block is next to the attention, and of Nemotron-H, whose layers have
one part each."""


_NORMS_APART = {
    "pre_feedforward_layernorm_2": "pre",
    "post_feedforward_layernorm_2": "post",
    "post_feedforward_layernorm_1": "post_block",
}
"""The names of the norms around experts next to a block, as in Gemma 4, by what `ExpertsApart` calls them."""


def fused_forward_of(net: Any, record: Recording, mixtures: Mapping[nn.Module, MixedBlock]) -> FusedForward:
    """Return the loop of a model with fused parts. Does not check its numbers. `mixtures`: by the module of the model.

    Raises NotALoop.
    """
    decoder = net.get_decoder()
    embedding, head = net.get_input_embeddings(), net.get_output_embeddings()
    stacks = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    try:
        inputs = layer_inputs_of(decoder, embedding, itertools.chain(*stacks), record)
    except OtherInputs as why:
        raise NotALoop(str(why)) from why
    of_inputs = set() if inputs is None else {inputs.embedding, inputs.projection}
    norms = [child for child in decoder.children() if isinstance(child, FusedNorm)]
    norms = [norm for norm in norms if inputs is None or norm.norm is not inputs.norm]
    if len(stacks) != 1 or len(norms) != 1:
        raise NotALoop(f"{len(stacks)} stacks of layers and {len(norms)} norms")
    known = {embedding, head, stacks[0], norms[0], *of_inputs}
    if strangers := [name for name, child in decoder.named_children() if child not in known and has_weights(child)]:
        raise NotALoop(f"the decoder has more: {strangers}")
    rotary: list[RotaryCall] = []
    layers = tuple(_layer_of(layer, record, rotary, decoder, mixtures) for layer in stacks[0])
    softcap = getattr(net.config.get_text_config(), "final_logit_softcapping", None) or 0.0
    pairs, scales = isinstance(head, PackedLinear) and head.pairs, _scales_of(net.config.get_text_config())
    packed = _packed([head] if inputs is None else [head, inputs.projection], layers)
    return FusedForward(embedding, tuple(rotary), layers, norms[0].norm, head, softcap, scales, pairs, packed, inputs)


def _scales_of(config: Any) -> StreamScales:
    """Return the scales that a configuration names as Granite's, Cohere's, Falcon-H1's or MiniCPM's does."""
    names = ("embedding_multiplier", "residual_multiplier", "logit_scale", "lm_head_multiplier", "logits_scaling")
    embedding, residual, *multiplied, divided = (float(getattr(config, name, None) or 1.0) for name in names)
    if depth := getattr(config, "scale_depth", None):
        residual = float(depth) / math.sqrt(config.num_hidden_layers)
    return StreamScales(embedding, residual, math.prod(multiplied) / divided)


def _packed(products: list[nn.Module], layers: tuple[Layer, ...]) -> bool:
    """Return whether every product is packed for a CPU, these and the layers', and no layer has a state, which rows of
    prompts lack."""
    for layer in layers:
        if layer.recurrent is not None:
            return False
        for part in (layer.attention, layer.gated, layer.input):
            products += [] if part is None else [product for _, product in part.products()]
    return all(isinstance(product, PackedLinear | BlockLinear) for product in products)


def _layer_of(
    layer: nn.Module,
    record: Recording,
    rotary: list[RotaryCall],
    decoder: nn.Module,
    mixtures: Mapping[nn.Module, MixedBlock],
) -> Layer:
    children = {name: mixtures.get(child, child) for name, child in layer.named_children()}
    if (of_layer := mixtures.get(layer)) is not None:
        del children["router"], children["experts"]
    try:
        layer_input = layer_input_of(layer, record)
    except OtherInputs as why:
        raise NotALoop(str(why)) from why
    if layer_input is not None:
        for name in ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"):
            del children[name]
    attentions = [child for child in children.values() if isinstance(child, RowAttention)]
    recurrent = [child for child in children.values() if isinstance(child, RecurrentMixer)]
    blocks = [child for child in children.values() if isinstance(child, FusedGated | MixedBlock)]
    norms = {name: child.norm for name, child in children.items() if isinstance(child, FusedNorm)}
    strangers = [
        name
        for name, child in children.items()
        if child not in (*attentions, *recurrent, *blocks) and not isinstance(child, FusedNorm) and has_weights(child)
    ]
    if (both := _mixture_and_block(blocks)) is not None:
        blocks = [both]
    if isinstance(of_layer, ChosenExperts) and len(blocks) == 1 and isinstance(blocks[0], FusedGated):
        if not _NORMS_APART.keys() <= norms.keys():
            raise NotALoop(f"a layer with experts and the norms {sorted(norms)}")
        blocks = [ExpertsApart(of_layer, blocks[0], **{part: norms.pop(name) for name, part in _NORMS_APART.items()})]
    numbers = [len(attentions), len(recurrent), len(blocks)]
    if strangers or not any(numbers) or max(numbers) > 1:
        raise NotALoop(f"a layer of {sorted(children)}")
    names = next((names for names in _NORMS if {name for name in names if name} == set(norms)), None)
    if names is None:
        raise NotALoop(f"a layer with the norms {sorted(norms)}")
    around = (norms[name] if name else None for name in names)
    angles = _angles_of(layer, record, rotary, decoder) if attentions else None
    scale = float(getattr(layer, "layer_scalar", 1.0))
    attention, mixer, block = next(iter(attentions), None), next(iter(recurrent), None), next(iter(blocks), None)
    return Layer(attention, mixer, block, angles, len(norms) == 1, layer_input, scale, *around)


def _mixture_and_block(blocks: Sequence[FusedGated | MixedBlock]) -> ExpertsAndBlock | None:
    """Return the sum of a layer's two blocks, if they are a mixture and a block next to it."""
    mixtures = [block for block in blocks if isinstance(block, ChosenExperts) and not block.has_shared]
    gated = [block for block in blocks if isinstance(block, FusedGated)]
    return ExpertsAndBlock(mixtures[0], gated[0]) if len(mixtures) == len(gated) == 1 and len(blocks) == 2 else None


def _angles_of(layer: nn.Module, record: Recording, rotary: list[RotaryCall], decoder: nn.Module) -> int | None:
    """Return which rotary call gave this layer its angles; a new one is added. None: the layer got none."""
    try:
        given = record.only(layer).kwargs.get("position_embeddings")
    except ValueError as error:
        raise NotALoop(f"a layer without angles: {error}") from error
    if given is None:
        return None
    for module in decoder.children():
        for call in record.calls.get(module, []):
            if not _same_memory(call.output, given):
                continue
            rest, kwargs = call.args[2:], {name: value for name, value in call.kwargs.items() if name != "position_ids"}
            for at, known in enumerate(rotary):
                if known.module is module and known.rest == rest and known.kwargs == kwargs:
                    return at
            rotary.append(RotaryCall(module, rest, kwargs))
            return len(rotary) - 1
    raise NotALoop("a layer's angles come from elsewhere")


def _same_memory(ones: Any, others: Any) -> bool:
    """Return whether two tuples of tensors are the same, or whole views of them, as Gemma 4's later layers get."""
    return ones is others or (
        isinstance(ones, tuple)
        and isinstance(others, tuple)
        and [(part.data_ptr(), part.shape) for part in ones] == [(part.data_ptr(), part.shape) for part in others]
    )
