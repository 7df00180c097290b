"""A network as the drafter: a chain of K links inside the step, each drawn as the target's tokens are.

The chain of speculative decoding (Leviathan et al. 2023) under common random numbers: draft k is drawn at absolute
position length + k with the noise that verification will use there, and with draft masks from logits under the mask
that verification will apply there. So a drafter that equals the target is always accepted. The rows that a chain
requests are cached for the next verify.

For capture the chain has a fixed length, and every lane goes through every link. A lane that wants fewer drafts, met a
dead end or is padding takes no part in later links: it requests no row, its positions are padding, and its draws are
not counted. On a stream that runs at once the chain ends where the last lane does. Invariant: a
lane's drafts are counted up to the first that is no token, and no row after that is requested. Not responsible
for: the computation of a link (see nets.py, pairs.py, heads/), acceptance (see kernels/accept.py).

Shapes: B lanes, S slots with the spare one, R rows a slot, N pages of a sequence.
"""

from __future__ import annotations

import torch

from gpu_engine.drafters.nets import DraftNet, put_jump_forward, with_jump_forward
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import place_of
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import Sync, free_row
from kernels.accept import StepTensors, draw_drafts


class ChainDrafter:
    """Owns the net and the chain's buffers. Padded lanes write into the last slot, the spare one.

    Args:
        stream: of the step.
        net: on the stream's device.
        sync: of the step.
        masked: request each draft's mask row.
        jump_forward: the drafts begin with the jump-forward tokens.
        num_lanes: the largest batch.
        num_links: K.
    """

    def __init__(
        self,
        stream: Stream,
        net: DraftNet,
        sync: Sync,
        *,
        masked: bool,
        jump_forward: bool,
        num_lanes: int,
        num_links: int,
    ) -> None:
        self._stream, self.net, self._sync = stream, net, sync
        self._masked, self._jump_forward, self._links = masked, jump_forward, num_links
        self.layers = net.layers

        def ints(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=stream.device)

        self._wanted_B, self._count_B = ints(num_lanes), ints(num_lanes)
        self._going_B = ints(num_lanes, torch.bool)
        """`drafting_B` of the step: lanes that go on. The links narrow `drafting_B` down."""
        self._ids, self._positions = ints(num_lanes, torch.int64), ints(num_lanes)
        """The next link's draft of each lane, and its position."""
        self._link_L = torch.arange(num_links, dtype=torch.int32, device=stream.device)
        self._logits_BV: torch.Tensor | None = None

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Let the net see the same tokens."""
        self.net.prefill(chunks, hidden)

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue up to K links; the drafts of a lane that emitted nothing are unchanged."""
        kernel, links = self._stream.kernel, min(self._links, batch.max_links, batch.max_rows - 1)
        kernel(self._begin, batch, links)
        if self._stream.runs_at_once:
            links = self._links_needed(batch)
        for k in range(links):
            kernel(self._link, batch, k)
            if self._masked:
                self._sync.post_draft(batch, k)
            kernel(self._forward, batch, k, links, page_table_BN, hidden)
            if self._masked:
                self._sync.await_draft(batch, k)
            else:
                kernel(free_row, batch, k)
            kernel(self._draw, batch, step, k)
        kernel(self._finish, batch, links)

    def _links_needed(self, batch: StepBatch) -> int:
        """Return how many links some lane wants; at least one where a lane may want drafts later.

        A net that drafts later must have seen the tokens of every step.
        """
        B = batch.num_lanes
        wanted = int(self._wanted_B[:B].max())
        return wanted or int((self._going_B[:B] & (batch.slot.draft_limit_S[place_of(batch)] > 0)).any())

    def _begin(self, batch: StepBatch, links: int) -> None:
        slot, B, place_B = batch.slot, batch.num_lanes, place_of(batch)
        going_B = batch.lane.drafting_B[:B]
        self._going_B[:B] = going_B
        room_B = slot.params.max_length_S[place_B] - slot.length_S[place_B] - 1
        self._wanted_B[:B] = torch.minimum(slot.draft_limit_S[place_B], room_B).clamp(min=0, max=links) * going_B
        self._count_B[:B] = 0

    def _link(self, batch: StepBatch, k: int) -> None:
        """A chain that met a dead end requests no more rows: the values after it are no tokens."""
        B = batch.num_lanes
        batch.lane.drafting_B[:B] = self._going_B[:B] & (self._wanted_B[:B] > k) & (self._count_B[:B] == k)

    @torch.no_grad()
    def _forward(self, batch: StepBatch, k: int, links: int, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        B = batch.num_lanes
        if k == 0:
            going_B, wants_BL = self._going_B[:B], self._link_L[:links] < self._wanted_B[:B, None]
            self._logits_BV = self.net.first(batch, place_of(batch), going_B, wants_BL, page_table_BN, hidden)
        else:
            self._logits_BV = self.net.next(self._ids[:B, None], self._positions[:B, None], page_table_BN)

    @torch.no_grad()
    def _draw(self, batch: StepBatch, step: StepTensors, k: int) -> None:
        assert self._logits_BV is not None, "the forward comes first"
        lane, B = batch.lane, batch.num_lanes
        draw_drafts(self._logits_BV, step, k, d2t_V=self.net.d2t_V)
        self._logits_BV = None
        if self._jump_forward and batch.any_guided:
            put_jump_forward(batch, place_of(batch), k)
        drawn_B = lane.drafts_BR[:B, k]
        self._count_B[:B] += (drawn_B >= 0) & lane.drafting_B[:B]
        self._ids[:B] = drawn_B.clamp(min=0)
        # A lane that wants no more drafts writes no more keys: its sequence may own no page after them.
        next_B = batch.slot.length_S[place_of(batch)] + k
        on_B = self._going_B[:B] & (self._wanted_B[:B] > k + 1)
        self._positions[:B] = torch.where(on_B, next_B, -1)

    def _finish(self, batch: StepBatch, links: int) -> None:
        slot, lane, B, place_B = batch.slot, batch.lane, batch.num_lanes, place_of(batch)
        going_B, count_B = self._going_B[:B], self._count_B[:B]
        drawn_BK = going_B[:, None] & (torch.arange(links, device=count_B.device) < count_B[:, None])
        slot.drafts_SR[place_B, :links] = torch.where(
            drawn_BK, lane.drafts_BR[:B, :links], slot.drafts_SR[place_B, :links]
        )
        if self._jump_forward and batch.any_guided:
            count_B = with_jump_forward(batch, count_B, self._wanted_B[:B])
        # A lane that emitted nothing reuses drafts and rows in its next step; a lane that was cut short has none.
        previous_B = torch.where(lane.result.num_emitted_B[:B] == 0, slot.num_drafts_S[place_B], 0)
        slot.num_drafts_S[place_B] = torch.where(going_B, count_B, previous_B).int()
        lane.drafting_B[:B] = going_B

    def __repr__(self) -> str:
        return f"<ChainDrafter of {self._links} over {self.net!r}>"
