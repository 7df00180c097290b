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

_STEP = 32
"""Chunk lengths are multiples of this."""


def prefill(model: LoadedModel, pages: list[KVPages], batch: StepBatch, start: int, end: int) -> None:
    """Fill `pages` with tokens [start, end) of the one lane's sequence."""
    length = -(-(end - start) // _STEP) * _STEP
    at_P = torch.arange(start, start + length, dtype=torch.int32)
    live_P = at_P < end
    history_BL = batch.slot.history_SL[batch.slots_B.long()]
    ids_BP = history_BL.gather(1, at_P.clamp(max=end - 1).long()[None])
    context = AttentionContext(
        pages, batch.slot.page_table_SN[batch.slots_B.long()], torch.where(live_P, at_P, -1)[None]
    )
    model.prefill(torch.where(live_P, ids_BP, 0).long(), context)
