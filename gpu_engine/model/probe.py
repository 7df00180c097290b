"""Runs a few tokens through a model at load: checks that it fits our attention, and records the output of each module.

Invariant: a model that does not route every layer through our attention, or loses part of its own attention there, is
rejected. Not responsible for: using the records (see fusion.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gpu_engine.api.capabilities import OF_RECURRENT, LoadedFiles, refuse
from gpu_engine.api.config import EngineConfig
from gpu_engine.model import attention
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.cache_size import attention_layers, cache_places
from gpu_engine.model.experts import Experts
from gpu_engine.model.fused_forward import WholeForward
from gpu_engine.model.loaded_model import LoadedModel, ModelNotSupported
from gpu_engine.model.recording import Distance, Recording, distance, recording, typical_distance
from gpu_engine.model.recurrent.replacement import is_replaced
from gpu_engine.model.states import SequenceStates

log = logging.getLogger(__name__)

_TOKENS = 16
_PREFILLED = 10
_DRAFTS = 4
_PAGE_SIZE = 32
_EXACT_ERROR = 1e-3
"""The same in float32."""
_ERROR = 0.1
"""Largest relative distance from the model's own attention: rounding of bfloat16 is a few hundredths."""
_ROUGH_ERROR = 0.25
"""The same where inputs of products are rounded to 8 bits by row."""

_MOST_ERROR = 0.5
"""The same for a model whose own logits move nearly as far when its input changes by one rounding."""
_NUDGE = 2**-8


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The result of a probe."""

    ids_BP: torch.Tensor
    logits_NV: torch.Tensor
    """Logits of the unfused model, over our attention and our recurrent layers."""
    ctx: AttentionContext
    """Of the recorded forward, with the parameters of each layer's attention."""
    record: Recording
    noise: float
    """Relative distance of those logits from the ones over the model's own attention: the effect of rounding in another
    order on this model in its dtype, through all of its layers."""
    compare: Distance
    """The function that compared them."""

    def again(self, model: LoadedModel) -> Callable[[WholeForward | None], torch.Tensor]:
        """Return a function that computes the same tokens' logits by a fused, or by the model's own forward."""

        @torch.inference_mode()
        def run(fused: WholeForward | None) -> torch.Tensor:
            ctx = _context(model)
            return fused.logits(self.ids_BP, ctx) if fused else model.logits(self.ids_BP, ctx)

        return run

    def moves(self, model: LoadedModel) -> Callable[[], float]:
        """Return a function that says how far the logits move with one rounding: of the input, or in a sum. Parts that
        were fused or packed since count as such sums."""
        return lambda: max(self.noise, self.compare(_nudged(model), self.logits_NV))

    def goes_on(self, model: LoadedModel) -> Callable[[WholeForward], bool]:
        """Return a function that says whether a forward has the same bits in several calls as in one.

        A draft is rejected between the calls, whose rows a recurrent layer must take back.
        """

        @torch.inference_mode()
        def same(fused: WholeForward) -> bool:
            ctx = _context(model)
            whole_NV = fused.logits(self.ids_BP, ctx)[_PREFILLED:].clone()
            return torch.equal(_continued(model, self.ids_BP, ctx, fused), whole_NV)

        return same


def _context(model: LoadedModel) -> AttentionContext:
    ctx = AttentionContext(
        model.allocate_pages(1, _PAGE_SIZE),
        torch.zeros(1, 1, dtype=torch.int32, device=model.device),
        torch.arange(_TOKENS, dtype=torch.int32, device=model.device)[None],
    )
    if model.recurrent:
        states = SequenceStates(model.recurrent, num_slots=1, max_rows=0, device=model.device)
        ctx.recurrent = states.forward_of([0], [0], [_TOKENS], [_TOKENS])
    return ctx


def _continued(
    model: LoadedModel, ids_BP: torch.Tensor, whole: AttentionContext, fused: WholeForward | None = None
) -> torch.Tensor:
    """Return the logits of the tokens from `_PREFILLED` on, in a forward after the one of the tokens before them.

    `whole`: of a forward of all tokens, whose pages have the keys and values of the first ones. A model with recurrent
    layers computes these again, then verifies some of the others, and a wrong one after these, in a forward in between.
    `fused`: the forward; None: the model's.
    """
    logits, fill = (model.logits, model.prefill) if fused is None else (fused.logits, fused.fill)

    def part(start: int, end: int) -> AttentionContext:
        return AttentionContext(pages, whole.page_table_BN, whole.positions_BP[:, start:end].contiguous())

    if not model.recurrent:
        pages = whole.pages
        return logits(ids_BP[:, _PREFILLED:], part(_PREFILLED, _TOKENS))
    pages = _context(model).pages
    states = SequenceStates(model.recurrent, num_slots=1, max_rows=_DRAFTS + 1, device=model.device)

    def with_states(start: int, end: int, num_committed: int) -> AttentionContext:
        recurrent = states.forward_of([0], [start], [end - start], [num_committed])
        return replace(part(start, end), recurrent=recurrent)

    fill(ids_BP[:, :_PREFILLED], with_states(0, _PREFILLED, _PREFILLED))
    accepted, end = _PREFILLED + _DRAFTS, _PREFILLED + _DRAFTS + 1
    drafts_BP = ids_BP[:, _PREFILLED:end].clone()
    drafts_BP[:, -1] = (drafts_BP[:, -1] + 1) % model.vocab_size
    verified_NV = logits(drafts_BP, with_states(_PREFILLED, end, 1))[:-1].clone()
    rest = with_states(accepted, _TOKENS, _TOKENS - accepted)
    return torch.cat((verified_NV, logits(ids_BP[:, accepted:], rest)))


_RECURRENT = re.compile(r"Mamba|Recurrent|DeltaNet|DeltaAttention|LightningAttention|ShortConv|Rwkv|LSTM|Mixer$")
"""In the names of transformers' modules that carry a state from token to token."""


def refuse_recurrent(config: EngineConfig, net: Any) -> None:
    """Raise ModelNotSupported if a layer of the model is recurrent, and has no replacement that takes back a rejected
    draft (recurrent/replacement.py), or if a setting does not go together with such a layer."""
    model_type, found = net.config.get_text_config().model_type, False
    for module in net.modules():
        kind = type(module).__name__
        if is_replaced(module) or any(map(is_replaced, module.children())):  # a layer around it
            found = True
        elif _RECURRENT.search(kind) and not isinstance(module, PreTrainedModel):
            raise ModelNotSupported(
                f"model: {model_type} has recurrent layers ({kind}), whose state cannot take back a rejected draft "
                "or be shared by page"
            )
    if found and not attention_layers(net.config.get_text_config()):
        raise ModelNotSupported(f"model: {model_type} has no layer with attention")
    if found:
        refuse(OF_RECURRENT, LoadedFiles(config, model_type=model_type), ModelNotSupported)


@torch.inference_mode()
def own_logits(model: LoadedModel) -> torch.Tensor:
    """Return the logits of the probe's tokens by the model's own forward, with its own attention."""
    net: Any = model.net
    net.set_attn_implementation("eager")
    attention.take_temperatures(net, back=True)
    # It advises users to install kernels of recurrent layers, which this forward alone would use.
    advice = logging.getLogger("transformers.integrations.hub_kernels")
    level = advice.level
    advice.setLevel(logging.ERROR)
    try:
        logits: torch.Tensor = net(input_ids=_ids(model), use_cache=False).logits[0].float()
    finally:
        advice.setLevel(level)
    attention.take_temperatures(net)
    net.set_attn_implementation(attention.NAME)
    return logits


@torch.inference_mode()
def _nudged(model: LoadedModel) -> torch.Tensor:
    """Return the logits of the modules with every second number of the embedding larger by a bfloat16's rounding."""

    def nudge(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        nudged = out.clone()
        nudged[..., ::2] *= 1 + _NUDGE
        return nudged

    hook = model.net.get_input_embeddings().register_forward_hook(nudge)
    try:
        return model.logits(_ids(model), _context(model)).clone()
    finally:
        hook.remove()


def _ids(model: LoadedModel) -> torch.Tensor:
    return torch.arange(_TOKENS, device=model.device)[None] * 37 % model.vocab_size


@torch.inference_mode()
def probe(
    model: LoadedModel,
    *,
    rough: bool = False,
    own: torch.Tensor | None = None,
    moves: Callable[[], float] | None = None,
) -> Probe:
    """Run a few tokens and check that every layer uses our attention and that no part of the model's own attention is
    lost.

    Args:
        rough: inputs of products are rounded to 8 bits by row.
        own: the model's `own_logits`, if recurrent layers or latent attentions were replaced since.
        moves: returns how far the logits move with one rounding of the input; None: it is measured.

    Raises ModelNotSupported.
    """
    attention.take_temperatures(model.net)
    ctx = _context(model)
    ids = _ids(model)
    try:
        with recording(model.net) as record:
            logits = model.logits(ids, ctx)
        later = _continued(model, ids, ctx)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ModelNotSupported(f"model: {model.model_type} does not fit our attention: {error}") from error
    if set(ctx.layers_seen) != set(range(len(model.kv_heads))):
        raise ModelNotSupported(
            f"model: {model.model_type} sends {len(ctx.layers_seen)} of {len(model.kv_heads)} layers through our "
            "attention"
        )
    text = model.net.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * model.num_layers
    for layer, place in cache_places(text).items():
        seen, kind = ctx.layers_seen[place], kinds[layer]
        held = {"sliding_attention": seen.window > 0, "chunked_attention": seen.chunk > 0}
        if not held.get(kind, kind in ("full_attention", "hybrid")):
            raise ModelNotSupported(f"model: layer {layer} of {model.model_type} is {kind}, which is not supported")
    if not bool(torch.isfinite(logits).all()):
        raise ModelNotSupported(f"model: {model.model_type} gives logits that are not finite in {model.dtype_name}")
    # Sinks and biases are passed in arguments of the model's own attention: without them the logits differ.
    own = own_logits(model) if own is None else own
    exact = model.dtype == torch.float32 and not model.quantised
    jumps = bool(model.recurrent) or any(isinstance(module, Experts) for module in model.net.modules())
    compare = typical_distance if jumps and not exact else distance
    noise, later_noise = compare(logits, own), compare(later, own[_PREFILLED:])
    bound = _EXACT_ERROR if exact else _ROUGH_ERROR if rough else _ERROR
    if (far := max(noise, later_noise)) > bound and not exact:
        # A small model in few bits may follow a rounding as others follow another input.
        moved = compare(_nudged(model), logits) if moves is None else moves()
        bound = max(bound, min(2 * moved, _MOST_ERROR))
        if far <= bound:
            log.warning(
                "the logits of %s follow each rounding: two ways to compute them are %.2f apart", model.name, far
            )
    if noise > bound:
        raise ModelNotSupported(f"model: the attention of {model.model_type} does more than ours; it cannot be served")
    if later_noise > bound:
        raise ModelNotSupported(
            f"model: {model.model_type} has other logits when a sequence goes on in a second forward: it keeps more "
            "than one key and value a layer, or counts positions itself; it cannot be served"
        )
    return Probe(ids, logits, ctx, record, noise, compare)
