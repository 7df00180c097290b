"""Runs a few tokens through a model at load: checks that it fits our attention, and records the output of each module.

Invariant: a model that does not route every layer through our attention, or loses part of its own attention there, is
rejected. Not responsible for: using the records (see fusion.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gpu_engine.model import attention
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.fused_forward import WholeForward
from gpu_engine.model.loaded_model import LoadedModel, ModelNotSupported
from gpu_engine.model.recording import Recording, distance, recording

_TOKENS = 24
_PREFILLED = 15
_PAGE_SIZE = 32
_EXACT_ERROR = 1e-3
"""The same in float32."""
_ERROR = 0.1
"""Largest relative distance from the model's own attention: rounding of bfloat16 is a few hundredths."""
_ROUGH_ERROR = 0.25
"""The same where inputs of products are rounded to 8 bits by row."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The result of a probe."""

    ids_BP: torch.Tensor
    logits_NV: torch.Tensor
    """Logits of the unfused model, over our attention."""
    ctx: AttentionContext
    """Of the recorded forward, with the parameters of each layer's attention."""
    record: Recording
    noise: float
    """Relative distance of those logits from the ones over the model's own attention: the effect of rounding in another
    order on this model in its dtype, through all of its layers."""

    def again(self, model: LoadedModel) -> Callable[[WholeForward | None], torch.Tensor]:
        """Return a function that computes the same tokens' logits by a fused, or by the model's own forward."""

        @torch.inference_mode()
        def run(fused: WholeForward | None) -> torch.Tensor:
            ctx = _context(model)
            return fused.logits(self.ids_BP, ctx) if fused else model.logits(self.ids_BP, ctx)

        return run


def _context(model: LoadedModel) -> AttentionContext:
    return AttentionContext(
        model.allocate_pages(1, _PAGE_SIZE),
        torch.zeros(1, 1, dtype=torch.int32, device=model.device),
        torch.arange(_TOKENS, dtype=torch.int32, device=model.device)[None],
    )


def _continued(model: LoadedModel, ids_BP: torch.Tensor) -> torch.Tensor:
    """Return the logits of the tokens from `_PREFILLED` on, in a forward after the one of the tokens in front."""
    whole = _context(model)
    first, second = (
        AttentionContext(whole.pages, whole.page_table_BN, part.contiguous())
        for part in whole.positions_BP.split((_PREFILLED, _TOKENS - _PREFILLED), dim=1)
    )
    model.prefill(ids_BP[:, :_PREFILLED], first)
    return model.logits(ids_BP[:, _PREFILLED:], second)


_RECURRENT = re.compile(r"Mamba|Recurrent|DeltaNet|DeltaAttention|LightningAttention|ShortConv|Rwkv|LSTM|Mixer$")
"""In the names of transformers' modules that carry a state from token to token."""


def refuse_recurrent(net: nn.Module, model_type: str) -> None:
    """Raise ModelNotSupported if a layer of the model is recurrent, alone or next to attention."""
    for module in net.modules():
        kind = type(module).__name__
        if _RECURRENT.search(kind) and not isinstance(module, PreTrainedModel):
            raise ModelNotSupported(
                f"model: {model_type} has recurrent layers ({kind}), whose state cannot take back a rejected draft "
                "or be shared by page; only models of attention layers are served"
            )


@torch.inference_mode()
def probe(model: LoadedModel, *, rough: bool = False) -> Probe:
    """Run a few tokens and check that every layer uses our attention and that no part of the model's own attention is
    lost.

    `rough`: inputs of products are rounded to 8 bits by row. Raises ModelNotSupported.
    """
    if model.head_dim > 256:
        raise ModelNotSupported(f"model: head size {model.head_dim} is more than 256")
    attention.take_temperatures(model.net)
    ctx = _context(model)
    ids = torch.arange(_TOKENS, device=model.device)[None] * 37 % model.vocab_size
    try:
        model.prefill(ids, ctx)
        with recording(model.net) as record:
            logits = model.logits(ids, ctx)
        later = _continued(model, ids)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ModelNotSupported(f"model: {model.model_type} does not fit our attention: {error}") from error
    if set(ctx.layers_seen) != set(range(model.num_layers)):
        raise ModelNotSupported(
            f"model: {model.model_type} sends {len(ctx.layers_seen)} of {model.num_layers} layers through our attention"
        )
    kinds = getattr(model.net.config.get_text_config(), "layer_types", None) or ["full_attention"] * model.num_layers
    for layer, kind in enumerate(kinds):
        seen = ctx.layers_seen[layer]
        held = {"full_attention": True, "sliding_attention": seen.window > 0, "chunked_attention": seen.chunk > 0}
        if not held.get(kind, False):
            raise ModelNotSupported(f"model: layer {layer} of {model.model_type} is {kind}, which is not supported")
    if not bool(torch.isfinite(logits).all()):
        raise ModelNotSupported(f"model: {model.model_type} gives logits that are not finite in {model.dtype_name}")
    # Sinks and biases are passed in arguments of the model's own attention: without them the logits differ.
    net: Any = model.net
    net.set_attn_implementation("eager")
    attention.take_temperatures(net, back=True)
    own = net(input_ids=ids, use_cache=False).logits[0].float()
    attention.take_temperatures(net)
    net.set_attn_implementation(attention.NAME)
    noise = distance(logits, own)
    exact = model.dtype == torch.float32 and not model.quantised
    bound = _EXACT_ERROR if exact else _ROUGH_ERROR if rough else _ERROR
    if noise > bound:
        raise ModelNotSupported(f"model: the attention of {model.model_type} does more than ours; it cannot be served")
    if distance(later, own[_PREFILLED:]) > bound:
        raise ModelNotSupported(
            f"model: {model.model_type} has other logits when a sequence goes on in a second forward: it keeps more "
            "than one key and value a layer, or counts positions itself; it cannot be served"
        )
    return Probe(ids, logits, ctx, record, noise)
