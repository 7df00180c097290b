"""Prefill: a chunk of one sequence's tokens through a model, for their keys and values alone.

Chunks are padded to a few lengths. Libraries keep a plan a shape, and a plan for every length that a prompt may have
costs hundreds of megabytes and a stall each. One invariant: padding writes nothing. Not here: how a prompt is cut.
"""

from __future__ import annotations

import torch

from gpu_engine.buffers import StepBatch
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from kernels.paged_attention import KVPages

STEP = 32
"""Chunk lengths are multiples of this."""


def prefill(
    model: LoadedModel,
    pages: list[KVPages],
    batch: StepBatch,
    start: int,
    end: int,
    hidden: dict[int, torch.Tensor | None] | None = None,
) -> None:
    """Fill `pages` with tokens [start, end) of the one lane's sequence; `hidden` as in `prefill_row`."""
    slots_B = batch.slots_B.long()
    prefill_row(model, pages, batch.slot.history_SL[slots_B], batch.slot.page_table_SN[slots_B], start, end, hidden)


def prefill_row(
    model: LoadedModel,
    pages: list[KVPages],
    history_1L: torch.Tensor,
    page_table_1N: torch.Tensor,
    start: int,
    end: int,
    hidden: dict[int, torch.Tensor | None] | None = None,
) -> None:
    """Fill `pages` with tokens [start, end) of one row of the history; reads nothing back from the device.

    `hidden` names the layers whose input is wanted and receives it, a row a token, padding behind the last.
    """
    length = -(-(end - start) // STEP) * STEP
    at_P = torch.arange(start, start + length, dtype=torch.int32, device=history_1L.device)
    live_P = at_P < end
    ids_BP = history_1L.gather(1, at_P.clamp(max=end - 1).long()[None])
    context = AttentionContext(pages, page_table_1N, torch.where(live_P, at_P, -1)[None], hidden=hidden)
    model.prefill(torch.where(live_P, ids_BP, 0).long(), context)
