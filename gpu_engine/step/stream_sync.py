"""The part that all syncs share (the order of packing, posting, waiting and caching), and the sync of the CPU.

The set of missing rows is data: it is a field of the record, and no launch depends on it. Invariant: nothing
in `StreamSync` reads the device, and a launch depends only on `num_lanes`, `num_rows` and `any_guided` of the batch,
which are constants of a graph. Every method enqueues; `late` also looks at an answer in host memory. Not responsible
for: packing and caching on a device (see launches.py), the two CUDA mechanisms (see device/syncs.py).

Shapes: S slots, B lanes of the batch, R rows a slot, W' words of a row's stride.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import PROPOSE, VERIFY, StepLaunches
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.post_buffers import InlinePostBuffers, PostBuffers
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import Fork, free_row, free_rows
from shared_mem.channel import EngineEnd
from shared_mem.layout import RowKind, Stage


def _verify_stage(batch: StepBatch) -> int:
    return int(Stage.VERIFY if batch.tree is None else Stage.TREE)


class StreamSync(abc.ABC):
    """The `Sync` protocol without the mechanism. Owns the cached rows."""

    def __init__(
        self,
        stream: Stream,
        channel: EngineEnd,
        mask_SRW: torch.Tensor,
        launches: StepLaunches,
        *,
        row_timeout_ms: float,
        draft_timeout_ms: float,
    ) -> None:
        self.stream, self.channel, self.launches = stream, channel, launches
        self._timeout_ns, self._draft_timeout_ns = int(row_timeout_ms * 1e6), int(draft_timeout_ms * 1e6)
        S, R, device = channel.layout.num_slots, channel.layout.num_rows, stream.device
        assert mask_SRW.shape == (S, R, channel.layout.row_stride // 4)
        self.store = RowStore.around(mask_SRW)
        """The sampling kernels read `mask_SRW` where the kind is APPLY."""
        self.post_seq = torch.zeros(1, dtype=torch.int64, device=device)
        """int64 [1], device: sequence number of the step's verify post; 0: it requested no row. Writer: the step."""
        self._device_waited = torch.zeros(1, dtype=torch.int64, device=device)
        self._lane_counts: tuple[int, ...] = ()
        """Of `reserve`."""
        self._late_kinds = stream.pinned(S * R).view(S, R)
        self._late_forced = stream.pinned(4 * S * R).view(torch.int32).view(S, R)

    @property
    def report(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Sync.report`. The output ring copies it out with the step's results."""
        return self.post_seq, self._device_waited

    # -- the Sync protocol, without the mechanism ---------------------------------------------------------------------

    def post(self, batch: StepBatch) -> None:
        """Enqueue the records of the guided lanes with a missing row."""
        if not batch.any_guided:
            self.stream.kernel(self._no_seq)
            return
        post = self._buffers(batch.num_lanes)
        self.stream.kernel(self._pack, batch, post, VERIFY)
        self._send(post, _verify_stage(batch), self._timeout_ns)

    def await_rows(self, batch: StepBatch) -> None:
        """Enqueue the wait for the posted lanes, at most `row_timeout_ms`, and the merge of their rows."""
        if not batch.any_guided:
            self.stream.kernel(free_rows, batch)
            return
        post = self._buffers(batch.num_lanes)
        self._receive(post, _verify_stage(batch), (1 << batch.num_rows) - 1, self._timeout_ns)
        self.stream.kernel(self._cache_rows, batch, post, VERIFY)

    def post_draft(self, batch: StepBatch, k: int) -> None:
        """Enqueue the request for row k after the first k drafts, of the lanes in `drafting_B`."""
        if batch.any_guided:
            post = self._buffers(batch.num_lanes)
            self.stream.kernel(self._pack, batch, post, k)
            self._send(post, Stage.DRAFT + k, self._draft_timeout_ns)

    def await_draft(self, batch: StepBatch, k: int) -> None:
        """Enqueue a short wait for row k; a row that is not there leaves its draft unmasked."""
        if not batch.any_guided:
            self.stream.kernel(free_row, batch, k)
            return
        post = self._buffers(batch.num_lanes)
        self._receive(post, Stage.DRAFT + k, 1 << k, self._draft_timeout_ns)
        self.stream.kernel(self._cache_rows, batch, post, k)

    def post_jump_forward(self, batch: StepBatch) -> None:
        """Enqueue the request for the jump-forward tokens of the guided lanes that go on."""
        if batch.any_guided:
            post = self._buffers(batch.num_lanes)
            self.stream.kernel(self._pack, batch, post, PROPOSE)
            self._send(post, int(Stage.PROPOSE), self._draft_timeout_ns)

    def await_jump_forward(self, batch: StepBatch) -> None:
        """Enqueue a short wait, and the launch that copies the tokens to `drafts_SR` and counts them in
        `num_drafts_S`."""
        if batch.any_guided:
            post = self._buffers(batch.num_lanes)
            # Tokens are requested only for the drafts of the next step: one less than its rows.
            rows = min(batch.max_rows, self.channel.layout.num_rows) - 1
            self._receive(post, int(Stage.PROPOSE), (1 << rows) - 1, self._draft_timeout_ns)
            self.stream.kernel(self._take_jump_forward, batch, post)

    def forget(self, slot: int) -> None:
        """Enqueue: drop the rows of a slot, after the steps that are in flight."""
        self.stream.kernel(self.store.forget, slot)

    def fork(self, forks: Sequence[Fork]) -> None:
        """Enqueue one post of all `forks`. Their buffers are those of a batch, which each step fills anew."""
        post = self._buffers(min(count for count in self._lane_counts if count >= len(forks)))
        self.stream.kernel(self._write_forks, post, tuple(forks))
        self._send(post, int(Stage.FORK), self._timeout_ns)

    def rows(self) -> tuple[int, tuple[int, int]]:
        """Return where the bitmask of (slot, row) lies on the device: base address, strides in 32-bit words."""
        mask = self.store.mask_SRW
        return mask.data_ptr(), (mask.stride(0), mask.stride(1))

    def late(self, seq: int, slot: int, slot_gen: int, *, advanced: bool = False) -> int | None:
        """See `Sync.late`. The slot must not be in a step that is in flight: such a step requests the rows again."""
        answer = self.channel.await_rows(seq, [slot], [slot_gen], timeout_s=0.0)
        if answer.num_missing or answer.num_late:
            return None
        kinds_R, forced_R = torch.from_numpy(answer.kinds[0]), torch.from_numpy(answer.forced[0])
        rows = (kinds_R != int(RowKind.DEFER)).nonzero()[:, 0].tolist()
        if advanced:
            return len(rows)
        # A slot has one open request at a time, so its row of the staging memory is free again.
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
            self.stream.kernel(self._mark_cached, slot, row)
        return len(rows)

    def unread(self, seq: int, slot: int, slot_gen: int) -> bool:
        """See `Sync.unread`; reads only host memory."""
        return self.channel.unread(seq, slot, slot_gen)

    def reserve(self, lane_counts: tuple[int, ...]) -> None:
        """See `Sync.reserve`. Also runs, once, the launches that no warm-up runs, so that no later step loads a
        kernel."""
        self._lane_counts = lane_counts
        for count in lane_counts:
            self._buffers(count)
        spare = len(self.store.cached_SR) - 1
        self.stream.kernel(self._mark_cached, spare, 0)
        self.forget(spare)

    # -- the mechanism ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _buffers(self, num_lanes: int) -> PostBuffers:
        """Return the buffers of so many lanes; the same ones every time."""

    @abc.abstractmethod
    def _send(self, post: PostBuffers, stage: int, timeout_ns: int) -> None:
        """Enqueue the post of the inputs."""

    @abc.abstractmethod
    def _receive(self, post: PostBuffers, stage: int, rows_wanted: int, timeout_ns: int) -> None:
        """Enqueue the wait that fills the outputs of `post`, for the rows in the bitmask `rows_wanted`."""

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _no_seq(self) -> None:
        self.post_seq.zero_()

    def _pack(self, batch: StepBatch, post: PostBuffers, k: int) -> None:
        self.launches.pack(batch, self.store, post, k)

    def _cache_rows(self, batch: StepBatch, post: PostBuffers, k: int) -> None:
        self.launches.cache_rows(batch, self.store, post, k, self.post_seq if k == VERIFY else None)

    def _take_jump_forward(self, batch: StepBatch, post: PostBuffers) -> None:
        self.launches.take_jump_forward(batch, post, self.channel.layout.vocab_size)

    def _write_forks(self, post: PostBuffers, forks: tuple[Fork, ...]) -> None:
        post.slots.fill_(-1)
        post.n_commit.fill_(1)
        post.n_draft.fill_(0)
        post.need_rows.fill_(0)
        for lane, fork in enumerate(forks):
            post.slots[lane].fill_(fork.slot)
            post.slot_gens[lane].fill_(fork.slot_gen)
            post.commit_pos[lane].fill_(fork.num_committed)
            post.tokens[lane, 0].fill_(fork.source)

    def _mark_cached(self, slot: int, row: int) -> None:
        self.store.cached_SR[slot, row].fill_(True)


class InlineSync(StreamSync):
    """The CPU's mechanism: plain calls into the native flags on the calling thread, with the GIL released.

    For a stream that runs at once. Owned by the engine thread.
    """

    waited_ns = 0
    """`report` has it."""

    def __init__(
        self,
        stream: Stream,
        channel: EngineEnd,
        launches: StepLaunches,
        *,
        row_timeout_ms: float,
        draft_timeout_ms: float = 5.0,
    ) -> None:
        layout = channel.layout
        mask_SRW = torch.zeros(layout.num_slots, layout.num_rows, layout.row_stride // 4, dtype=torch.int32)
        timeouts = {"row_timeout_ms": row_timeout_ms, "draft_timeout_ms": draft_timeout_ms}
        super().__init__(stream, channel, mask_SRW, launches, **timeouts)
        # Written as arrays: an operation of torch takes much longer than the number that it writes.
        self._waited, self._seq = self._device_waited.numpy(), self.post_seq.numpy()
        self._posts: dict[int, InlinePostBuffers] = {}

    def check(self, num_lanes: int) -> None:
        """Return: a refused post raises at once."""

    def _no_seq(self) -> None:
        self._seq[0] = 0

    def _buffers(self, num_lanes: int) -> InlinePostBuffers:
        if num_lanes not in self._posts:
            self._posts[num_lanes] = InlinePostBuffers(self.channel, num_lanes)
        return self._posts[num_lanes]

    def _send(self, post: PostBuffers, stage: int, timeout_ns: int) -> None:
        assert isinstance(post, InlinePostBuffers)
        # Without a lane that requests a row no record is written, and the sequence number is 0.
        arrays = post.arrays
        arrays.awaited[0] = self.channel.post_batch(arrays, stage=stage) if arrays.slots.max() >= 0 else 0

    def _receive(self, post: PostBuffers, stage: int, rows_wanted: int, timeout_ns: int) -> None:
        assert isinstance(post, InlinePostBuffers)
        if seq := int(post.arrays.awaited[0]):
            self._waited[0] += self.channel.await_batch(post.arrays, seq, timeout_s=timeout_ns / 1e9).waited_ns
