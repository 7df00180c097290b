"""What both CUDA syncs share: the order of packing, posting, waiting and keeping, and the rows kept on the device.

Which rows are missing is data, so it travels in the record and never decides what is launched. One invariant: nothing
here reads the device, and a launch depends only on `num_lanes`, `num_rows` and `any_guided` of the batch, which are
constants of a graph. Every method enqueues; `late` also looks at an answer in host memory. Not here: the kernels
(row_work.py), and how a record reaches the grammar process and its answer comes back (sync_cuda.py).

Shapes: S slots, B lanes of the batch, R rows a slot, W' words of a row's stride.
"""

from __future__ import annotations

import abc

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.device.post_buffers import PostBuffers
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.row_work import PROPOSE, VERIFY, RowWork
from gpu_engine.step.stream import Stream
from shared_mem.channel import EngineEnd
from shared_mem.layout import RowKind, Stage


class StreamSync(abc.ABC):
    """What both mechanisms share: packing, and the rows that are kept from one post to the next."""

    def __init__(
        self,
        stream: Stream,
        channel: EngineEnd,
        mask_SRW: torch.Tensor,
        work: RowWork,
        *,
        row_timeout_ms: float,
        draft_timeout_ms: float,
    ) -> None:
        self.stream, self.channel, self._work = stream, channel, work
        self._timeout_ns, self._draft_timeout_ns = int(row_timeout_ms * 1e6), int(draft_timeout_ms * 1e6)
        S, R, device = channel.layout.num_slots, channel.layout.num_rows, stream.device
        assert mask_SRW.shape == (S, R, channel.layout.row_stride // 4)
        self.store = RowStore(
            mask_SRW,
            # Row S is the spare one, where padded lanes may write.
            torch.full((S + 1, R), int(RowKind.DEFER), dtype=torch.uint8, device=device),
            torch.full((S + 1, R), -1, dtype=torch.int32, device=device),
            torch.zeros(S + 1, R, dtype=torch.bool, device=device),
        )
        """The rows on the device. The sampling kernels read `mask_SRW` where the kind is APPLY."""
        self.told = torch.zeros(1, dtype=torch.int64, device=device)
        """int64 [1], device: the sequence of the step's verify post; 0: nothing was asked. Writer: the step."""
        self._device_waited = torch.zeros(1, dtype=torch.int64, device=device)
        self.seq = 0
        """The host does not know the sequence of a step that it launches; `report` has it."""
        self._late_kinds = stream.pinned(S * R).view(S, R)
        self._late_forced = stream.pinned(4 * S * R).view(torch.int32).view(S, R)

    @property
    def report(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequence of the last step and the nanoseconds waited since the start: int64 [1] each, on the device.

        To be copied out with the step's results.
        """
        return self.told, self._device_waited

    # -- the Sync protocol, but for the mechanism ---------------------------------------------------------------------

    def post(self, batch: StepBatch) -> None:
        """Enqueue the records of the guided lanes that miss a row."""
        if not batch.any_guided:
            self.stream.kernel(self._no_seq)
            return
        box = self._box(batch.num_lanes)
        self.stream.kernel(self._pack, batch, box, VERIFY)
        self._send(box, int(Stage.VERIFY), self._timeout_ns)

    def await_rows(self, batch: StepBatch) -> None:
        """Enqueue the wait for the lanes that were asked for, at most `row_timeout_ms`, and the merge of their rows."""
        if not batch.any_guided:
            self.stream.kernel(self._free, batch, VERIFY)
            return
        box = self._box(batch.num_lanes)
        self._receive(box, int(Stage.VERIFY), (1 << batch.num_rows) - 1, self._timeout_ns)
        self.stream.kernel(self._keep, batch, box, VERIFY)

    def settle(self, batch: StepBatch) -> None:
        """Enqueue: forget the rows of lanes that emitted something."""
        if batch.any_guided:
            self.stream.kernel(self._settle, batch)

    def post_draft(self, batch: StepBatch, k: int) -> None:
        """Enqueue the request for row k behind the first k drafts, of the lanes in `drafting_B`."""
        if batch.any_guided:
            box = self._box(batch.num_lanes)
            self.stream.kernel(self._pack, batch, box, k)
            self._send(box, Stage.DRAFT + k, self._draft_timeout_ns)

    def await_draft(self, batch: StepBatch, k: int) -> None:
        """Enqueue a short wait for row k; a row that is not there leaves its draft unmasked."""
        if not batch.any_guided:
            self.stream.kernel(self._free, batch, k)
            return
        box = self._box(batch.num_lanes)
        self._receive(box, Stage.DRAFT + k, 1 << k, self._draft_timeout_ns)
        self.stream.kernel(self._keep, batch, box, k)

    def post_jump_forward(self, batch: StepBatch) -> None:
        """Enqueue the question what is forced behind the guided lanes that go on."""
        if batch.any_guided:
            box = self._box(batch.num_lanes)
            self.stream.kernel(self._pack, batch, box, PROPOSE)
            self._send(box, int(Stage.PROPOSE), self._draft_timeout_ns)

    def await_jump_forward(self, batch: StepBatch) -> None:
        """Enqueue a short wait, and what puts the tokens where drafters find them; `num_drafts_S`, too."""
        if batch.any_guided:
            box = self._box(batch.num_lanes)
            # The post asks for at most so many tokens: the next step has `max_rows` rows, and one is not a draft's.
            rows = (1 << (batch.max_rows - 1)) - 1
            self._receive(box, int(Stage.PROPOSE), rows, self._draft_timeout_ns)
            self.stream.kernel(self._take_jump_forward, batch, box)

    def forget(self, slot: int) -> None:
        """Enqueue: drop the rows of a slot. Steps that are in flight are before it."""
        self.stream.kernel(self._forget, slot)

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return where the bitmask of (slot, row) lies on the device: base address, strides in 32-bit words."""
        mask = self.store.mask_SRW
        return mask.data_ptr(), (mask.stride(0), mask.stride(1))

    def late(self, seq: int, slot: int, slot_gen: int, *, moved: bool = False) -> int | None:
        """Look whether the answer of a deferred slot has come; enqueue its rows and return how many, else None.

        `seq` is what the step told. The slot must not be in a step that is in flight: such a step asks again.
        Does not wait.
        """
        answer = self.channel.await_rows(seq, [slot], [slot_gen], timeout_s=0.0)
        if answer.num_missing or answer.num_late:
            return None
        kinds_R, forced_R = torch.from_numpy(answer.kinds[0]), torch.from_numpy(answer.forced[0])
        rows = (kinds_R != int(RowKind.DEFER)).nonzero()[:, 0].tolist()
        if moved:
            return len(rows)
        # One request of a slot is open at a time, so its line of the staging memory is free again.
        self._late_kinds[slot].copy_(kinds_R)
        self._late_forced[slot].copy_(forced_R)
        masks_RW = torch.from_numpy(self.channel.mask_rows(seq)[slot])
        for row in rows:
            if kinds_R[row] == int(RowKind.APPLY):
                self.stream.copy(self.store.mask_SRW[slot, row], masks_RW[row])
        for row in rows:
            at = slice(row, row + 1)
            self.stream.copy(self.store.kind_SR[slot, at], self._late_kinds[slot, at])
            self.stream.copy(self.store.forced_SR[slot, at], self._late_forced[slot, at])
            self.stream.kernel(self._came, slot, row)
        return len(rows)

    def unread(self, seq: int, slot: int, slot_gen: int) -> bool:
        """See `Sync.unread`; looks at host memory alone."""
        return self.channel.unread(seq, slot, slot_gen)

    def reserve(self, lane_counts: tuple[int, ...]) -> None:
        """Allocate for these numbers of lanes, and run once what no warm-up runs: no later step allocates or loads."""
        for count in lane_counts:
            self._box(count)
        spare = len(self.store.cached_SR) - 1
        self.stream.kernel(self._came, spare, 0)
        self.forget(spare)

    # -- the mechanism ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _box(self, num_lanes: int) -> PostBuffers:
        """Return the arrays of so many lanes; the same ones every time."""

    @abc.abstractmethod
    def _send(self, box: PostBuffers, stage: int, timeout_ns: int) -> None:
        """Enqueue the post of the box's inputs."""

    @abc.abstractmethod
    def _receive(self, box: PostBuffers, stage: int, rows_wanted: int, timeout_ns: int) -> None:
        """Enqueue the wait, and what fills the box's outputs and brings the rows, if any is wanted."""

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _no_seq(self) -> None:
        self.told.zero_()

    def _pack(self, batch: StepBatch, box: PostBuffers, k: int) -> None:
        self._work.pack(batch, self.store, box, k)

    def _keep(self, batch: StepBatch, box: PostBuffers, k: int) -> None:
        self._work.keep(batch, self.store, box, k, self.told if k == VERIFY else None)

    def _take_jump_forward(self, batch: StepBatch, box: PostBuffers) -> None:
        self._work.take_jump_forward(batch, box, self.channel.layout.vocab_size)

    def _settle(self, batch: StepBatch) -> None:
        self._work.settle(batch, self.store)

    def _free(self, batch: StepBatch, k: int) -> None:
        kinds_BR = batch.lane.kinds_BR[: batch.num_lanes]
        (kinds_BR if k == VERIFY else kinds_BR[:, k]).fill_(int(RowKind.ALL))

    def _forget(self, slot: int) -> None:
        self.store.cached_SR[slot].fill_(False)
        self.store.kind_SR[slot].fill_(int(RowKind.DEFER))

    def _came(self, slot: int, row: int) -> None:
        self.store.cached_SR[slot, row].fill_(True)
