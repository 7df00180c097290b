"""Prefill: chunks of some sequences' tokens through a model, for only their keys and values.

Chunks are padded to a few shapes. Libraries store a plan for each shape, and a plan for every length that a prompt may
have costs hundreds of megabytes and a stall each. Invariant: padding writes nothing. Not responsible for: cutting a
prompt (see core/scheduler.py), the choice of shapes (see api/prefill_shapes.py).

Shapes: B chunks, P padded length, S slots, L tokens of a full sequence, N pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_engine.model.attention import AttentionContext, PromptRows
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.recurrent.rows import RecurrentForward
from gpu_engine.model.states import SequenceStates
from gpu_engine.step.buffers import SlotBuffers
from kernels.paged_attention import KVPages

Hidden = dict[int, torch.Tensor | None]
"""Target layer -> the input of that layer, [rows, H]; see `AttentionContext.hidden`."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Tokens [start, end) of one sequence in each lane. On the slots' device; only `rows` reads values back."""

    history_SL: torch.Tensor
    """int32, a view of the slots' own."""
    page_table_BN: torch.Tensor
    """int32, contiguous."""
    place_B1: torch.Tensor
    """int64, slots."""
    at_BP: torch.Tensor
    """int32, positions from `start` on, through the padding."""
    end_B1: torch.Tensor
    """int32; a padded lane ends where it starts."""
    adapter_S: torch.Tensor
    """int32, a view of the slots' own."""
    runs_at_once: bool = False
    """Values may be read: what is done with the chunks is not captured."""

    @classmethod
    def cut(
        cls,
        slot: SlotBuffers,
        place_B: torch.Tensor,
        start_B: torch.Tensor,
        end_B: torch.Tensor,
        length: int,
        *,
        runs_at_once: bool = False,
    ) -> Chunks:
        """Return the chunks of slots `place_B` (int64), padded to `length` tokens; `start_B` and `end_B` are int32."""
        row_P = torch.arange(length, dtype=torch.int32, device=place_B.device)
        at_BP = start_B[:, None] + row_P
        lanes = slot.page_table_SN[place_B], place_B[:, None], at_BP, end_B[:, None]
        return cls(slot.history_SL, *lanes, slot.adapter_S, runs_at_once)

    @property
    def adapters_B(self) -> torch.Tensor:
        """int32, the LoRA adapter of each lane."""
        return self.adapter_S[self.place_B1[:, 0]]

    @property
    def positions_BP(self) -> torch.Tensor:
        """int32, contiguous; -1 is padding."""
        return torch.where(self.at_BP < self.end_B1, self.at_BP, -1)

    def recurrent(self, states: SequenceStates) -> RecurrentForward:
        """Return the states of a forward over the chunks, all of whose tokens are committed."""
        start_B, count_B = self.at_BP[:, 0], (self.end_B1 - self.at_BP[:, :1])[:, 0]
        return states.forward(self.place_B1[:, 0], start_B, count_B, count_B, self.at_BP.shape[1])

    def rows(self) -> PromptRows:
        """Return the tokens without the padding, and without adapters."""
        assert self.runs_at_once
        is_token_BP = self.at_BP < self.end_B1
        counts = tuple(is_token_BP.sum(dim=1).tolist())
        ids_N, positions_N = self.ids_BP()[is_token_BP].long(), self.at_BP[is_token_BP]
        return PromptRows(ids_N, positions_N, counts, self.page_table_BN)

    def ids_BP(self, offset: int = 0) -> torch.Tensor:
        """Return the tokens `offset` places after the positions, int32; padding repeats the last one."""
        at_BP = torch.minimum(self.at_BP, self.end_B1 - 1) + offset
        return self.history_SL[self.place_B1, at_BP.clamp(min=0).long()]


def prompt_rows(
    slot: SlotBuffers, chunks: Sequence[tuple[int, int, int]], *, with_adapters: bool = False
) -> PromptRows:
    """Return the rows of (slot, start, end) chunks, whose history and pages the slots have. Runs at once."""
    ids = [slot.history_SL[place, start:end] for place, start, end in chunks]
    positions = [torch.arange(start, end, dtype=torch.int32) for _, start, end in chunks]
    counts = tuple(end - start for _, start, end in chunks)
    places = [place for place, _, _ in chunks]
    adapters_C = slot.adapter_S[places] if with_adapters else None
    return PromptRows(torch.cat(ids).long(), torch.cat(positions), counts, slot.page_table_SN[places], adapters_C)


def chunks_of(slot: SlotBuffers, chunks: Sequence[tuple[int, int, int]]) -> Chunks:
    """Return the same (slot, start, end) for a drafter, padded to the longest. Runs at once."""
    place_B, start_B, end_B = torch.tensor(chunks, dtype=torch.int32).T.contiguous()
    longest = max(end - start for _, start, end in chunks)
    return Chunks.cut(slot, place_B.long(), start_B, end_B, longest, runs_at_once=True)


def fill_prompts(model: LoadedModel, pages: list[KVPages], prompts: PromptRows) -> None:
    """Fill `pages` with the prompts in one forward of a model that takes prompts."""
    nothing = prompts.ids_N[:0].view(0, 1), prompts.page_table_CN[:0], prompts.positions_N[:0].view(0, 1)
    model.prefill(nothing[0], AttentionContext(pages, *nothing[1:], prompts=prompts))


def prefill(
    model: LoadedModel,
    pages: list[KVPages],
    chunks: Chunks,
    hidden: Hidden | None = None,
    *,
    adapted: bool = True,
    states: SequenceStates | None = None,
) -> None:
    """Fill `pages`, and the `states` of a model with recurrent layers, with the chunks. `adapted` False: no chunk has
    an adapter.

    `hidden` names the layers whose input is wanted and receives it, [B * P, H]: one row for each token and each
    padding.
    """
    positions_BP = chunks.positions_BP
    ids_BP = torch.where(positions_BP < 0, 0, chunks.ids_BP())
    adapters_B = chunks.adapters_B if adapted and model.adapters is not None else None
    ctx = AttentionContext(pages, chunks.page_table_BN, positions_BP, hidden=hidden, adapters_B=adapters_B)
    if states is not None:
        ctx.recurrent = chunks.recurrent(states)
    model.prefill(ids_BP.long(), ctx)
