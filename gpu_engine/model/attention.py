"""How a transformers model reaches our paged cache: its own attention modules, our attention function.

The function is registered once, under a name that is set in the model's config. The thread of a forward holds the
pages, page table and positions of the step (`attending`): not every family hands keyword arguments on to its attention.
Invariant: the caller owns the tensors of a context; a forward writes only keys and values.
Not responsible for: the assignment of pages to sequences (see core/kv_cache.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from transformers import AttentionInterface

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


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of prompts that share a forward with other rows, for their keys and values alone.

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
    """Further rows of the forward. All keys of a layer are stored before any row reads them, so the last token of a
    prompt may be a row of the batch while the tokens in front of it are here. For models that skip padding alone."""
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
    """Return the context of the innermost `attending` of this thread; raise RuntimeError outside of one."""
    if _forward.ctx is None:
        raise RuntimeError("an attention over the paged cache ran outside of attending()")
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
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend; q, k, v are [B, H, P, D], the result is [B, P, Hq, D]."""
    ctx, layer = context_of_forward(), cast(int, module.layer_idx)
    num_heads, head_dim = query.shape[1], query.shape[3]
    scale = head_dim**-0.5 if scaling is None else scaling
    parameters = LayerAttention(num_heads, key.shape[1], head_dim, scale, softcap or 0.0, sliding_window or 0)
    ctx.layers_seen[layer] = parameters
    out = paged_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        ctx.pages[layer],
        ctx.page_table_BN,
        ctx.positions_BP,
        scale=parameters.scale,
        softcap=parameters.softcap,
        window=parameters.window,
    )
    return out, None


def register() -> None:
    """Register the attention with transformers. A second call changes nothing.

    No mask function is registered: masking is by position, and with a mask function transformers would read the
    positions back from the device to look for packed sequences.
    """
    AttentionInterface.register(NAME, _attend)
