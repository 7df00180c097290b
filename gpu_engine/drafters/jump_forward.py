"""The grammar as a drafter: the tokens that it forces next come first, and another drafter continues after them.

Forced text is certain, and its spelling in tokens is not. So these tokens are drafts like any other: verified, never
injected (jump-forward in SGLang, Zheng et al. 2023, injects them). Invariant: a batch without a guided lane requests
nothing. Not responsible for: the choice of jump-forward tokens (the grammar process), their request (see
step/stream_sync.py), or how the next drafter continues (see `LaneBuffers.num_jump_forward_B`).
"""

from __future__ import annotations

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.program import Drafter
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.sync import Sync
from kernels.accept import StepTensors


class JumpForwardDrafter:
    """Asks the grammar before another drafter proposes.

    Args:
        next_drafter: continues after the forced tokens.
        sync: of the step.
    """

    def __init__(self, next_drafter: Drafter, sync: Sync) -> None:
        self.next_drafter, self._sync = next_drafter, sync
        self.layers = next_drafter.layers

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Let the other drafter see the tokens."""
        self.next_drafter.prefill(chunks, hidden)

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue the question, a short wait, and the other drafter. Where nothing is proposed, nothing is asked."""
        if batch.any_guided and batch.max_rows > 1:
            self._sync.post_jump_forward(batch)
            self._sync.await_jump_forward(batch)
        self.next_drafter.propose(batch, step, page_table_BN, hidden)

    def __repr__(self) -> str:
        return f"<JumpForwardDrafter, then {self.next_drafter!r}>"
