"""The grammar as a drafter: the tokens that it forces next come first, and another drafter goes on behind them.

A lookup's candidates may go with the question, as a tree: then the grammar process also takes, behind what it forces,
the likeliest path that it allows. Forced text is certain and its spelling in tokens is not, so these tokens are drafts
like any other: verified, never injected (jump-forward in SGLang, Zheng et al. 2023, injects them). Invariant: a batch
without a guided lane requests nothing. Not responsible for: the choice of jump-forward tokens and among candidates (the
grammar process), their request (see step/stream_sync.py), how the drafter behind goes on (see
`LaneBuffers.num_jump_forward_B`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.prefill import Chunks, Hidden
from gpu_engine.step.program import Drafter
from gpu_engine.step.sync import Sync
from kernels.accept import StepTensors


class Suggester(Drafter, Protocol):
    """A drafter whose candidates may go to the grammar process in front of its drafts."""

    def suggest(self, batch: StepBatch) -> None:
        """Enqueue the launch that writes `tree_SR` and `num_nodes_S` of the lanes in `drafting_B`."""

    def suggest_nothing(self, batch: StepBatch) -> None:
        """Enqueue the launch that leaves no candidates to any slot."""


class JumpForwardDrafter:
    """Asks the grammar before another drafter proposes.

    Args:
        behind: goes on behind the forced tokens.
        sync: of the step.
        suggester: `behind`, if its candidates go with the request, so that the grammar chooses among them.
        max_suggesting_lanes: in steps with more lanes none go with it.
    """

    def __init__(
        self, behind: Drafter, sync: Sync, suggester: Suggester | None = None, *, max_suggesting_lanes: int = 1 << 30
    ) -> None:
        self.behind, self._sync, self._suggester = behind, sync, suggester
        self._max_suggesting_lanes = max_suggesting_lanes
        self.layers = behind.layers

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Let the other drafter see the tokens."""
        self.behind.prefill(chunks, hidden)

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue the question, a short wait, and the other drafter. Where nothing is proposed, nothing is asked."""
        if batch.any_guided and batch.max_rows > 1:
            if self._suggester is not None:
                if batch.num_lanes <= self._max_suggesting_lanes:
                    self._suggester.suggest(batch)
                else:
                    self._suggester.suggest_nothing(batch)
            self._sync.post_jump_forward(batch)
            self._sync.await_jump_forward(batch)
        self.behind.propose(batch, step, page_table_BN, hidden)

    def __repr__(self) -> str:
        return f"<JumpForwardDrafter, then {self.behind!r}>"
