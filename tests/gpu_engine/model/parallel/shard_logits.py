"""Logits of a model over its shards."""

from __future__ import annotations

import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.model.parallel.threads import ThreadRanks


def logits(model: LoadedModel, ids_BP: torch.Tensor, ranks: ThreadRanks | None = None) -> torch.Tensor:
    """Run a forward after one that has filled its first positions; return [B * P, V]."""
    B, P = ids_BP.shape
    pages = model.allocate_pages(2 * B, 16)
    if ranks is not None:
        ranks.allocate_pages(2 * B, 16)
    table_BN = torch.arange(2 * B, dtype=torch.int32).view(B, 2)
    positions_BP = torch.arange(P, dtype=torch.int32).expand(B, P).contiguous()
    with torch.inference_mode():
        model.prefill(ids_BP, AttentionContext(pages, table_BN, positions_BP))
        return model.logits(ids_BP, AttentionContext(pages, table_BN, positions_BP + P)).clone()
