"""Launches steps on a stream that runs at once: the CPU's counterpart of `device/graphs.py`.

A batch has exactly its lanes and as many rows as its longest draft needs. Invariant: when `launch` returns, the
step has run and its results are in the ring. Not responsible for: the content of a step (see program.py).
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.handle import StepHandle
from gpu_engine.step.output_ring import OutputRing, StepOutputs
from gpu_engine.step.program import StepProgram


class StepLauncher(Protocol):
    """Launches steps and reads them back, in one order. Used by the engine thread alone."""

    def launch(self, handle: StepHandle[Any]) -> None:
        """Start the step and fill the handle's `num_lanes`, `num_rows` and `entry`. Does not wait for a device."""

    def read(self, handle: StepHandle[Any]) -> StepOutputs:
        """Wait for the step and return its outputs, padded lanes at the end. Raises when the device failed."""


class DirectLauncher:
    """Runs each step at its launch.

    Args:
        program: over a stream that runs at once.
        slot, lane: the program's buffers.
        ring: the program's.
        max_step_rows: rows that all lanes of a step may have together.
    """

    def __init__(
        self, program: StepProgram, slot: SlotBuffers, lane: LaneBuffers, ring: OutputRing, max_step_rows: int
    ) -> None:
        assert program.stream.runs_at_once
        self._program, self._slot, self._lane, self._ring = program, slot, lane, ring
        self._max_step_rows = max_step_rows

    @torch.inference_mode()
    def launch(self, handle: StepHandle[Any]) -> None:
        """Run the step."""
        lane, B = self._lane, len(handle.slots)
        place_B = torch.tensor(handle.slots)
        lane.slots_B[:B] = place_B
        lane.slot_gens_B[:B] = torch.tensor(handle.slot_gens, dtype=torch.int32)
        lane.guided_B[:B] = torch.tensor(handle.guided)
        share = max(1, min(lane.drafts_BR.shape[1], self._max_step_rows // B))
        longest = 1 + int(self._slot.num_drafts_S[place_B].max())
        batch = StepBatch(self._slot, lane, B, min(longest, share), handle.any_guided, share, place_B)
        self._program(batch)
        handle.num_lanes, handle.num_rows = B, batch.num_rows
        handle.entry = self._ring.push(batch, logprobs=handle.wants_logprobs)
        handle.ended_s = time.perf_counter()

    def read(self, handle: StepHandle[Any]) -> StepOutputs:
        """Return the outputs."""
        return self._ring.read(handle.entry)
