"""Enqueues the captured logits processors of a server over all lanes: a part of the graph of a step.

A graph has every captured processor of the server, in the order of the setting, and each changes the rows of the slots
that named it. Invariant: the launches depend only on the shape of the batch; which rows a processor changes, and with
which arguments, is in buffers. Not responsible for: which steps have such a graph (see device/graphs.py), other
processors (see host.py).

Shapes: S slots, C captured processors, A arguments of all of them, B lanes, P rows a lane, N = B * P, L tokens of a
history, V columns of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_engine.api.processors import CapturedRows, ProcessorError, Processors
from gpu_engine.processors.loading import unlike
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import place_of
from kernels.row_kinds import FAILED


@dataclass(frozen=True, slots=True)
class CapturedSlots:
    """What the slots' sequences ask of the captured processors. Writer: the engine, when a sequence gets the slot."""

    on_SC: torch.Tensor
    """bool: the sequence named the processor."""
    arguments_SA: torch.Tensor
    """float64."""

    @classmethod
    def allocate(cls, processors: Processors, num_slots: int, device: torch.device) -> CapturedSlots:
        """Return a state in which no slot has a processor."""
        shapes = (num_slots, len(processors.captured)), (num_slots, max(processors.num_arguments, 1))
        on_SC, arguments_SA = (
            torch.zeros(shape, dtype=kind, device=device)
            for shape, kind in zip(shapes, (torch.bool, torch.float64), strict=True)
        )
        return cls(on_SC, arguments_SA)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedProcessing:
    """The captured processors over the slots' state."""

    processors: Processors
    slots: CapturedSlots

    @torch.no_grad()
    def run(self, batch: StepBatch, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the changed logits, float32 [N, V], and a code for each row, uint8 [B, P]: 0, or FAILED and the
        number of the first processor whose numbers are not finite. Runs inside a launch.

        Raises ProcessorError at a capture: a processor raised or returned another shape.
        """
        B, P = batch.num_lanes, batch.num_rows
        place_B, row_P = place_of(batch), torch.arange(P, device=logits_NV.device)
        length_B1 = batch.slot.length_S[place_B].long()[:, None]
        tokens_NL = _tokens(batch, place_B, length_B1)
        # Padding has no tokens; an index before its first would fail the device.
        length_N = (length_B1 + row_P).clamp(min=1, max=tokens_NL.shape[1]).reshape(-1)
        prompt_length_N = batch.slot.params.prompt_length_S[place_B].long().repeat_interleave(P)
        is_row_BP = (row_P <= batch.lane.num_drafts_B[:B, None]) & (batch.slots_B >= 0)[:, None]
        logits_NV = logits_NV.to(torch.float32, copy=True)
        codes_N = torch.zeros(B * P, dtype=torch.uint8, device=logits_NV.device)
        for c, loaded in enumerate(self.processors.captured):
            assert loaded.captured is not None
            on_N = (is_row_BP & self.slots.on_SC[place_B, c][:, None]).reshape(-1)
            first, count = loaded.first_argument, loaded.captured.num_arguments
            arguments_BA = self.slots.arguments_SA[place_B, first : first + count]
            arguments_NA = torch.where(on_N[:, None], arguments_BA.repeat_interleave(P, dim=0), 0.0)
            rows = CapturedRows(tokens_NL, length_N, prompt_length_N, arguments_NA, on_N)
            out_NV = loaded.captured.process_rows(rows, logits_NV.clone())
            if (problem := unlike(out_NV, logits_NV)) is not None:
                raise ProcessorError(f"logits_processors: {loaded.name}: process_rows {problem}")
            bad_N = on_N & ~(out_NV.amax(dim=1) < torch.inf) & (codes_N == 0)
            codes_N = torch.where(bad_N, FAILED + loaded.number, codes_N).to(torch.uint8)
            logits_NV = torch.where(on_N[:, None], out_NV, logits_NV)
        return logits_NV, codes_N.view(B, P)

    def __repr__(self) -> str:
        return f"<CapturedProcessing {', '.join(each.name for each in self.processors.captured)}>"


def _tokens(batch: StepBatch, place_B: torch.Tensor, length_B1: torch.Tensor) -> torch.Tensor:
    """Return the tokens of each row's lane with all its drafts, int32 [N, L]: a row's own length cuts them."""
    B, P = batch.num_lanes, batch.num_rows
    tokens_BL = batch.slot.history_SL[place_B]
    L = tokens_BL.shape[1]
    if P > 1:
        place_BD = (length_B1 + torch.arange(P - 1, device=place_B.device)).clamp(max=L - 1)
        tokens_BL = tokens_BL.scatter(1, place_BD, batch.lane.drafts_BR[:B, : P - 1])
    return tokens_BL.clamp(min=0)[:, None].expand(B, P, L).reshape(B * P, L)


def mark_failed(batch: StepBatch, codes_BP: torch.Tensor) -> None:
    """Give the failed rows a kind that ends their sequence. Runs inside a launch, after the wait for rows."""
    kinds_BP = batch.lane.kinds_BR[: batch.num_lanes, : batch.num_rows]
    kinds_BP.copy_(torch.where(codes_BP > 0, codes_BP, kinds_BP))
