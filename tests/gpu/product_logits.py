"""Logits of a model by its products."""

from __future__ import annotations

import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel


@torch.inference_mode()
def logits(model: LoadedModel, count: int, start: int) -> torch.Tensor:
    """Return the logits of tokens [start, start + count) after `start` prefilled tokens."""
    table_BN = torch.arange(32, dtype=torch.int32, device="cuda")[None]
    pages, at = (
        model.allocate_pages(32, 16, token_major=True),
        torch.arange(512, dtype=torch.int32, device="cuda")[None],
    )
    ids = (at.long() * 37 + 5) % 256
    model.prefill(ids[:, :start], AttentionContext(pages, table_BN, at[:, :start].contiguous()))
    there = slice(start, start + count)
    return model.logits(ids[:, there], AttentionContext(pages, table_BN, at[:, there].contiguous()))
