"""Launches steps on a stream that runs at once: the CPU's counterpart of `device/graphs.py`.

A batch has exactly its lanes, and as many rows a lane as the most drafts that one of them verifies. Invariant: when
`launch` returns, the step has run and its results are in the ring. Not responsible for: the content of a step (see
program.py).
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.handle import StepHandle
from gpu_engine.step.output_ring import OutputRing, StepOutputs
from gpu_engine.step.program import StepProgram
from gpu_engine.step.prompt_rows import chunks_of, prompt_rows
from kernels.logprobs import BeamRows


class StepLauncher(Protocol):
    """Launches steps and reads them back, in one order. Used only by the engine thread."""

    @property
    def max_drafts(self) -> int:
        """The most drafts of a lane in any step."""

    def drafts(self, slots: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        """Return the drafts that the slots have for their next step; None where the host cannot know them yet."""

    def shapes(self, num_lanes: int, *, guided: bool) -> list[tuple[int, int]] | None:
        """Return (rows a lane, rows in all) of every forward that such a step may have, ascending; None: the forward
        has the rows of the lanes' drafts, and no others."""

    def launch(self, handle: StepHandle[Any]) -> None:
        """Start the step and fill the handle's fields of the launch. Does not wait for a device.

        At most `handle.draft_limits` drafts are verified.
        """

    def read(self, handle: StepHandle[Any]) -> StepOutputs:
        """Wait for the step and return its outputs, padded lanes at the end. Raises when the device failed."""


class DirectLauncher:
    """Runs each step at its launch.

    Args:
        program: over a stream that runs at once.
        slot, lane: the program's buffers.
        ring: the program's.
    """

    def __init__(self, program: StepProgram, slot: SlotBuffers, lane: LaneBuffers, ring: OutputRing) -> None:
        assert program.stream.runs_at_once
        self._program, self._slot, self._lane, self._ring = program, slot, lane, ring
        self._max_drafts = lane.drafts_BR.shape[1] - 1
        # Read as arrays: an operation of torch takes some microseconds, of which a step has few.
        self._num_drafts_S, self._drafts_SR = slot.num_drafts_S.numpy(), slot.drafts_SR.numpy()
        self._slots: tuple[int, ...] = ()
        self._place_B = torch.zeros(0, dtype=torch.int64)
        """`_slots` as a tensor: a batch has the slots of the last one in most steps."""
        self._at_B = self._place_B.numpy()
        """The same memory as an array."""
        self._lanes: tuple[tuple[Any, ...], ...] = ()
        """Slots, their generations and whether they are guided, as the lane buffers have them."""
        self._limits: tuple[int, ...] = ()
        """The limits in the lane buffers."""

    @property
    def max_drafts(self) -> int:
        """K, or F where that is more."""
        return self._max_drafts

    def drafts(self, slots: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the drafts: every step so far has run."""
        counts = self._num_drafts_of(slots)
        if self.max_drafts == 0 or not any(counts):
            return [()] * len(slots)
        rows = self._drafts_SR[self._at_B].tolist()
        return [tuple(row[:count]) for row, count in zip(rows, counts, strict=True)]

    def shapes(self, num_lanes: int, *, guided: bool) -> list[tuple[int, int]] | None:
        """Return None where the program packs rows; else any number of rows, for all lanes alike."""
        if self._program.packs:
            return None
        return [(rows, num_lanes * rows) for rows in range(1, self.max_drafts + 2)]

    @torch.inference_mode()
    def launch(self, handle: StepHandle[Any]) -> None:
        """Run the step."""
        lane, B, R = self._lane, len(handle.slots), self.max_drafts + 1
        place_B, limits = self._place_of(handle.slots), handle.draft_limits or (R - 1,) * B
        if (lanes := (handle.slots, handle.slot_gens, handle.guided)) != self._lanes:
            lane.slots_B[:B] = place_B
            lane.slot_gens_B[:B] = torch.tensor(handle.slot_gens, dtype=torch.int32)
            lane.guided_B[:B] = torch.tensor(handle.guided)
            self._lanes = lanes
        if limits != self._limits:
            lane.draft_limit_B[:B] = torch.tensor(limits, dtype=torch.int32)
            self._limits = limits
        num_drafts = self._num_drafts_of(handle.slots) if any(limits) else ()
        P = 1 + max(map(min, num_drafts, limits), default=0)
        max_rows, max_links = 1 if handle.propose_rows == 1 else R, (handle.propose_rows or R) - 1
        prompts = None
        if handle.chunks:
            with_adapters = self._program.model.adapters is not None
            prompts = prompt_rows(self._slot, handle.chunks, with_adapters=with_adapters)
            # Before the step, after which the drafter may already propose for a prompt that ends here.
            self._program.drafter.prefill(chunks_of(self._slot, handle.chunks), {})
        beams = None
        if handle.beams is not None:
            beams = BeamRows.of(handle.beams.lanes, handle.beams.edits, self._program.stream.device)
        shape = (B, P, handle.any_guided, max_rows)
        batch = StepBatch(
            self._slot,
            lane,
            *shape,
            place_B,
            prompts,
            max_links,
            handle.processed,
            beams=beams,
            late_lanes=handle.late_lanes,
        )
        self._program(batch)
        if handle.processed and self._program.processing is not None:
            handle.failures = self._program.processing.host.failures
        handle.num_lanes, handle.num_rows, handle.forward_rows = B, P, self._program.forward_rows
        handle.entry = self._ring.push(batch, logprobs=handle.wants_logprobs, masses=handle.wants_masses)
        handle.propose_ms, handle.ended_s = self._program.propose_s * 1e3, time.perf_counter()

    def _place_of(self, slots: tuple[int, ...]) -> torch.Tensor:
        """Return the slots as int64 [B]; the tensor is not written to."""
        if slots != self._slots:
            self._slots, self._place_B = slots, torch.tensor(slots)
            self._at_B = self._place_B.numpy()
        return self._place_B

    def _num_drafts_of(self, slots: tuple[int, ...]) -> list[int]:
        self._place_of(slots)
        counts: list[int] = self._num_drafts_S[self._at_B].tolist()
        return counts

    def read(self, handle: StepHandle[Any]) -> StepOutputs:
        """Return the outputs."""
        return self._ring.read(handle.entry)
