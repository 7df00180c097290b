"""`Sync` for a stream, captured by CUDA graphs: two mechanisms over one protocol of the shared memory.

`HostCallbackSync`: one copy to pinned memory, the native post as a host function; the native await, one copy back, one
kernel that fetches rows. `DeviceFlagSync`: two kernels on the mapped segment, no host function. Both are compared on a
GPU in one run (benchmarks/gpu/bench_sync.py, bench_graph.py); configuration chooses.

One invariant: function addresses, user data and device addresses that are enqueued live as long as the sync, which
outlives every graph over it. Not here: packing and kept rows (sync_stream.py), the kernels (kernels/cuda/flags.py).
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.step.device.pinned import PinnedSegment
from gpu_engine.step.device.post_buffers import HostPostBuffers, PostBuffers
from gpu_engine.step.row_work import RowWork, TritonRows
from gpu_engine.step.stream import Stream
from gpu_engine.step.stream_sync import StreamSync
from kernels.cuda.flags import DeviceFlags, refusal
from shared_mem.channel import EngineEnd
from shared_mem.errors import InvalidField
from shared_mem.layout import Stage
from shared_mem.segment import Segment


class RowFetcher(Protocol):
    """The device's copy of mask rows; `kernels.cuda.flags.DeviceFlags` is one."""

    mask_SRW: torch.Tensor

    def fetch(self, seq: torch.Tensor, slots_B: torch.Tensor, kinds_BR: torch.Tensor, *, rows_wanted: int) -> None:
        """Copy the APPLY rows of sequence `seq` (int64 [1]) from the segment into `mask_SRW`."""


class FlagKernels(RowFetcher, Protocol):
    """Post and wait without a host function; `kernels.cuda.flags.DeviceFlags` is one."""

    counter: torch.Tensor
    """int64: last sequence, the one to wait for, nanoseconds waited, lanes not answered in time; then its own."""
    refused: torch.Tensor
    """int64 [1], host memory: 0, or the lane and the reason of an invalid post; see `kernels.cuda.flags.refusal`."""

    def post(
        self,
        slots_B: torch.Tensor,
        slot_gens_B: torch.Tensor,
        commit_pos_B: torch.Tensor,
        n_commit_B: torch.Tensor,
        n_draft_B: torch.Tensor,
        need_rows_B: torch.Tensor,
        tokens_BT: torch.Tensor,
        stage: int,
    ) -> None:
        """Write the records of lanes with slot >= 0 and release their sequence."""

    def wait(
        self,
        slots_B: torch.Tensor,
        slot_gens_B: torch.Tensor,
        kinds_BR: torch.Tensor,
        forced_BR: torch.Tensor,
        *,
        rows_wanted: int,
        timeout_ns: int,
        fetches: bool = True,
    ) -> None:
        """Wait for the last post's answers; copy APPLY rows into `mask_SRW`, unless none is expected."""


def segment_rows(segment: Segment) -> torch.Tensor:
    """Return a segment's mask rows in place, int32 [2, S, R, W']: `TritonRows` reads them once it is registered."""
    layout, at = segment.layout, segment.layout.mask_offset
    rows = torch.from_numpy(segment.memory)[at : at + 2 * layout.mask_buffer_bytes].view(torch.int32)
    return rows.view(2, layout.num_slots, layout.num_rows, -1)


class HostCallbackSync(StreamSync):
    """Posts and waits through native host functions.

    Args:
        stream: of the step.
        channel: the engine's end; its counter gives the sequences.
        mask_SRW: int32, mask rows on the device.
        work: kernels around the post and the wait.
        fetcher: brings APPLY rows into `mask_SRW` before `work.keep`; None when `work` brings them itself.
        row_timeout_ms: a verify step waits so long for its rows.
        draft_timeout_ms: a draft step waits so long.
    """

    def __init__(
        self,
        stream: Stream,
        channel: EngineEnd,
        mask_SRW: torch.Tensor,
        work: RowWork,
        fetcher: RowFetcher | None = None,
        *,
        row_timeout_ms: float,
        draft_timeout_ms: float = 5.0,
    ) -> None:
        timeouts = {"row_timeout_ms": row_timeout_ms, "draft_timeout_ms": draft_timeout_ms}
        super().__init__(stream, channel, mask_SRW, work, **timeouts)
        self._fetcher = fetcher
        self._boxes: dict[int, HostPostBuffers] = {}

    @property
    def waited_ns(self) -> int:
        """Time that host functions stood waiting since this was last looked at: the last step's, for who looks at each.

        A glance: a step in flight may count for its neighbour.
        """
        return sum(box.take_waited_ns() for box in self._boxes.values())

    def check(self, num_lanes: int) -> None:
        """Raise InvalidField when the last post of a batch of this padded size was refused. Does not wait.

        A glance: with a step in flight its post may be the last one.
        """
        self._box(num_lanes).check()

    def _box(self, num_lanes: int) -> HostPostBuffers:
        if num_lanes not in self._boxes:
            timeouts = {"timeout_ns": self._timeout_ns, "draft_timeout_ns": self._draft_timeout_ns}
            self._boxes[num_lanes] = HostPostBuffers(self.stream, self.channel, num_lanes, **timeouts)
        return self._boxes[num_lanes]

    def _send(self, box: PostBuffers, stage: int, timeout_ns: int) -> None:
        assert isinstance(box, HostPostBuffers)
        box.post(self.stream, stage)

    def _receive(self, box: PostBuffers, stage: int, rows_wanted: int, timeout_ns: int) -> None:
        assert isinstance(box, HostPostBuffers)
        box.wait(self.stream, stage)
        if self._fetcher is not None and stage != Stage.PROPOSE:
            self.stream.kernel(self._fetch, self._fetcher, box, rows_wanted)

    def _fetch(self, fetcher: RowFetcher, box: PostBuffers, rows_wanted: int) -> None:
        # Rows that were not asked for are DEFER in the answer, so kept rows are not overwritten.
        fetcher.fetch(box.awaited, box.slots, box.kinds, rows_wanted=rows_wanted)


class DeviceFlagSync(StreamSync):
    """Posts and waits with kernels on the mapped segment; the graph has no host node and needs no host thread.

    The sequence is counted on the device, so the channel posts nothing as long as this does. `work.keep` finds the rows
    in `flags.mask_SRW` already. Arguments as those of `HostCallbackSync`.
    """

    def __init__(
        self,
        stream: Stream,
        channel: EngineEnd,
        flags: FlagKernels,
        work: RowWork,
        *,
        row_timeout_ms: float,
        draft_timeout_ms: float = 5.0,
    ) -> None:
        timeouts = {"row_timeout_ms": row_timeout_ms, "draft_timeout_ms": draft_timeout_ms}
        super().__init__(stream, channel, flags.mask_SRW, work, **timeouts)
        self._flags = flags
        self._device_waited = flags.counter[2:3]
        self._boxes: dict[int, PostBuffers] = {}

    waited_ns = 0
    """Waiting is counted on the device; `report` has it."""

    def check(self, num_lanes: int) -> None:
        """Raise InvalidField when the last post was refused: a defect of the step. Does not wait for the device."""
        refused = refusal(self._flags.refused)
        if refused is not None:
            raise InvalidField("record", f"lane {refused[0]} was refused with status {refused[1]}")

    def _box(self, num_lanes: int) -> PostBuffers:
        if num_lanes not in self._boxes:
            box = PostBuffers(num_lanes, self.channel.layout.num_rows, self.stream.device)
            box.awaited = self._flags.counter[1:2]
            self._boxes[num_lanes] = box
        return self._boxes[num_lanes]

    def _send(self, box: PostBuffers, stage: int, timeout_ns: int) -> None:
        self.stream.kernel(self._post, box, stage)

    def _post(self, box: PostBuffers, stage: int) -> None:
        inputs = (box.slots, box.slot_gens, box.commit_pos, box.n_commit, box.n_draft, box.need_rows, box.tokens)
        self._flags.post(*inputs, stage)

    def _receive(self, box: PostBuffers, stage: int, rows_wanted: int, timeout_ns: int) -> None:
        self.stream.kernel(self._wait, box, rows_wanted, timeout_ns, stage != Stage.PROPOSE)

    def _wait(self, box: PostBuffers, rows_wanted: int, timeout_ns: int, fetches: bool) -> None:
        lanes, outputs = (box.slots, box.slot_gens), (box.kinds, box.forced)
        self._flags.wait(*lanes, *outputs, rows_wanted=rows_wanted, timeout_ns=timeout_ns, fetches=fetches)


def cuda_sync(
    mode: str,
    stream: Stream,
    channel: EngineEnd,
    pinned: PinnedSegment,
    *,
    row_timeout_ms: float,
    draft_timeout_ms: float = 5.0,
) -> HostCallbackSync | DeviceFlagSync:
    """Return the sync of a mode, "host_callback" or "device_flag", with everything that it needs on the current device.

    `pinned` is the registered segment of `channel`; it stays registered until the last graph over the sync is gone.
    Compiles kernels, so it comes before any capture.
    """
    # The device counts on from where the segment is.
    flags = DeviceFlags(pinned.numbers(), channel.last_seq)
    # The fetch and the wait put rows into the store, where `keep` finds them.
    work = TritonRows(flags.mask_SRW[None])
    timeouts = {"row_timeout_ms": row_timeout_ms, "draft_timeout_ms": draft_timeout_ms}
    match mode:
        case "host_callback":
            return HostCallbackSync(stream, channel, flags.mask_SRW, work, flags, **timeouts)
        case "device_flag":
            return DeviceFlagSync(stream, channel, flags, work, **timeouts)
    raise ValueError(f"mode: {mode!r} is not host_callback or device_flag")
