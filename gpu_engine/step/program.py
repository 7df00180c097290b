"""The step program: verify K drafts with the target, sample, and draft again.

The same program runs on a CPU, is captured into CUDA graphs, and is recorded by the tests. Everything in it is a launch
of the stream. Invariant: the launches depend on `num_lanes`, `num_rows`, `any_guided`, `captured_processing` and
`adapted` of the batch alone, and every number that a launch needs is in a buffer of fixed address. (On a stream that
runs at once a drafter may stop its chain early. A step with `host_processed` is never captured: the host calls logits
processors between its launches. A step with `late_lanes` is never captured either: it posts twice.) Not responsible
for: which sequences are in the batch (see core/scheduler.py), capturing (see device/graphs.py), prefill (see
prompt_rows.py).

Shapes: B lanes, P rows of this step, R rows a slot, N pages of a sequence, V columns of the logits.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Protocol

import numpy as np
import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.recurrent.rows import RecurrentForward
from gpu_engine.model.states import SequenceStates
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.launches import StepLaunches, place_of
from gpu_engine.step.output_ring import OutputRing
from gpu_engine.step.processing.captured import mark_failed
from gpu_engine.step.processing.processing import Processing
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import Sync
from kernels.accept import StepTensors
from kernels.cuda.row_state import DeviceRows
from kernels.logprobs import BeamRows, beam_candidates
from kernels.paged_attention import KVPages
from kernels.step_tensors import TreeRows


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


class Compaction(Protocol):
    """Moves the keys and values of the accepted path of each lane after each other; see `PathCompaction`."""

    def __call__(
        self,
        slots_B: torch.Tensor,
        length_S: torch.Tensor,
        num_emitted_B: torch.Tensor,
        tree: TreeRows,
        page_table_BN: torch.Tensor,
    ) -> None:
        """Move them in every layer. Called inside a launch of the stream, after the acceptance."""


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
        processing: the logits processors; None: the server has none.
        compaction: moves the keys of the accepted path of a tree of drafts; None: drafts are chains.
        states: of the target's recurrent layers; None: it has none.
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
        processing: Processing | None = None,
        compaction: Compaction | None = None,
        states: SequenceStates | None = None,
    ) -> None:
        self.stream, self.model, self.sync, self.drafter, self.ring = stream, model, sync, drafter, ring
        self._launches, self._pages, self._slot, self._lane, self._rows = launches, pages, slot, lane, rows
        self.processing, self._compaction, self._states = processing, compaction, states
        assert (compaction is None) == (lane.tree is None)
        self._model_logits_NV: torch.Tensor | None = None
        """The model's own, where captured processors changed those in `_logits_NV`."""
        self._failed_BP: torch.Tensor | None = None
        (lanes, R), N = lane.drafts_BR.shape, slot.page_table_SN.shape[1]
        self._ids = torch.zeros(lanes * R, dtype=torch.int64, device=stream.device)
        self._positions = torch.zeros(lanes * R, dtype=torch.int32, device=stream.device)
        self._table_BN = torch.zeros(lanes, N, dtype=torch.int32, device=stream.device)
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        """By (B, P): the views of the three buffers that such a step uses."""
        self._steps: dict[int, StepTensors] = {}
        """By B."""
        self._logits_NV: torch.Tensor | None = None
        self._first_row_B: torch.Tensor | None = None
        """Of a packed forward: where the rows of each lane begin in the logits."""
        self._hidden: Hidden = dict.fromkeys(drafter.layers)
        """Filled by every forward, for the drafter."""
        self.packs = stream.runs_at_once and (model.skips_padding or not drafter.layers)
        """The forward computes only rows of the lanes' drafts, and no padding between them. A drafter that reads the
        target's states needs them in P rows a lane, so there the model itself must skip padding."""
        self._num_drafts_B = lane.num_drafts_B.numpy() if model.skips_padding else np.zeros(0, dtype=np.int32)
        """The lanes' drafts as an array, where the forward skips padding: on a CPU."""
        self.forward_rows = 0
        """Rows of the last step's forward without those of prompts, on a stream that runs at once."""
        self.mixes = stream.runs_at_once and model.takes_prompts and not drafter.layers
        """A step's forward may have rows of prompts as well. A drafter that reads the target's states has its own
        prefill of them."""
        self.propose_s = 0.0
        """Time of the last step's proposing, in seconds; the same."""
        self._can_defer_head = stream.runs_at_once and model.can_defer_head

    def __call__(self, batch: StepBatch) -> None:
        """Enqueue one verify step for every lane and the drafting after it; the ring gets the results."""
        kernel, table_BN, step = self.stream.kernel, self._inputs(batch)[2], self._tensors(batch)
        kernel(self._load, batch)
        self._post(batch)  # the sidecar rolls back, accepts and fills rows while the target runs
        kernel(self._forward, batch)
        if batch.host_processed:
            self._process_on_host(batch)
        elif batch.captured_processing:
            kernel(self._process_captured, batch)
        self.sync.await_rows(batch)
        if batch.late_lanes:  # asks for their rows, and again for rows that did not come in time
            self.sync.post(batch)
            self.sync.await_rows(batch)
        if self._defers_head(batch):
            kernel(self._masked_head, batch, step)
        if batch.beams is not None:
            kernel(self._candidates, batch, batch.beams)
        kernel(self._accept, batch, step)
        if batch.tree is not None:
            kernel(self._compact, batch, batch.tree)
        kernel(self._advance, batch)
        begun_s = time.perf_counter()
        if self.stream.runs_at_once and batch.max_rows == 1:
            kernel(self._launches.drop_drafts, batch)
        if self.stream.runs_at_once or batch.max_rows > 1:
            self.drafter.propose(batch, step, table_BN, self._hidden)
        self.propose_s = time.perf_counter() - begun_s
        self.ring.pack(batch)

    @torch.no_grad()
    def warm_up(self, num_rows: int) -> float:
        """Run the target over so many rows of a made-up token in page 0, so that libraries plan and allocate early.

        Returns the time in seconds. For a stream that runs at once, before the first sequence; a device runs the whole
        step over padding before it captures.
        """
        ids_N1 = torch.zeros(num_rows, 1, dtype=torch.int64)
        table_NN = self._table_BN[:1].expand(num_rows, -1).contiguous()
        context = AttentionContext(self._pages, table_NN, ids_N1.int(), hidden=self._hidden)
        if self._states is not None:
            # A slot that a sequence may have: the spare one is padding, which no recurrent layer computes.
            context.recurrent = self._states.forward_of([0], [0], [num_rows], [num_rows])
        begun_s = time.perf_counter()
        self.model.logits(ids_N1, context)
        return time.perf_counter() - begun_s

    def _post(self, batch: StepBatch) -> None:
        """Post all lanes but the late ones, which look like padding meanwhile. Their rows stay DEFER."""
        late = list(batch.late_lanes)
        if not late:
            self.sync.post(batch)
            return
        assert self.stream.runs_at_once, "a captured step has no late lanes"
        slots = self._lane.slots_B[late]
        self._lane.slots_B[late] = -1
        try:
            self.sync.post(batch)
        finally:
            self._lane.slots_B[late] = slots

    def _load(self, batch: StepBatch) -> None:
        self._launches.load(batch, *self._inputs(batch))

    @torch.no_grad()
    def _forward(self, batch: StepBatch) -> None:
        ids_BP, positions_BP, table_BN = self._inputs(batch)
        B = batch.num_lanes
        adapts = batch.adapted and self.model.adapters is not None
        adapters_B = self._slot.adapter_S[place_of(batch)] if adapts else None
        recurrent = None if self._states is None else self._recurrent(batch, positions_BP, self._states)
        if self._packs_rows(batch):
            ids_BP, positions_BP, table_BN, adapters_B = self._packed(
                batch, (ids_BP, positions_BP, table_BN), adapters_B
            )
        self.forward_rows = ids_BP.numel()
        if self.model.skips_padding:
            self.forward_rows = B if batch.num_rows == 1 else B + int(self._num_drafts_B[:B].sum())
        context = AttentionContext(self._pages, table_BN, positions_BP, hidden=self._hidden, prompts=batch.prompts)
        context.adapters_B, context.defers_head = adapters_B, self._defers_head(batch)
        context.recurrent = recurrent
        if batch.tree is not None:
            context.tree_rows_BRR = batch.tree.rows_BRR
        self._logits_NV = self.model.logits(ids_BP, context)

    def _recurrent(self, batch: StepBatch, positions_BP: torch.Tensor, states: SequenceStates) -> RecurrentForward:
        """Return the states of the step's forward. The last token of a lane is committed, and its drafts are pending.

        In a guided lane the last token is pending as well: if its mask row is late, the next step has it again.
        """
        lane, B = batch.lane, batch.num_lanes
        start_B, rows_B = positions_BP[:, 0], lane.num_drafts_B[:B] + 1
        count_B = torch.where(start_B < 0, 0, rows_B)
        width = rows_B if self._packs_rows(batch) else batch.num_rows
        return states.forward(place_of(batch), start_B, count_B, (~lane.guided_B[:B]).int(), width)

    def _packs_rows(self, batch: StepBatch) -> bool:
        """Return whether the forward has each row as a sequence, without padding."""
        return self.packs and batch.num_lanes > 1 and batch.num_rows > 1 and not self.model.skips_padding

    def _defers_head(self, batch: StepBatch) -> bool:
        """Return whether the logits are computed after the rows of the grammar process, which most of them need not
        be. Beams and logits processors read all of them."""
        reads_all = batch.beams is not None or batch.host_processed or batch.captured_processing
        return self._can_defer_head and batch.any_guided and not reads_all

    @torch.no_grad()
    def _masked_head(self, batch: StepBatch, step: StepTensors) -> None:
        self.model.masked_head(step, batch.num_rows)

    def _packed(
        self,
        batch: StepBatch,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        adapters_B: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the same inputs with each row as its own sequence, P = 1, and without the padding.

        The keys of all rows are stored before any row reads them. Looks at values.
        """
        (ids_BP, positions_BP, table_BN), lane, B, P = inputs, batch.lane, batch.num_lanes, batch.num_rows
        counts_B = (lane.num_drafts_B[:B] + 1).tolist()
        if sum(counts_B) == B * P:
            return *inputs, adapters_B
        rows = [b * P + j for b, count in enumerate(counts_B) for j in range(count)]
        rows_N = torch.tensor(rows)
        self._first_row_B = torch.tensor([0, *itertools.accumulate(counts_B[:-1])], dtype=torch.int32)
        ids_N1, positions_N1 = ids_BP.view(-1, 1)[rows_N], positions_BP.view(-1, 1)[rows_N]
        lanes_N = torch.div(rows_N, P, rounding_mode="floor")
        return ids_N1, positions_N1, table_BN[lanes_N], None if adapters_B is None else adapters_B[lanes_N]

    def _process_on_host(self, batch: StepBatch) -> None:
        """Call the logits processors of the lanes while the grammar process fills rows. They may read values."""
        assert self.processing is not None, "a request names a processor that the server has"
        if not self.stream.runs_at_once:
            self.stream.synchronize()
        assert self._logits_NV is not None, "the forward comes first"
        self._logits_NV = self.processing.host.run(batch, self._logits_NV, self._first_row_B)

    def _process_captured(self, batch: StepBatch) -> None:
        assert self.processing is not None
        assert self.processing.captured is not None
        assert self._logits_NV is not None, "the forward comes first"
        self._model_logits_NV = self._logits_NV
        self._logits_NV, self._failed_BP = self.processing.captured.run(batch, self._logits_NV)

    def _candidates(self, batch: StepBatch, beams: BeamRows) -> None:
        assert self._logits_NV is not None, "the forward comes first"
        lane, lanes_N = batch.lane, beams.lanes_N
        first_N = lanes_N * batch.num_rows if self._first_row_B is None else self._first_row_B[lanes_N]
        mask_NW = self.sync.store.mask_SRW[lane.slots_B[lanes_N], 0] if batch.any_guided else None
        beam_candidates(self._logits_NV[first_N], beams, lane.kinds_BR, lane.forced_BR, mask_NW, lane.result)

    def _accept(self, batch: StepBatch, step: StepTensors) -> None:
        assert self._logits_NV is not None, "the forward comes first"
        if self._first_row_B is not None:
            step, self._first_row_B = dataclasses.replace(step, first_row_B=self._first_row_B), None
        host = self.processing.host if self.processing is not None and batch.host_processed else None
        if host is not None:
            host.before_accept(batch)
        elif self._failed_BP is not None:
            mark_failed(batch, self._failed_BP)
            step = dataclasses.replace(step, model_logits_NV=self._model_logits_NV)
        self._launches.accept(batch, self._logits_NV, step)
        if host is not None:
            host.after_accept(batch)
        # The next launches, or the next capture, may use their memory.
        self._logits_NV = self._model_logits_NV = self._failed_BP = None

    def _compact(self, batch: StepBatch, tree: TreeRows) -> None:
        assert self._compaction is not None
        counts_B, table_BN = batch.lane.result.num_emitted_B, self._inputs(batch)[2]
        self._compaction(batch.slots_B, batch.slot.length_S, counts_B, tree, table_BN)

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
        """Return the tensors of such a batch: the same object for a number of lanes, except with a tree."""
        slot, lane = batch.slot, batch.lane
        known = self._steps.get(batch.num_lanes)
        if known is not None and batch.tree is None:
            return known
        made = StepTensors(
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
            tree=batch.tree,
        )
        if batch.tree is None:
            self._steps[batch.num_lanes] = made
        return made
