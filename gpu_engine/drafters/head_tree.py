"""A head as the drafter of a tree: its likeliest tokens level by level, of which the best are verified (EAGLE-2 and
EAGLE-3, Li et al. 2024 and 2025).

Each level is one forward of the head over the rows of all levels so far. A row attends to its own way through the
tree, whose keys attention takes from the rows of the same forward; so no branch needs its own page, and after
the pairs of true tokens the cache has nothing that is read. The rows of earlier levels are computed again: they cost
no further read of the weights. With jump-forward tokens the tree begins after them (see kernels/cuda/draft_tree.py).

For capture the tree has a fixed shape, and every lane goes through every level. Invariant: a lane's drafts are in the
order of their scores, so the first ones of any number are a tree. Not responsible for: the computation of a pair (see
heads/eagle3.py), the choice of nodes (see kernels/cuda/draft_tree.py), masks of drafts, a stream that runs at once.

Shapes: B lanes, N pages of a sequence, P rows of the tree so far, H hidden size, Vd columns of the head.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import place_of
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Stream
from kernels.accept import StepTensors
from kernels.step_tensors import DraftTree, tree_shape


class TreeNet(Protocol):
    """A head over pairs that computes several continuations at once. See `PairNet`."""

    layers: tuple[int, ...]
    d2t_V: torch.Tensor | None

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """See `DraftNet.prefill`."""

    def last(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, page_table_BN: torch.Tensor,
        hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Store the pairs of the step's emitted tokens; return the head's state after the last of them, [B, H]."""

    def branch(
        self, ids_BP: torch.Tensor, hidden_BPH: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor,
        rows_BXX: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the head's states after the pairs of a tree, [B, P, H]; `rows_BXX` are their ways."""

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Return [B, Vd]."""


class TreeLaunches(Protocol):
    """The launches of a tree, which only a GPU has. Both run inside `Stream.kernel`."""

    def grow_tree(
        self, batch: StepBatch, step: StepTensors, tree: DraftTree, logits_NV: torch.Tensor, k: int,
        shape: tuple[int, int], d2t_V: torch.Tensor | None, *, jump_forward: bool,
    ) -> None:  # fmt: skip
        """Write the candidates of level k, and expand the best ones. `shape`: width and levels."""

    def take_tree(
        self, batch: StepBatch, step: StepTensors, tree: DraftTree, shape: tuple[int, int], max_drafts: int, *,
        jump_forward: bool,
    ) -> None:  # fmt: skip
        """Write the best candidates as the drafts of the lanes that go on, with their parents."""


class TreeDrafter:
    """Owns the net and the tree.

    Args:
        stream: of the step.
        net: on the stream's device.
        launches: of the stream's device.
        jump_forward: the drafts begin with the jump-forward tokens.
        num_lanes: the largest batch.
        num_drafts: K.
    """

    def __init__(
        self,
        stream: Stream,
        net: TreeNet,
        launches: TreeLaunches,
        *,
        jump_forward: bool,
        num_lanes: int,
        num_drafts: int,
    ) -> None:
        self._stream, self.net, self._launches = stream, net, launches
        self._jump_forward, self._num_drafts = jump_forward, num_drafts
        self.layers = net.layers
        self._tree = DraftTree.allocate(num_lanes, stream.device)
        self._hidden_BPH = self._behind_BPH = torch.empty(0)
        """The states before every row so far, and those after the rows of the last level."""
        self._logits_NV: torch.Tensor | None = None

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Let the net see the same tokens."""
        self.net.prefill(chunks, hidden)

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue the levels; the drafts of a lane that emitted nothing are unchanged."""
        kernel, most = self._stream.kernel, min(self._num_drafts, batch.max_links, batch.max_rows - 1)
        shape = tree_shape(most)
        kernel(self._begin, batch, page_table_BN, hidden)
        kernel(self._grow, batch, step, 0, shape)
        for k in range(1, shape[1]):
            kernel(self._forward, batch, k, shape[0], page_table_BN)
            kernel(self._grow, batch, step, k, shape)
        kernel(self._take, batch, step, shape, most)

    @torch.no_grad()
    def _begin(self, batch: StepBatch, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        going_B = batch.lane.drafting_B[: batch.num_lanes]
        behind_BH = self.net.last(batch, place_of(batch), going_B, page_table_BN, hidden)
        self._behind_BPH, self._logits_NV = behind_BH[:, None], self.net.logits(behind_BH)

    @torch.no_grad()
    def _forward(self, batch: StepBatch, k: int, width: int, page_table_BN: torch.Tensor) -> None:
        tree, B, rows = self._tree, batch.num_lanes, k * width
        above_BW = tree.above_BX[:B, rows - width : rows, None].long()
        front_BWH = self._behind_BPH.gather(1, above_BW.expand(-1, -1, self._behind_BPH.shape[2]))
        self._hidden_BPH = front_BWH if k == 1 else torch.cat([self._hidden_BPH, front_BWH], dim=1)
        ids_BP, positions_BP = (t[:B, :rows].contiguous() for t in (tree.ids_BX, tree.positions_BX))
        out_BPH = self.net.branch(ids_BP, self._hidden_BPH, positions_BP, page_table_BN, tree.rows_BXX)
        self._behind_BPH = out_BPH[:, rows - width :]
        self._logits_NV = self.net.logits(self._behind_BPH.flatten(0, 1))

    @torch.no_grad()
    def _grow(self, batch: StepBatch, step: StepTensors, k: int, shape: tuple[int, int]) -> None:
        assert self._logits_NV is not None, "the forward comes first"
        forced = self._jump_forward and batch.any_guided
        self._launches.grow_tree(
            batch, step, self._tree, self._logits_NV, k, shape, self.net.d2t_V, jump_forward=forced
        )
        # The next launches, or the next capture, may use its memory.
        self._logits_NV = None

    def _take(self, batch: StepBatch, step: StepTensors, shape: tuple[int, int], max_drafts: int) -> None:
        forced = self._jump_forward and batch.any_guided
        self._launches.take_tree(batch, step, self._tree, shape, max_drafts, jump_forward=forced)
        self._hidden_BPH = self._behind_BPH = torch.empty(0)

    def __repr__(self) -> str:
        return f"<TreeDrafter of {self._num_drafts} over {self.net!r}>"
