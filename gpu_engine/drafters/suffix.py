"""Prompt lookup on a CPU, in the sequence and the suffix index: votes for what the target wrote after the same tokens.

The places of the sequence's own text and those of the answers of its scope vote together (kernels/native/suffix.c has
the rule), so there is one confidence for both, and a lane gets as many drafts as that justifies. Invariant: the drafts
of a lane that emitted nothing are unchanged, whatever was added to the index meanwhile. Not responsible for: the
lookup inside a captured graph (see ngram.py), the memory of the answers (see suffix_index.py), masks; verification
rejects a draft that breaks the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_engine.api.request import SuffixScope
from gpu_engine.drafters.suffix_index import SuffixIndex
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Stream
from kernels.accept import StepTensors
from kernels.suffix import BareWords, SuffixLanes, SuffixSlots, SuffixVotes

CONTEXT_TOKENS = 4
"""Of the prompt's end, before an answer in the index: so the index knows how answers begin."""


class SuffixDrafter:
    """The drafter `ngram` on a stream that runs at once. Used on the engine's thread.

    Args:
        stream: of the steps.
        slot, lane: of the step program.
        index: earlier answers; None: only the text of the sequence.
        ngram_max: the setting.
        words: of the vocabulary, so that a text after a quote is found after a space; None: it is not.
        jump_forward: the drafts begin with the tokens that the grammar forces.
    """

    layers: tuple[int, ...] = ()

    def __init__(
        self,
        stream: Stream,
        slot: SlotBuffers,
        lane: LaneBuffers,
        index: SuffixIndex | None,
        ngram_max: int,
        *,
        words: BareWords | None = None,
        jump_forward: bool = False,
    ) -> None:
        assert stream.runs_at_once
        self._stream, self.index, self._jump_forward = stream, index, jump_forward
        self._max_drafts = slot.drafts_SR.shape[1] - 1
        num_slots, runs, r = len(slot.length_S), (1, ngram_max), lane.result
        slots = SuffixSlots(
            history_SL=slot.history_SL,
            length_S=slot.length_S,
            prompt_length_S=slot.params.prompt_length_S,
            draft_limit_S=slot.draft_limit_S,
            max_length_S=slot.params.max_length_S,
            rings_S=index.rings_S if index else torch.zeros(num_slots, dtype=torch.int64),
            drafts_SR=slot.drafts_SR,
            num_drafts_S=slot.num_drafts_S,
            from_ring_S=torch.zeros(num_slots, dtype=torch.int32),
        )
        assert len(slots.rings_S) == num_slots
        lanes = SuffixLanes(
            slots_B=lane.slots_B,
            num_emitted_B=r.num_emitted_B,
            num_jump_forward_B=lane.num_jump_forward_B,
            num_verified_B=lane.num_drafts_B,
            num_accepted_B=r.num_accepted_B,
        )
        self._votes = SuffixVotes(lanes, slots, *runs, words)
        # One lane, for the drafts of a sequence that just got its slot.
        self._first_slot_B, none_B = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        first = SuffixLanes(
            slots_B=self._first_slot_B,
            num_emitted_B=torch.ones(1, dtype=torch.int32),
            num_jump_forward_B=none_B,
            num_verified_B=none_B,
            num_accepted_B=none_B,
        )
        self._first_votes = SuffixVotes(first, slots, *runs, words)

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Return: the history is all that a lookup needs."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Count what became of the index's drafts, and write the next ones."""
        self._stream.kernel(self._propose, batch)

    def _propose(self, batch: StepBatch) -> None:
        if self.index is not None:
            self._votes.count(batch.num_lanes)
        jump_forward = self._jump_forward and batch.any_guided
        self._votes.draft(batch.num_lanes, batch.max_rows - 1, jump_forward=jump_forward)

    def assign(self, slot: int, scope: SuffixScope | None) -> None:
        """Let the sequence that just got the slot look into its scope, and draft for its first step.

        Called when the slot's buffers are written. Without an answer in its scope the first step has no drafts: a
        prompt seldom says how the answer begins.
        """
        if self.index is None:
            return
        self.index.assign(slot, scope)
        if int(self.index.rings_S[slot]):
            self._first_slot_B[0] = slot
            self._first_votes.draft(1, self._max_drafts, jump_forward=False)

    def add(self, scope: SuffixScope | None, prompt_ids: Sequence[int], answer: Sequence[int]) -> None:
        """Add the answer of a sequence that has ended to its scope; None: to none."""
        if self.index is not None and scope is not None and len(answer) > 1:
            self.index.add(scope, [*prompt_ids[-CONTEXT_TOKENS:], *answer])

    @property
    def num_index_drafts(self) -> tuple[int, int]:
        """Drafts of the index that were verified, and accepted, since the start."""
        return self._votes.num_verified, self._votes.num_accepted

    def __repr__(self) -> str:
        return f"<SuffixDrafter {self._votes} {self.index}>"
