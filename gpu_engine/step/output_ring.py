"""The outputs of steps on their way to the host: packed on the device, copied to a pinned ring, read after an event.

Invariant: an entry is overwritten only after the host has read it (`push` refuses otherwise), so a later step
cannot change an entry while the host reads it. Not responsible for: the meaning of the numbers (see outcomes.py).

Shapes: B lanes of the entry, R rows a slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from gpu_engine.step.buffers import LaneBuffers, StepBatch
from gpu_engine.step.stream import Event, Stream
from kernels.accept import MAX_LOGPROBS
from shared_mem.batch import Int32Array

_PER_LANE = ("num_emitted", "num_accepted", "finish", "blocked", "num_drafts", "num_jump_forward", "slots", "slot_gens")
_HEAD = 4
"""int32 numbers before the lanes: sequence and waited time, two each."""


def _long(low: int, high: int) -> int:
    """Return the int64 whose halves are these int32 numbers."""
    return (low & 0xFFFFFFFF) | high << 32


@dataclass(slots=True)
class StepOutputs:
    """A step's results in host memory, a copy that belongs to the reader. Lists have B numbers."""

    num_emitted: list[int]
    num_accepted: list[int]
    finish: list[int]
    blocked: list[int]
    """The four as `AcceptResult` has them."""
    num_drafts: list[int]
    """Drafts that were verified."""
    num_jump_forward: list[int]
    """See `LaneBuffers`."""
    slots: list[int]
    """As launched; -1: padding."""
    slot_gens: list[int]
    """As launched."""
    emitted: list[list[int]]
    """R numbers a lane, of which the first `num_emitted` count."""
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """`logprob_BR`, `top_ids_BRN` and `top_logprobs_BRN` of `AcceptResult`; without lanes if no request wants any."""
    masses: torch.Tensor
    """`masses_BR2` of `AcceptResult`; without lanes if no request is exact."""
    seq: int
    """Sequence number of the step's verify post; 0: it requested no row."""
    waited_ns: int
    """Nanoseconds that all steps since the start waited, as `Sync.report` has them."""


@dataclass(slots=True)
class _Entry:
    numbers: torch.Tensor
    logprob_BR: torch.Tensor
    top_ids_BRN: torch.Tensor
    top_logprobs_BRN: torch.Tensor
    masses_BR2: torch.Tensor
    event: Event
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By number of lanes: `numbers`, and where the step packs them; on a CPU a slice costs as much as a small copy."""
    arrays: dict[int, tuple[Int32Array, Int32Array]] = field(default_factory=dict)
    """The same memory; empty unless the stream runs at once."""
    num_lanes: int = 0
    logprobs: bool = False
    masses: bool = False
    full: bool = False


class OutputRing:
    """`pack` is a part of the step; the engine thread calls `push` and `read`, outside any graph.

    Args:
        stream: of the steps.
        lane: the lanes' buffers, whose results are copied.
        report: int64 [1] each, device: sequence and waited time of the step (`Sync.report`); None: zeros.
        max_inflight_steps: entries, the steps in flight plus one.
    """

    def __init__(
        self,
        stream: Stream,
        lane: LaneBuffers,
        report: tuple[torch.Tensor, torch.Tensor] | None = None,
        max_inflight_steps: int = 3,
    ) -> None:
        self._stream, self._lane = stream, lane
        # With the caches full of weights, an operation of torch takes some 50 us, and one of numpy a few.
        self._arrays = stream.runs_at_once
        max_lanes, R = lane.drafts_BR.shape
        self._rows = R
        nothing = torch.zeros(1, dtype=torch.int64, device=stream.device)
        self._report = [value.view(torch.int32) for value in report or (nothing,) * 2]
        self._packed = torch.zeros(self._size(max_lanes), dtype=torch.int32, device=stream.device)
        self._entries = [self._entry(max_lanes, R) for _ in range(max_inflight_steps)]
        self._next = 0
        # Slices that every step of B lanes needs; on a CPU a slice costs as much as a small copy.
        self._parts: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        self._part_arrays: dict[int, tuple[list[Int32Array], Int32Array]] = {}
        first = self._entries[0]
        self._no_logprobs = (first.logprob_BR[:0], first.top_ids_BRN[:0], first.top_logprobs_BRN[:0])
        self._no_masses = first.masses_BR2[:0]

    def pack(self, batch: StepBatch) -> None:
        """Gather the results of the first B lanes into one piece of device memory: the last launch of the step."""
        self._stream.kernel(self._pack, batch)

    def push(self, batch: StepBatch, *, logprobs: bool = False, masses: bool = False) -> int:
        """Enqueue the copy of the last step; return its entry. Raises RuntimeError when that entry was not read yet."""
        index, B = self._next, batch.num_lanes
        entry = self._entries[index]
        if entry.full:
            raise RuntimeError(f"step outputs {index} were not read: more than {len(self._entries)} steps in flight")
        if B not in entry.parts:
            entry.parts[B] = (entry.numbers[: self._size(B)], self._packed[: self._size(B)])
            if self._arrays:
                entry.arrays[B] = (entry.parts[B][0].numpy(), entry.parts[B][1].numpy())
        if self._arrays:
            entry.arrays[B][0][:] = entry.arrays[B][1]
        else:
            self._stream.copy(*entry.parts[B])
        if logprobs:
            result = self._lane.result
            self._stream.copy(entry.logprob_BR[:B], result.logprob_BR[:B])
            self._stream.copy(entry.top_ids_BRN[:B], result.top_ids_BRN[:B])
            self._stream.copy(entry.top_logprobs_BRN[:B], result.top_logprobs_BRN[:B])
        if masses:
            self._stream.copy(entry.masses_BR2[:B], self._lane.result.masses_BR2[:B])
        entry.event.mark()
        entry.num_lanes, entry.logprobs, entry.masses, entry.full = B, logprobs, masses, True
        self._next = (index + 1) % len(self._entries)
        return index

    def ready(self, index: int) -> bool:
        """Return whether `read` would not wait. Raises when the device failed."""
        return self._entries[index].event.reached()

    def read(self, index: int) -> StepOutputs:
        """Wait for an entry, free it, and return a copy. Raises when the device failed."""
        entry = self._entries[index]
        assert entry.full, f"entry {index} is empty"
        entry.event.wait()
        entry.full = False
        B, R = entry.num_lanes, self._rows
        numbers = (entry.arrays[B] if self._arrays else entry.parts[B])[0].tolist()
        seq, waited_ns = _long(numbers[0], numbers[1]), _long(numbers[2], numbers[3])
        first = _HEAD + len(_PER_LANE) * B
        logprobs = self._no_logprobs
        if entry.logprobs:
            copied = (entry.logprob_BR, entry.top_ids_BRN, entry.top_logprobs_BRN)
            logprobs = (copied[0][:B].clone(), copied[1][:B].clone(), copied[2][:B].clone())
        masses = entry.masses_BR2[:B].clone() if entry.masses else self._no_masses
        emitted = [numbers[at : at + R] for at in range(first, len(numbers), R)]
        lanes = dict(zip(_PER_LANE, [numbers[at : at + B] for at in range(_HEAD, first, B)], strict=True))
        return StepOutputs(**lanes, emitted=emitted, logprobs=logprobs, masses=masses, seq=seq, waited_ns=waited_ns)

    def _size(self, num_lanes: int) -> int:
        return _HEAD + num_lanes * (len(_PER_LANE) + self._rows)

    def _pack(self, batch: StepBatch) -> None:
        if batch.num_lanes not in self._parts:
            parts, packed = self._parts[batch.num_lanes] = self._parts_of(batch.num_lanes)
            if self._arrays:
                self._part_arrays[batch.num_lanes] = [part.numpy() for part in parts], packed.numpy()
        parts, packed = self._parts[batch.num_lanes]
        if self._arrays:
            np.concatenate(self._part_arrays[batch.num_lanes][0], out=self._part_arrays[batch.num_lanes][1])
        else:
            torch.cat(parts, out=packed)

    def _parts_of(self, num_lanes: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the results of the first lanes, and where they are packed."""
        lane, r, B = self._lane, self._lane.result, num_lanes
        results = (r.num_emitted_B, r.num_accepted_B, r.finish_B, r.blocked_B)
        per_lane = (*results, lane.num_drafts_B, lane.num_jump_forward_B, lane.slots_B, lane.slot_gens_B)
        parts = [*self._report, *(t[:B] for t in per_lane), r.emitted_BR[:B].reshape(-1)]
        return parts, self._packed[: self._size(B)]

    def _entry(self, lanes: int, rows: int) -> _Entry:
        def pinned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return self._stream.pinned(4 * torch.Size(shape).numel()).view(dtype).view(shape)

        return _Entry(
            pinned(torch.int32, self._size(lanes)),
            pinned(torch.float32, lanes, rows),
            pinned(torch.int32, lanes, rows, MAX_LOGPROBS),
            pinned(torch.float32, lanes, rows, MAX_LOGPROBS),
            pinned(torch.float32, lanes, rows, 2),
            self._stream.event(),
        )

    def __repr__(self) -> str:
        return f"OutputRing(entries={len(self._entries)}, unread={sum(entry.full for entry in self._entries)})"
