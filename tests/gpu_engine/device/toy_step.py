"""A whole step on a stream, in torch operations: an arithmetic model, masks, verification and masked drafts.

At absolute position p of slot s the model prefers token (37 p + 11 s + 5) mod V, then the following ids in a circle. So
the right tokens of a slot under a grammar are known without running the step, and a lost or exchanged row is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.output_ring import OutputRing
from gpu_engine.step.stream_sync import StreamSync
from kernels.accept import RUN_ON
from shared_mem.layout import RowKind

V = 256
"""The number of tokens of the model; the grammars have some more, one of which is the stop token."""
PROMPT = 3


def favourite(position: int, slot: int) -> int:
    return (37 * position + 11 * slot + 5) % V


def expected(legal: Callable[[list[int]], frozenset[int]], slot: int, count: int) -> list[int]:
    """Return the first tokens that the slot must emit under a grammar."""
    emitted: list[int] = []
    while len(emitted) < count:
        best = favourite(PROMPT + len(emitted), slot)
        emitted.append(min(legal(emitted), key=lambda token: (token - best) % V))
    return emitted


@dataclass(eq=False)
class ToyStep:
    """The step program. `slot` has one slot more than the segment, which padded lanes use."""

    slot: SlotBuffers
    lane: LaneBuffers
    sync: StreamSync
    ring: OutputRing
    drafts: int

    @property
    def device(self) -> torch.device:
        return self.sync.stream.device

    def __call__(self, batch: StepBatch) -> None:
        stream = self.sync.stream
        stream.kernel(self.load, batch)
        self.sync.post(batch)
        self.sync.await_rows(batch)
        stream.kernel(self.accept, batch)
        stream.kernel(self.advance, batch)
        for k in range(self.drafts):
            self.sync.post_draft(batch, k)
            self.sync.await_draft(batch, k)
            stream.kernel(self.draft, batch, k)
        stream.kernel(self.propose, batch)
        self.ring.pack(batch)

    def load(self, batch: StepBatch) -> None:
        slot, lane, B, place_B = batch.slot, batch.lane, batch.num_lanes, self.place(batch)
        lane.drafts_BR[:B] = slot.drafts_SR[place_B]
        lane.num_drafts_B[:B] = slot.num_drafts_S[place_B].clamp(max=batch.num_rows - 1)

    def accept(self, batch: StepBatch) -> None:
        slot, lane, r, B, P = batch.slot, batch.lane, batch.lane.result, batch.num_lanes, batch.num_rows
        place_B, row_P = self.place(batch), torch.arange(P, device=self.device)
        kinds_BP = lane.kinds_BR[:B, :P]
        token_BP = torch.stack([self.draw(batch, j) for j in range(P)], dim=1)
        agrees_BP = (token_BP == lane.drafts_BR[:B, :P]) & (row_P < lane.num_drafts_B[:B, None])
        reached_BP = torch.cat([torch.ones(B, 1, device=self.device), agrees_BP[:, :-1].float().cumprod(1)], dim=1) > 0
        stops_BP = reached_BP & (kinds_BP > int(RowKind.FORCED))
        emits_BP = (reached_BP & (stops_BP.float().cumsum(1) == 0)) & (batch.slots_B >= 0)[:, None]
        count_B = emits_BP.sum(1).int()
        length_B = slot.length_S[place_B]
        at_BP = (length_B[:, None] + row_P).long()
        old_BP = slot.history_SL[place_B[:, None], at_BP]
        slot.history_SL[place_B[:, None], at_BP] = torch.where(emits_BP, token_BP, old_BP)
        slot.length_S[place_B] = length_B + count_B
        r.emitted_BR[:B, :P] = token_BP
        r.num_emitted_B[:B] = count_B
        r.num_accepted_B[:B] = (count_B - 1).clamp(min=0)
        r.blocked_B[:B] = (kinds_BP * stops_BP).amax(1).int() * (batch.slots_B >= 0)
        r.finish_B[:B] = RUN_ON

    def advance(self, batch: StepBatch) -> None:
        self.sync.launches.advance(batch, self.sync.store)

    def draft(self, batch: StepBatch, k: int) -> None:
        batch.lane.drafts_BR[: batch.num_lanes, k] = self.draw(batch, k)

    def propose(self, batch: StepBatch) -> None:
        slot, lane, B, place_B = batch.slot, batch.lane, batch.num_lanes, self.place(batch)
        on_B = lane.drafting_B[:B]
        slot.drafts_SR[place_B] = torch.where(on_B[:, None], lane.drafts_BR[:B], slot.drafts_SR[place_B])
        cached_B = torch.where(lane.result.num_emitted_B[:B] == 0, slot.num_drafts_S[place_B], 0)
        slot.num_drafts_S[place_B] = torch.where(on_B, self.drafts, cached_B).int()

    def draw(self, batch: StepBatch, j: int) -> torch.Tensor:
        """Return the best legal token of row j, int32 [B]; position length + j."""
        slot, lane, B, place_B = batch.slot, batch.lane, batch.num_lanes, self.place(batch)
        position_B = slot.length_S[place_B] + j
        best_B = (37 * position_B + 11 * place_B + 5) % V
        score_BV = -((torch.arange(V, device=self.device) - best_B[:, None]) % V)
        words_BW = self.sync.store.mask_SRW[batch.slots_B.clamp(min=0).long(), j]
        bits_BV = (words_BW[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self.device) & 1).reshape(B, -1)[
            :, :V
        ] > 0
        kind_B1 = lane.kinds_BR[:B, j : j + 1]
        forced_BV = torch.arange(V, device=self.device) == lane.forced_BR[:B, j : j + 1]
        legal_BV = torch.where(kind_B1 == int(RowKind.FORCED), forced_BV, True)
        legal_BV = torch.where(kind_B1 == int(RowKind.APPLY), bits_BV, legal_BV)
        return torch.where(legal_BV, score_BV, -V).argmax(1).int()

    def place(self, batch: StepBatch) -> torch.Tensor:
        return torch.where(batch.slots_B < 0, len(self.slot.length_S) - 1, batch.slots_B).long()


class PatternStep:
    """Requests every row of every lane, and counts rows with a word that is not the sequence number of the post."""

    def __init__(self, lane: LaneBuffers, sync: StreamSync, ring: OutputRing) -> None:
        self.lane, self.sync, self.ring = lane, sync, ring
        self.bad_2 = torch.zeros(2, dtype=torch.int64, device=sync.stream.device)
        """The number of rows with a wrong word, and the number of missing rows."""

    def __call__(self, batch: StepBatch) -> None:
        self.sync.stream.kernel(self.begin, batch)
        self.sync.post(batch)
        self.sync.await_rows(batch)
        self.sync.stream.kernel(self.check, batch)
        self.sync.stream.kernel(self.sync.launches.advance, batch, self.sync.store)
        self.ring.pack(batch)

    def begin(self, batch: StepBatch) -> None:
        self.lane.num_drafts_B.fill_(batch.num_rows - 1)

    def check(self, batch: StepBatch) -> None:
        lane, B = batch.lane, batch.num_lanes
        slots_B, real_B1 = lane.slots_B[:B].clamp(min=0).long(), (lane.slots_B[:B] >= 0)[:, None]
        words_BRW = self.sync.store.mask_SRW[slots_B]
        other_BR = (words_BRW != (self.sync.post_seq & 0x7FFFFFFF)).any(2)
        apply_BR = lane.kinds_BR[:B] == int(RowKind.APPLY)
        self.bad_2 += torch.stack([(other_BR & apply_BR & real_B1).sum(), (~apply_BR & real_B1).sum()])
        lane.result.num_emitted_B[:B] = 1
        lane.result.blocked_B[:B] = 0
        lane.result.finish_B[:B] = RUN_ON

    @property
    def wrong(self) -> int:
        return int(self.bad_2[0])

    @property
    def missing(self) -> int:
        return int(self.bad_2[1])
