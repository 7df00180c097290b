"""Mask rows that the engine holds, per slot: fetched once, used where they are needed.

The rows of the draft steps are the next verify's rows 0 to K - 1 (the matcher is in the same state), and the rows of
an answer that came late are those of the repeated step. One invariant: a kept row belongs to the slot's present history
and drafts; whoever changes either forgets the rows. Not here: how rows arrive.

Shapes: S slots, R rows a slot, W' 32-bit words of a row's stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared_mem.layout import RowKind


@dataclass(frozen=True, slots=True)
class RowStore:
    """Writer: the sync, on the engine thread."""

    mask_SRW: torch.Tensor
    """int32; meaningful where the kind is APPLY."""
    kind_SR: torch.Tensor
    """uint8 RowKind."""
    forced_SR: torch.Tensor
    """int32."""
    cached_SR: torch.Tensor
    """bool: the row is here and need not be asked for."""

    @classmethod
    def allocate(cls, num_slots: int, num_rows: int, words: int) -> RowStore:
        """Return an empty store in CPU memory."""
        shape = (num_slots, num_rows)
        return cls(
            torch.zeros(*shape, words, dtype=torch.int32),
            torch.full(shape, int(RowKind.DEFER), dtype=torch.uint8),
            torch.full(shape, -1, dtype=torch.int32),
            torch.zeros(shape, dtype=torch.bool),
        )

    def take(
        self, slot: int, rows: list[int], kinds: torch.Tensor, forced: torch.Tensor, masks_RW: torch.Tensor
    ) -> None:
        """Keep the answers of some rows; a deferred one is not kept."""
        self.kind_SR[slot, rows] = kinds
        self.forced_SR[slot, rows] = forced
        self.mask_SRW[slot, rows] = masks_RW
        self.cached_SR[slot, rows] = kinds != int(RowKind.DEFER)

    def forget(self, slot: int) -> None:
        """Drop a slot's rows: it has another owner or another matcher."""
        self.cached_SR[slot] = False
        self.kind_SR[slot] = int(RowKind.DEFER)
