"""The grammar as a drafter: the tokens that it forces next come first, and another drafter goes on behind them.

Forced text is certain and its spelling in tokens is not, so these are drafts like any other: verified, never injected
(jump-forward, as in SGLang, Zheng et al. 2023, injects). One invariant: a batch without a guided lane asks nothing. Not
here: what is forced (the grammar process), how it is asked (sync.py), and how the drafter behind goes on: see
`LaneBuffers.num_jump_forward_B`.
"""

from __future__ import annotations

import torch

from gpu_engine.drafters.nets import Hidden
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.device_program import DeviceDrafter
from gpu_engine.step.prefill import Chunks
from gpu_engine.step.program import Drafter
from gpu_engine.step.sync import Sync
from kernels.accept import StepTensors


class JumpForwardDrafter:
    """Asks the grammar before another drafter proposes."""

    def __init__(self, behind: Drafter, sync: Sync) -> None:
        self._behind, self._sync = behind, sync
        self.layers = behind.layers

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """As the other drafter does."""
        self._behind.prefill(chunks, hidden)

    def propose(self, batch: StepBatch, step: StepTensors, hidden: Hidden) -> None:
        """Ask, wait briefly, and let the other drafter write the drafts."""
        if batch.any_guided:
            self._sync.post_jump_forward(batch)
            self._sync.await_jump_forward(batch)
        else:
            batch.lane.num_jump_forward_B[: batch.num_lanes] = 0
        self._behind.propose(batch, step, hidden)

    def __repr__(self) -> str:
        return f"<ForcedFirst, then {type(self._behind).__name__}>"


class JumpForwardLaunches:
    """The same, as launches."""

    def __init__(self, behind: DeviceDrafter, sync: Sync) -> None:
        self._behind, self._sync = behind, sync
        self.layers = behind.layers

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """As the other drafter does."""
        self._behind.prefill(chunks, hidden)

    def enqueue(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue the question, a short wait, and the other drafter."""
        if batch.any_guided:
            self._sync.post_jump_forward(batch)
            self._sync.await_jump_forward(batch)
        self._behind.enqueue(batch, step, page_table_BN, hidden)

    def __repr__(self) -> str:
        return f"<ForcedFirstLaunches, then {type(self._behind).__name__}>"


class NothingBehind:
    """Proposes what is forced and no more."""

    layers: tuple[int, ...] = ()

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Nothing."""

    def propose(self, batch: StepBatch, step: StepTensors, hidden: Hidden) -> None:
        """Write `num_drafts_S` of the lanes' slots: the tokens are there."""
        slot, slots, forced_B = batch.slot, batch.slots_B.long(), batch.lane.num_jump_forward_B[: batch.num_lanes]
        slot.num_drafts_S[slots] = torch.where(forced_B < 0, slot.num_drafts_S[slots], forced_B)
