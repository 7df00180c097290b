"""The parts of a step that are written once for each device.

`native_launches.py` has the CPU's, `device/launches.py` one Triton kernel for each method. The tests compare both with
plain torch. The rules that both follow:

- A cached mask row is not requested. A slot whose sequence has ended requests nothing.
- A guided row that did not arrive is DEFER for a verify step and ALL for a draft.
- A lane goes on to draft when it emitted a token, did not finish, and no row blocked it.
- A lane that emitted a token drops its cached rows. A lane that emitted nothing reuses them in its next step.

Invariant: the launches depend only on `num_lanes`, `num_rows` and `any_guided` of the batch. The methods
without this property say so: they look at values, and run on a stream that runs at once. A padded lane has slot -1; it
requests nothing, its rows are ALL, and it writes to the last slot, which no sequence has. Not responsible for: the
transport of records and answers (see stream_sync.py).

Shapes: S slots (the last one is spare), B lanes, R rows a slot, P rows of this step, N pages of a sequence, W' words of
a mask row's stride.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.post_buffers import PostBuffers
from kernels.accept import StepTensors
from kernels.logprobs import RowLogprobs

VERIFY, PROPOSE = -1, -2
"""Instead of the number of a draft. PROPOSE requests no mask row, but jump-forward tokens."""


class StepLaunches(Protocol):
    """The launches of a step that each device implements. Every method runs inside `Stream.kernel`."""

    def load(
        self, batch: StepBatch, ids_BP: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor
    ) -> None:
        """Cut the step's inputs from the slots: the last token and the drafts after it.

        Fills `ids_BP` (int64, 0 for padding), `positions_BP` (int32, -1 for padding), `page_table_BN`, `drafts_BR` and
        `num_drafts_B` (at most P - 1 and the lane's `draft_limit_B`).
        """

    def accept(self, batch: StepBatch, logits_NV: torch.Tensor, step: StepTensors) -> None:
        """Verify and sample. A slot in `done_S` emits nothing; a sequence that ends here sets it."""

    def advance(self, batch: StepBatch, store: RowStore) -> None:
        """Fill `drafting_B`, and drop the cached rows of the lanes that emitted a token."""

    def pack(self, batch: StepBatch, store: RowStore, post: PostBuffers, k: int) -> None:
        """Fill the inputs of `post` for draft k, VERIFY or PROPOSE, and advance `posted_S` by the tokens in it.

        PROPOSE leaves `posted_S`: the next post carries the same tokens again. A lane without a
        request gets slot -1 there.
        """

    def cache_rows(
        self, batch: StepBatch, store: RowStore, post: PostBuffers, k: int, post_seq: torch.Tensor | None
    ) -> None:
        """Cache the rows that `post` requested, and fill `kinds_BR` and `forced_BR`: row k, or with VERIFY every row.

        `post_seq` int64 [1] gets the sequence number of the answers.
        """

    def take_jump_forward(self, batch: StepBatch, post: PostBuffers, vocab_size: int) -> None:
        """Fill `num_jump_forward_B`, and put the tokens into `drafts_SR` and after the history.

        `num_drafts_S` of the lanes that emitted a token is the same number. A token outside [0, `vocab_size`) ends
        a lane's tokens, and is not one of them.
        """

    def drop_drafts(self, batch: StepBatch) -> None:
        """Leave no drafts, and no jump-forward tokens, to the lanes that emitted a token. Only for a stream that runs
        at once."""

    def row_logprobs(self, logits_NV: torch.Tensor, rows: RowLogprobs) -> None:
        """Fill the results of `rows`: log-probabilities of its tokens, one for each row of the logits."""

    def propose_ngram(self, batch: StepBatch, ngram_max: int, *, jump_forward: bool) -> None:
        """Write drafts by prompt lookup; with `jump_forward` after the jump-forward tokens. Where the slots have
        `parents_SR`, also a branch, and the parents."""


def place_of(batch: StepBatch) -> torch.Tensor:
    """Return each lane's slot, int64 [B]; the spare slot for a padded lane."""
    if batch.place_B is not None:
        return batch.place_B
    return torch.where(batch.slots_B < 0, len(batch.slot.length_S) - 1, batch.slots_B).long()
