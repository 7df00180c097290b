"""How a transformers model reaches our paged cache: its own attention modules, our attention function.

The function is registered once, under a name that is set in the model's config. The thread of a forward holds the
pages, page table and positions of the step (`attending`): not every family hands keyword arguments on to its attention.
Invariant: the caller owns the tensors of a context; a forward writes only keys and values.
Not responsible for: the assignment of pages to sequences (see core/kv_cache.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface

from gpu_engine.model.recurrent.rows import RecurrentForward
from kernels.forward import SequenceAdapters
from kernels.paged_attention import KVPages, paged_attention

NAME = "lockstep_paged"


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The parameters with which one layer calls attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    """0: none."""
    window: int
    """In tokens; 0: none."""
    chunk: int = 0
    """Tokens of a chunk, whose queries see only its own keys; 0: none."""
    sinks: bool = False
    """Each head has a further logit without a value."""
    padded: bool = False
    """Heads are narrower than those of the cache: keys and values of different sizes (MLA), or no multiple of 16."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of prompts that share a forward with other rows, for only their keys and values.

    C chunks, of different sequences, in the order of the chunks.
    """

    ids_N: torch.Tensor
    """int64."""
    positions_N: torch.Tensor
    """int32; no padding."""
    counts: tuple[int, ...]
    """Tokens of each chunk."""
    page_table_CN: torch.Tensor
    """int32."""
    adapters_C: torch.Tensor | None = None
    """int32, the LoRA adapter of each chunk, 0 for none; None: no chunk has one."""


@dataclass(slots=True)
class AttentionContext:
    """The places where a forward reads and writes keys and values."""

    pages: list[KVPages]
    """One a layer."""
    page_table_BN: torch.Tensor
    """int32, page numbers of each sequence of the batch."""
    positions_BP: torch.Tensor
    """int32, absolute positions; negative is padding."""
    hidden: dict[int, torch.Tensor | None] | None = None
    """Layers whose input is wanted. A forward stores that input here, [B * P, H] in the model's dtype;
    the caller owns it.

    The index after the last layer is the input of the output head: the normed final hidden state.
    """
    prompts: PromptRows | None = None
    """Further rows of the forward. The keys of a prompt are stored before rows of the batch read them, so its last
    token may be a row of the batch while the tokens before it are here. No prompt reads keys of another one, or of the
    batch. Only for models that take prompts."""
    adapters_B: torch.Tensor | None = None
    """int32, the LoRA adapter of each sequence of the batch, 0 for none; None: no sequence has one."""
    adapters: SequenceAdapters | None = None
    """Set by the model before a forward where a row has an adapter."""
    tree_rows_BRR: torch.Tensor | None = None
    """On a GPU, where the rows of each sequence are those of a tree of drafts; see `TreeRows.rows_BRR`."""
    defers_head: bool = False
    """The output product is left to the model's `masked_head`. Only for models that can defer it."""
    recurrent: RecurrentForward | None = None
    """The states of the lanes, in the order of the forward's rows; None: the model has no recurrent layers."""
    virtual_VH: torch.Tensor | None = None
    """Set by the model: the embeddings of prompt adapters, for the ids after those of its own embedding."""
    layers_seen: dict[int, LayerAttention] = field(default_factory=dict)
    """Layers that called attention through transformers' interface; the probe reads it."""


class _Forward(threading.local):
    """The forward of this thread."""

    ctx: AttentionContext | None = None


_forward = _Forward()


@contextmanager
def attending(ctx: AttentionContext) -> Iterator[None]:
    """Give `ctx` to every attention that this thread runs inside the `with` block."""
    before, _forward.ctx = _forward.ctx, ctx
    try:
        yield
    finally:
        _forward.ctx = before


def context_of_forward() -> AttentionContext:
    """Return the context of the innermost `attending` of this thread; raise RuntimeError outside one."""
    if _forward.ctx is None:
        raise RuntimeError("an attention over the paged cache ran outside attending()")
    return _forward.ctx


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend; q, k, v are [B, H, P, D], the result is [B, P, Hq, D] with the D of v. `s_aux` [Hq]: sinks."""
    ctx, layer = context_of_forward(), cast(int, module.layer_idx)
    pages, head_dim, value_dim = ctx.pages[layer], query.shape[3], value.shape[3]
    width = pages.v.shape[3]
    parameters = LayerAttention(
        query.shape[1],
        key.shape[1],
        width,
        head_dim**-0.5 if scaling is None else scaling,
        softcap or 0.0,
        sliding_window or 0,
        _chunk_of(module, layer),
        s_aux is not None,
        padded=head_dim != width or value_dim != width,
    )
    ctx.layers_seen[layer] = parameters
    tuning = getattr(module, _TEMPERATURE, None)
    if tuning is not None:
        query = tuning.of(query, ctx.positions_BP)
    out = paged_attention(
        _widened(query.transpose(1, 2), width),
        _widened(key.transpose(1, 2), width),
        _widened(value.transpose(1, 2), width),
        pages,
        ctx.page_table_BN,
        ctx.positions_BP,
        scale=parameters.scale,
        softcap=parameters.softcap,
        window=parameters.window,
        chunk=parameters.chunk,
        sinks_H=None if s_aux is None else s_aux.float().contiguous(),
        tree_rows_BRR=ctx.tree_rows_BRR,
    )
    return out[..., :value_dim], None


_TEMPERATURE = "lockstep_temperature"


@dataclass(frozen=True, slots=True)
class Temperature:
    """A factor of queries that grows with the position: of Llama 4's without rotation, and of Ministral 3's."""

    attn_scale: float
    floor_scale: float
    first: int = 1
    """The number that the first position counts as."""

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the float32 factor at each position; arithmetic as in transformers."""
        steps = torch.floor((positions.clamp(min=0).float() + self.first) / self.floor_scale)
        return torch.log1p(steps) * self.attn_scale + 1.0

    def of(self, query_BHPD: torch.Tensor, positions_BP: torch.Tensor) -> torch.Tensor:
        """Return the queries times their factors."""
        return (query_BHPD * self.factors(positions_BP)[:, None, :, None]).to(query_BHPD.dtype)


def take_temperatures(net: nn.Module, *, back: bool = False) -> None:
    """Apply the temperature of Llama 4's attention here instead of there, where positions are counted from the rows of
    a forward; with `back`, there again."""
    for module in net.modules():
        if not back and getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            own: Any = module
            object.__setattr__(module, _TEMPERATURE, Temperature(float(own.attn_scale), float(own.floor_scale)))
            own.attn_temperature_tuning = False
        elif back and hasattr(module, _TEMPERATURE):
            delattr(module, _TEMPERATURE)
            module.attn_temperature_tuning = True  # type: ignore[assignment]


def number_layers(decoder: nn.Module, places: Mapping[int, int]) -> None:
    """Give the attention of each layer its place in the cache as its number. `places`: by the numbers of the layers.

    A layer with the keys and values of another one attends there, and stores them there once more unless it is fused.
    transformers reads an attention's number for its own caches only, which no forward here has.
    """
    for module in decoder.modules():
        own: Any = module
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups"):
            own.layer_idx = places[own.layer_idx]


def _widened(heads_BPHD: torch.Tensor, width: int) -> torch.Tensor:
    """Fill heads up with zeros to those of the cache: they add nothing to a score or to a value."""
    missing = width - heads_BPHD.shape[3]
    if missing < 0:
        raise ValueError(f"heads of {heads_BPHD.shape[3]} channels, and the cache has {width}")
    return nn.functional.pad(heads_BPHD, (0, missing)) if missing else heads_BPHD


def _chunk_of(module: nn.Module, layer: int) -> int:
    """Return the chunk of a layer, which transformers passes in the mask."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    return int(config.attention_chunk_size) if kinds and kinds[layer] == "chunked_attention" else 0


def register() -> None:
    """Register the attention with transformers. A second call changes nothing.

    No mask function is registered: masking is by position, and with a mask function transformers would read the
    positions back from the device to look for packed sequences.
    """
    AttentionInterface.register(NAME, _attend)
