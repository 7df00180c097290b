"""The two CUDA mechanisms of `Sync`, captured by graphs, over one protocol of the shared memory.

`HostCallbackSync`: one copy to pinned memory, the native post as a host function; the native await, one copy back, one
kernel that fetches rows. `DeviceFlagSync`: two kernels on the mapped segment, no host function. Both are compared on a
GPU in one run (benchmarks/gpu/bench_sync.py, bench_graph.py); configuration chooses.

Invariant: function addresses, user data and device addresses that are enqueued live as long as the sync, which
outlives every graph over it. Not responsible for: packing and cached rows (see ../stream_sync.py), the kernels (see
kernels/cuda/flags.py).
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_engine.step.launches import StepLaunches
from gpu_engine.step.post_buffers import HostPostBuffers, PostBuffers
from gpu_engine.step.stream import Stream
from gpu_engine.step.stream_sync import StreamSync
from kernels.cuda.flags import refusal
from shared_mem.channel import EngineEnd
from shared_mem.errors import InvalidField
from shared_mem.layout import Stage


class RowFetcher(Protocol):
    """The device's copy of mask rows; `kernels.cuda.flags.DeviceFlags` is one."""

    mask_SRW: torch.Tensor

    def fetch(self, seq: torch.Tensor, slots_B: torch.Tensor, kinds_BR: torch.Tensor, *, rows_wanted: int) -> None:
        """Copy the APPLY rows of sequence `seq` (int64 [1]) from the segment into `mask_SRW`."""


class FlagKernels(RowFetcher, Protocol):
    """Post and wait by kernels, without a host function; `kernels.cuda.flags.DeviceFlags` implements this."""

    counter: torch.Tensor
    """int64: last posted sequence, sequence to wait for, nanoseconds waited; the rest belongs to the kernels."""
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


class HostCallbackSync(StreamSync):
    """Posts a step and waits for its mask rows in native host functions of the stream.

    Args:
        stream: the stream of the step.
        channel: the engine's end of the segment; its counter gives the sequence numbers.
        mask_SRW: int32, mask rows on the device.
        launches: the launches of the stream's device.
        fetcher: copies APPLY rows into `mask_SRW` before `launches.cache_rows`. None: `cache_rows` copies them itself.
        row_timeout_ms: the longest wait of a verify step for its rows.
        draft_timeout_ms: the longest wait of a draft step for its rows.
    """

    def __init__(
        self,
        stream: Stream,
        channel: EngineEnd,
        mask_SRW: torch.Tensor,
        launches: StepLaunches,
        fetcher: RowFetcher | None = None,
        *,
        row_timeout_ms: float,
        draft_timeout_ms: float = 5.0,
    ) -> None:
        timeouts = {"row_timeout_ms": row_timeout_ms, "draft_timeout_ms": draft_timeout_ms}
        super().__init__(stream, channel, mask_SRW, launches, **timeouts)
        self._fetcher = fetcher
        self._posts: dict[int, HostPostBuffers] = {}

    @property
    def waited_ns(self) -> int:
        """Time that host functions waited since this was last read. A step in flight may count for its neighbour."""
        return sum(post.take_waited_ns() for post in self._posts.values())

    def check(self, num_lanes: int) -> None:
        """See `Sync.check`. With a step in flight, its post may be the last one."""
        self._buffers(num_lanes).check()

    def _buffers(self, num_lanes: int) -> HostPostBuffers:
        if num_lanes not in self._posts:
            timeouts = {"timeout_ns": self._timeout_ns, "draft_timeout_ns": self._draft_timeout_ns}
            self._posts[num_lanes] = HostPostBuffers(self.stream, self.channel, num_lanes, **timeouts)
        return self._posts[num_lanes]

    def _send(self, post: PostBuffers, stage: int, timeout_ns: int) -> None:
        assert isinstance(post, HostPostBuffers)
        post.post(self.stream, stage)

    def _receive(self, post: PostBuffers, stage: int, rows_wanted: int, timeout_ns: int) -> None:
        assert isinstance(post, HostPostBuffers)
        post.wait(self.stream, stage)
        if self._fetcher is not None and stage != Stage.PROPOSE:
            self.stream.kernel(self._fetch, self._fetcher, post, rows_wanted)

    def _fetch(self, fetcher: RowFetcher, post: PostBuffers, rows_wanted: int) -> None:
        # Rows that were not requested are DEFER in the answer, so cached rows are not overwritten.
        fetcher.fetch(post.awaited, post.slots, post.kinds, rows_wanted=rows_wanted)


class DeviceFlagSync(StreamSync):
    """Posts and waits with kernels on the mapped segment; the graph has no host node and needs no host thread.

    The sequence is counted on the device, so the channel posts nothing while this sync posts. The rows are in
    `flags.mask_SRW` before `launches.cache_rows` runs. Arguments as in `HostCallbackSync`.
    """

    def __init__(
        self,
        stream: Stream,
        channel: EngineEnd,
        flags: FlagKernels,
        launches: StepLaunches,
        *,
        row_timeout_ms: float,
        draft_timeout_ms: float = 5.0,
    ) -> None:
        timeouts = {"row_timeout_ms": row_timeout_ms, "draft_timeout_ms": draft_timeout_ms}
        super().__init__(stream, channel, flags.mask_SRW, launches, **timeouts)
        self._flags = flags
        self._device_waited = flags.counter[2:3]
        self._posts: dict[int, PostBuffers] = {}

    waited_ns = 0
    """Waiting is counted on the device; `report` has it."""

    def check(self, num_lanes: int) -> None:
        """Raise InvalidField when the last post was refused: a defect of the step. Does not wait for the device."""
        refused = refusal(self._flags.refused)
        if refused is not None:
            raise InvalidField("record", f"lane {refused[0]} was refused with status {refused[1]}")

    def _buffers(self, num_lanes: int) -> PostBuffers:
        if num_lanes not in self._posts:
            post = PostBuffers(num_lanes, self.channel.layout.num_rows, self.stream.device)
            post.awaited = self._flags.counter[1:2]
            self._posts[num_lanes] = post
        return self._posts[num_lanes]

    def _send(self, post: PostBuffers, stage: int, timeout_ns: int) -> None:
        self.stream.kernel(self._post, post, stage)

    def _post(self, post: PostBuffers, stage: int) -> None:
        inputs = (post.slots, post.slot_gens, post.commit_pos, post.n_commit, post.n_draft, post.need_rows, post.tokens)
        self._flags.post(*inputs, stage)

    def _receive(self, post: PostBuffers, stage: int, rows_wanted: int, timeout_ns: int) -> None:
        self.stream.kernel(self._wait, post, rows_wanted, timeout_ns, stage != Stage.PROPOSE)

    def _wait(self, post: PostBuffers, rows_wanted: int, timeout_ns: int, fetches: bool) -> None:
        lanes, outputs = (post.slots, post.slot_gens), (post.kinds, post.forced)
        self._flags.wait(*lanes, *outputs, rows_wanted=rows_wanted, timeout_ns=timeout_ns, fetches=fetches)
