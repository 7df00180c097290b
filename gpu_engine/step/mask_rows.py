"""The mask rows that the engine caches for each slot.

The rows of the draft steps are the next verify's rows 0 to K - 1, since the matcher is in the same state, and the
rows of a late answer serve the repeated step. So a row is fetched once. Invariant: a cached row
belongs to the slot's present history and drafts; `forget` and `StepLaunches.advance` drop rows when either changes. Not
responsible for: the arrival of rows (see stream_sync.py).

Shapes: S slots, R rows a slot, W' 32-bit words of a row's stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared_mem.layout import RowKind


@dataclass(frozen=True, slots=True)
class RowStore:
    """Rows on the step's device. Writers: the sync, and `StepLaunches.cache_rows` and `advance`.

    `kind_SR`, `forced_SR` and `cached_SR` have one row more than `mask_SRW`, the last one, for padded lanes.
    """

    mask_SRW: torch.Tensor
    """int32; meaningful where the kind is APPLY."""
    kind_SR: torch.Tensor
    """uint8 RowKind."""
    forced_SR: torch.Tensor
    """int32."""
    cached_SR: torch.Tensor
    """bool: the row is cached and is not requested again."""

    @classmethod
    def around(cls, mask_SRW: torch.Tensor) -> RowStore:
        """Return an empty store around mask rows, on their device."""
        (S, R, _), device = mask_SRW.shape, mask_SRW.device
        return cls(
            mask_SRW,
            torch.full((S + 1, R), int(RowKind.DEFER), dtype=torch.uint8, device=device),
            torch.full((S + 1, R), -1, dtype=torch.int32, device=device),
            torch.zeros(S + 1, R, dtype=torch.bool, device=device),
        )

    def forget(self, slot: int) -> None:
        """Drop a slot's rows: it has another owner or another matcher."""
        self.cached_SR[slot].fill_(False)
        self.kind_SR[slot].fill_(int(RowKind.DEFER))
