"""The data that one batch size exchanges with the grammar process: the fields of `shared_mem.batch.BatchArrays` as
tensors.

`InlinePostBuffers` shares its memory with the native calls. `HostPostBuffers` has device memory and its pinned twin.
Invariant: everything is allocated at construction and lives until the last graph over it is gone. Not responsible
for: filling the fields (see launches.py).

Shapes: B lanes, R rows a slot.
"""

from __future__ import annotations

import torch

from gpu_engine.step.stream import Stream
from shared_mem.batch import BatchArrays
from shared_mem.channel import EngineEnd, HostCall
from shared_mem.errors import InvalidField
from shared_mem.layout import Stage
from shared_mem.native import PostArgs

_TORCH = {"int32": torch.int32, "uint32": torch.int32, "uint8": torch.uint8, "uint64": torch.int64}
"""need_rows uses 16 bits and a sequence 63, so the signed types do."""


class PostBuffers:
    """Tensors of B lanes. The step writes the inputs, the sync writes the outputs."""

    slots: torch.Tensor
    """int32 [B], -1: the lane is not posted."""
    slot_gens: torch.Tensor
    commit_pos: torch.Tensor
    n_commit: torch.Tensor
    n_draft: torch.Tensor
    need_rows: torch.Tensor
    """All int32 [B]."""
    tokens: torch.Tensor
    """int32 [B, 2R]."""
    kinds: torch.Tensor
    """uint8 [B, R], out."""
    forced: torch.Tensor
    """int32 [B, R], out."""
    awaited: torch.Tensor
    """int64 [1], out: sequence number of the answers; 0: nothing was posted."""

    def __init__(self, num_lanes: int, num_rows: int, device: torch.device | str = "cpu") -> None:
        self.num_lanes = num_lanes
        self.memory = torch.zeros(BatchArrays.nbytes(num_lanes, num_rows), dtype=torch.uint8, device=device)
        fields = BatchArrays.fields(num_lanes, num_rows)
        self.outputs_at = fields["kinds"][0]
        """Where the outputs begin in `memory`, after the inputs."""
        for name, (offset, dtype, shape) in fields.items():
            kind = _TORCH[dtype.name]
            count = int(torch.Size(shape).numel())
            view = self.memory[offset : offset + count * kind.itemsize].view(kind).view(shape)
            setattr(self, name, view)
        self.slots.fill_(-1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lanes={self.num_lanes})"


class InlinePostBuffers(PostBuffers):
    """Buffers in plain memory, which native calls read and write in place."""

    def __init__(self, channel: EngineEnd, num_lanes: int) -> None:
        super().__init__(num_lanes, channel.layout.num_rows)
        self.arrays = channel.batch_arrays(num_lanes, self.memory.numpy())


class HostPostBuffers(PostBuffers):
    """Buffers whose post and await are native host functions over pinned memory."""

    def __init__(
        self, stream: Stream, channel: EngineEnd, num_lanes: int, *, timeout_ns: int, draft_timeout_ns: int
    ) -> None:
        rows = channel.layout.num_rows
        super().__init__(num_lanes, rows, stream.device)
        self.pinned = stream.pinned(len(self.memory))
        self._posted: dict[int, PostArgs] = {}
        """Arguments of the enqueued posts, by stage, for `check`."""
        # All stages share the memory, since they follow each other on the stream.
        self._calls: dict[int, tuple[BatchArrays, HostCall, HostCall]] = {}
        others = (int(Stage.PROPOSE), int(Stage.FORK), int(Stage.TREE))
        for stage in (*range(int(Stage.VERIFY), Stage.DRAFT + rows - 1), *others):
            timeout_s = (timeout_ns if stage in (Stage.VERIFY, Stage.TREE) else draft_timeout_ns) / 1e9
            self._calls[stage] = channel.host_calls(
                num_lanes, timeout_s=timeout_s, stage=stage, memory=self.pinned.numpy()
            )

    def post(self, stream: Stream, stage: int) -> None:
        """Enqueue: inputs to the host, native post."""
        at, (arrays, call, _) = self.outputs_at, self._calls[stage]
        self._posted[stage] = arrays.post_args
        stream.copy(self.pinned[:at], self.memory[:at])
        stream.host(call.function, call.user_data)

    def wait(self, stream: Stream, stage: int) -> None:
        """Enqueue: native await, outputs to the device."""
        at, call = self.outputs_at, self._calls[stage][2]
        stream.host(call.function, call.user_data)
        stream.copy(self.memory[at:], self.pinned[at:])

    def take_waited_ns(self) -> int:
        """Return how long the awaits since the last call took together, in nanoseconds.

        A step in flight may add to it at the same time, and then counts for its neighbour.
        """
        waited_ns = 0
        for arrays, _, _ in self._calls.values():
            took_ns, arrays.await_args.waited_ns = arrays.await_args.waited_ns, 0
            waited_ns += took_ns
        return waited_ns

    def check(self) -> None:
        """Raise InvalidField when the last native post of a stage refused a record: a defect of the step."""
        for stage, args in self._posted.items():
            if args.status < 0:
                raise InvalidField(
                    "record", f"lane {args.bad_lane} was refused at stage {stage} with status {args.status}"
                )
