"""The step program over a stream: the same step as step.py, as launches alone, for capture and replay.

One invariant: what is launched depends on nothing but `num_lanes`, `num_rows` and `any_guided` of the batch; every
number that a launch needs is in a buffer of fixed address. Padded lanes have slot -1. Not here: capturing (graph.py),
prefill (device_prefill.py), who is in the batch, what became of the tokens.

Shapes: B lanes, P rows of this step, R rows a slot, N pages of a sequence, V columns.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.drafters.nets import Hidden
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.device.ring import OutputRing
from gpu_engine.step.prefill import Chunks
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import NoSync, Sync
from kernels.accept import StepTensors, accept
from kernels.cuda.row_state import DeviceRows
from kernels.paged_attention import KVPages


class DeviceDrafter(Protocol):
    """Enqueues what proposes the tokens that the next step verifies."""

    layers: tuple[int, ...]
    """Target layers whose input it wants to see."""

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """See some sequences' tokens go by, with the target's states there. Called inside a launch of the stream's."""

    def enqueue(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue the writing of `drafts_SR` and `num_drafts_S` of the lanes' slots."""


class DeviceStep:
    """One step, enqueued by a call. Owns the step's inputs and the target's cache.

    Args:
        stream: where it is enqueued.
        model: the target, on the stream's device.
        pages: its cache, token-major.
        sync: over the same stream.
        drafter: the same.
        slot: buffers on the device, with one slot more than sequences have.
        lane: the same; as many lanes as the largest batch.
        rows: what sampling on the device needs.
        ring: where the results go.
    """

    def __init__(
        self,
        stream: Stream,
        model: LoadedModel,
        pages: list[KVPages],
        sync: Sync,
        drafter: DeviceDrafter,
        slot: SlotBuffers,
        lane: LaneBuffers,
        rows: DeviceRows,
        ring: OutputRing,
    ) -> None:
        self.stream, self.model, self.sync, self.ring = stream, model, sync, ring
        self._pages, self._drafter, self._slot, self._lane, self._rows = pages, drafter, slot, lane, rows
        (most, R), N = lane.drafts_BR.shape, slot.page_table_SN.shape[1]
        device = stream.device
        self._ids = torch.zeros(most * R, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most * R, dtype=torch.int32, device=device)
        self._table_BN = torch.zeros(most, N, dtype=torch.int32, device=device)
        self._logits_NV: torch.Tensor | None = None
        self._hidden: Hidden = dict.fromkeys(drafter.layers)
        """Filled by every forward, for the drafting behind it."""

    def __call__(self, batch: StepBatch) -> None:
        """Enqueue one verify step for every lane and the drafting behind it; the ring has the results."""
        kernel, table_BN = self.stream.kernel, self._table_BN[: batch.num_lanes]
        kernel(self._load, batch)
        self.sync.post(batch)  # the sidecar rolls back, accepts and fills rows while the target runs
        kernel(self._forward, batch)
        self.sync.await_rows(batch)
        kernel(self._accept, batch)
        self.sync.settle(batch)
        self._drafter.enqueue(batch, self._tensors(batch), table_BN, self._hidden)
        self.ring.pack(batch)

    def _load(self, batch: StepBatch) -> None:
        from kernels.cuda.step_inputs import load_step  # a CPU install has no Triton

        slot, lane = batch.slot, batch.lane
        ids_BP, positions_BP = self._inputs(batch)
        load_step(
            *(batch.slots_B, slot.history_SL, slot.length_S, slot.drafts_SR, slot.num_drafts_S, slot.done_S),
            *(slot.page_table_SN, ids_BP, positions_BP, lane.drafts_BR, lane.num_drafts_B, self._table_BN),
        )

    @torch.no_grad()
    def _forward(self, batch: StepBatch) -> None:
        ids_BP, positions_BP = self._inputs(batch)
        table_BN = self._table_BN[: batch.num_lanes]
        context = AttentionContext(self._pages, table_BN, positions_BP, hidden=self._hidden)
        self._logits_NV = self.model.logits(ids_BP, context)

    def _accept(self, batch: StepBatch) -> None:
        assert self._logits_NV is not None, "the forward is before this"
        accept(self._logits_NV, self._tensors(batch), num_rows=batch.num_rows)
        self._logits_NV = None  # its memory is for whatever this step, or the next capture, needs

    def _inputs(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and positions of this batch, [B, P]."""
        shape = (batch.num_lanes, batch.num_rows)
        count = batch.num_lanes * batch.num_rows
        return self._ids[:count].view(shape), self._positions[:count].view(shape)

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


class FreeSync(NoSync):
    """For an engine without a grammar process: every row is free, by a launch."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def check(self, num_lanes: int) -> None:
        """Nothing is posted."""

    def await_rows(self, batch: StepBatch) -> None:
        """Enqueue: free every row."""
        self._stream.kernel(super().await_rows, batch)

    def await_draft(self, batch: StepBatch, k: int) -> None:
        """Enqueue: free the row."""
        self._stream.kernel(super().await_draft, batch, k)


class NgramKernel:
    """Prompt lookup, one launch."""

    def __init__(self, stream: Stream, ngram_max: int, ngram_min: int, *, forced: bool = False) -> None:
        self._stream, self._max, self._min, self._forced = stream, ngram_max, ngram_min, forced

    layers: tuple[int, ...] = ()

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Nothing: the history is all it needs."""

    def enqueue(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue the lookup; a lane without news finds the drafts that it has."""
        self._stream.kernel(self._propose, batch)

    def _propose(self, batch: StepBatch) -> None:
        from kernels.cuda.ngram import propose_ngram

        slot, forced = batch.slot, self._forced and batch.any_guided
        propose_ngram(
            *(batch.slots_B, slot.history_SL, slot.length_S, slot.draft_limit_S, slot.params.max_length_S),
            *(slot.drafts_SR, slot.num_drafts_S),
            ngram_max=self._max,
            ngram_min=self._min,
            max_rows=batch.max_rows,
            num_jump_forward_B=batch.lane.num_jump_forward_B if forced else None,
        )


class NoDrafts:
    """Proposes nothing: a slot has no drafts since it was seated, or those alone that the sync wrote."""

    layers: tuple[int, ...] = ()

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Nothing."""

    def enqueue(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Nothing."""
