"""How a transformers model reaches our paged cache: its own attention modules, our attention function.

The function is registered once under a name that the model's config carries; what it needs of the step travels as a
keyword argument through the model's forward. One invariant: the pages, table and positions of a context are its
caller's; a forward writes nothing but keys and values. Not here: which page belongs to whom.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AttentionInterface

from kernels.paged_attention import KVPages, paged_attention

NAME = "lockstep_paged"


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer asks of its attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    """0: none."""
    window: int
    """In tokens; 0: none."""


@dataclass(slots=True)
class AttentionContext:
    """Where a forward reads and writes keys and values."""

    pages: list[KVPages]
    """One a layer."""
    page_table_BN: torch.Tensor
    """int32, page numbers of each sequence of the batch."""
    positions_BP: torch.Tensor
    """int32, absolute positions; negative is padding."""
    hidden: dict[int, torch.Tensor | None] | None = None
    """Layers whose input is wanted: a forward puts it there, [B * P, H] in the model's dtype, its caller's to keep.

    The number behind the last layer's is the input of the output head: the final hidden state, normed.
    """
    layers_seen: dict[int, LayerAttention] = field(default_factory=dict)
    """Layers that came through transformers' interface; the loader's probe reads it."""


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    ctx: AttentionContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend; q, k, v are [B, H, P, D], the result is [B, P, Hq, D]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    num_heads, head_dim = query.shape[1], query.shape[3]
    scale = head_dim**-0.5 if scaling is None else scaling
    asked = LayerAttention(num_heads, key.shape[1], head_dim, scale, softcap or 0.0, sliding_window or 0)
    ctx.layers_seen[layer] = asked
    out = paged_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        ctx.pages[layer],
        ctx.page_table_BN,
        ctx.positions_BP,
        scale=asked.scale,
        softcap=asked.softcap,
        window=asked.window,
    )
    return out, None


def register() -> None:
    """Make the attention known to transformers; doing it again changes nothing.

    No mask function goes with it: masking is by position, and where one is registered transformers reads the positions
    back from the device to look for packed sequences.
    """
    AttentionInterface.register(NAME, _attend)
