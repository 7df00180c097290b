"""The step program: verify K drafts with the target, sample, and draft again.

The same program runs on a CPU, is captured into CUDA graphs, and is recorded by the tests. Everything in it is a launch
of the stream. Invariant: the launches depend on `num_lanes`, `num_rows` and `any_guided` of the batch alone,
and every number that a launch needs is in a buffer of fixed address. (On a stream that runs at once a drafter may stop
its chain early.) Not responsible for: which sequences are in the batch (see core/scheduler.py), capturing (see
device/graphs.py), prefill (see prefill.py).

Shapes: B lanes, P rows of this step, R rows a slot, N pages of a sequence, V columns of the logits.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.launches import StepLaunches
from gpu_engine.step.output_ring import OutputRing
from gpu_engine.step.prefill import Chunks, Hidden
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import Sync
from kernels.accept import StepTensors
from kernels.cuda.row_state import DeviceRows
from kernels.paged_attention import KVPages


class Drafter(Protocol):
    """Proposes the tokens that the next step verifies."""

    layers: tuple[int, ...]
    """Target layers whose input the drafter needs."""

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Process the tokens of some sequences, with the target's states at them. Called inside a launch of the
        stream."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue the launches that write `drafts_SR` and `num_drafts_S` of the lanes in `drafting_B`.

        The drafts of a lane that emitted nothing are unchanged, since mask rows are cached for them.
        """


class StepProgram:
    """One step, enqueued by a call. Owns the step's inputs.

    Args:
        stream: where the step is enqueued.
        launches: of the stream's device.
        model: the target, on that device.
        pages: the target's cache.
        sync: over the same stream.
        drafter: over the same stream.
        slot: buffers on the device, with one slot more than sequences have, for padded lanes.
        lane: buffers of as many lanes as the largest batch.
        ring: where the results go.
        rows: tensors that sampling on a GPU needs; None on a CPU.
    """

    def __init__(
        self,
        stream: Stream,
        launches: StepLaunches,
        model: LoadedModel,
        pages: list[KVPages],
        sync: Sync,
        drafter: Drafter,
        slot: SlotBuffers,
        lane: LaneBuffers,
        ring: OutputRing,
        rows: DeviceRows | None = None,
    ) -> None:
        self.stream, self.model, self.sync, self.drafter, self.ring = stream, model, sync, drafter, ring
        self._launches, self._pages, self._slot, self._lane, self._rows = launches, pages, slot, lane, rows
        (lanes, R), N = lane.drafts_BR.shape, slot.page_table_SN.shape[1]
        self._ids = torch.zeros(lanes * R, dtype=torch.int64, device=stream.device)
        self._positions = torch.zeros(lanes * R, dtype=torch.int32, device=stream.device)
        self._table_BN = torch.zeros(lanes, N, dtype=torch.int32, device=stream.device)
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        """By (B, P): the views of the three buffers that such a step uses."""
        self._logits_NV: torch.Tensor | None = None
        self._hidden: Hidden = dict.fromkeys(drafter.layers)
        """Filled by every forward, for the drafter."""

    def __call__(self, batch: StepBatch) -> None:
        """Enqueue one verify step for every lane and the drafting behind it; the ring gets the results."""
        kernel, table_BN, step = self.stream.kernel, self._inputs(batch)[2], self._tensors(batch)
        kernel(self._load, batch)
        self.sync.post(batch)  # the sidecar rolls back, accepts and fills rows while the target runs
        kernel(self._forward, batch)
        self.sync.await_rows(batch)
        kernel(self._accept, batch, step)
        kernel(self._advance, batch)
        self.drafter.propose(batch, step, table_BN, self._hidden)
        self.ring.pack(batch)

    def warm_up(self, num_rows: int) -> None:
        """Run the target over a made-up token of the spare slot, in page 0, so that libraries plan and allocate early.

        For a stream that runs at once; a device runs the whole step over padding before it captures.
        """
        slot, lane = self._slot, self._lane
        spare = len(slot.length_S) - 1
        slot.length_S[spare], slot.num_drafts_S[spare], lane.slots_B[0] = 1, num_rows - 1, spare
        batch = StepBatch(slot, lane, 1, num_rows, any_guided=False)
        self.stream.kernel(self._load, batch)
        self.stream.kernel(self._forward, batch)
        self._logits_NV = None
        slot.num_drafts_S[spare] = slot.length_S[spare] = 0

    def _load(self, batch: StepBatch) -> None:
        self._launches.load(batch, *self._inputs(batch))

    @torch.no_grad()
    def _forward(self, batch: StepBatch) -> None:
        ids_BP, positions_BP, table_BN = self._inputs(batch)
        context = AttentionContext(self._pages, table_BN, positions_BP, hidden=self._hidden)
        self._logits_NV = self.model.logits(ids_BP, context)

    def _accept(self, batch: StepBatch, step: StepTensors) -> None:
        assert self._logits_NV is not None, "the forward comes first"
        self._launches.accept(batch, self._logits_NV, step)
        self._logits_NV = None  # the next launches, or the next capture, may use its memory

    def _advance(self, batch: StepBatch) -> None:
        self._launches.advance(batch, self.sync.store)

    def _inputs(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids [B, P], positions [B, P] and page table [B, N] of this batch."""
        B, P = batch.num_lanes, batch.num_rows
        if (B, P) not in self._views:
            ids_BP, positions_BP = self._ids[: B * P].view(B, P), self._positions[: B * P].view(B, P)
            self._views[B, P] = (ids_BP, positions_BP, self._table_BN[:B])
        return self._views[B, P]

    def _tensors(self, batch: StepBatch) -> StepTensors:
        slot, lane = batch.slot, batch.lane
        return StepTensors(
            batch.slots_B,
            lane.drafts_BR,
            lane.num_drafts_B,
            lane.kinds_BR,
            lane.forced_BR,
            *self.sync.rows(),
            slot.history_SL,
            slot.length_S,
            slot.params,
            lane.result,
            self._rows,
        )
