"""Steps as captured graphs: one per (bucket of lanes, rows, guided or not), captured at the start, replayed for ever.

A launch is: lanes into the device's lane buffers, the graph, its outputs into the ring. Nothing in it waits for the
device. One invariant: after `capture` nothing is allocated, loaded or registered, since each of those may wait for the
device, while a wait inside a step waits for another process. Without graphs (`eager`) the same step runs at the same
padded shapes.

Padded lanes have slot -1 and are not guided. What that means to each part: posts and waits, native and kernels, skip
them and their rows are ALL; the step gives them token 0 at position -1, which attention computes and does not store;
accept and draft sampling emit nothing and touch no slot; the row store writes nothing, or into its spare row; the ring
carries them, and the reader drops them.

Not here: what a step is (step.py), who is in it (scheduler.py).

Shapes: B lanes of a bucket, P rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.device.ring import OutputRing, StepOutputs
from gpu_engine.step.stream import Event, Graph, Stream

EnqueueStep = Callable[[StepBatch], None]
"""Enqueues one step over the batch's buffers. A launch depends on nothing but `num_lanes`, `num_rows`, `any_guided`."""

_WARM_UPS = 2
"""Libraries choose at the first run and allocate at the second."""


class PermissiveWord(Protocol):
    """Set during warm-up: the grammar process answers ALL to everything. `shared_mem.channel.EngineEnd` has it."""

    permissive: bool


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """What a captured graph is made for."""

    num_lanes: int
    num_rows: int
    guided: bool


@dataclass(frozen=True, slots=True)
class StepRows:
    """P, the rows a lane, of the steps of a bucket. A captured step verifies P rows whatever its lanes have drafted.

    The drafter needs K + 1, which a bucket has while all of its lanes together have at most `limit` rows, else fewer:
    a forward of few rows is bound by reading the weights (below about 200 rows on an H100 or an H200, 150 on an RTX
    4090), and more take time in proportion, most of it for drafts that are not accepted. What the grammar forces may be
    longer than K, up to `most` - 1 drafts, in guided steps of at most `room` rows: the rows behind K + 1, empty in most
    steps, cost little more there than their share of attention and sampling. A slot that comes into a larger bucket
    has its first drafts verified. One draft is left to every lane: a drafting network sees what its forward is given.
    """

    usual: int
    """K + 1."""
    most: int
    """R = max(K, F) + 1."""
    limit: int = 1 << 30
    room: int = 64

    def of(self, num_lanes: int, guided: bool) -> int:
        """Return P of a bucket of so many lanes."""
        if guided and num_lanes * self.most <= min(self.room, self.limit):
            return self.most
        return min(self.usual, max(2, self.limit // num_lanes))


@dataclass(frozen=True, slots=True)
class LaneInput:
    """One lane of a step."""

    slot: int
    slot_gen: int
    guided: bool


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight. Read it once, in the order of the launches."""

    key: GraphKey
    num_lanes: int
    """Without the padding."""
    entry: int


@dataclass(slots=True)
class GraphStats:
    """Counters since the start."""

    graphs: int = 0
    replays: int = 0
    eager_steps: int = 0
    lanes: int = 0
    padded_lanes: int = 0


def lane_buckets(max_lanes: int) -> tuple[int, ...]:
    """Return batch sizes to capture: 1, 2, 4, then multiples of 4 up to 32, of 16 up to 128, of 32, and `max_lanes`.

    Padding then costs at most half of a small batch and an eighth of a large one.
    """
    sizes = {1, 2, *range(4, 33, 4), *range(48, 129, 16), *range(160, max_lanes + 1, 32), max_lanes}
    return tuple(sorted(size for size in sizes if size <= max_lanes))


@dataclass(slots=True)
class _Inputs:
    """Pinned copies of what the host says about the lanes of one step, behind an event."""

    slots_B: torch.Tensor
    slot_gens_B: torch.Tensor
    guided_B: torch.Tensor
    copied: Event
    used: bool = False


@dataclass(eq=False)
class StepGraphs:
    """Captures and launches. Used by the engine thread alone, with the stream current.

    Args:
        stream: where everything runs.
        program: one step, including `ring.pack` at its end.
        slot: buffers on the stream's device.
        lane: the same; as many lanes as the largest bucket.
        ring: over the same stream and lanes.
        buckets: batch sizes, ascending.
        rows: P of each.
        guided: whether graphs with posts and waits are wanted too.
        eager: capture nothing.
        depth: launches that may be in flight, at least 1.
    """

    stream: Stream
    program: EnqueueStep
    slot: SlotBuffers
    lane: LaneBuffers
    ring: OutputRing
    buckets: tuple[int, ...]
    rows: StepRows
    guided: bool = True
    eager: bool = False
    max_inflight_steps: int = 2
    stats: GraphStats = field(default_factory=GraphStats)
    _graphs: dict[GraphKey, Graph] = field(default_factory=dict)
    _ready: bool = False

    def __post_init__(self) -> None:
        assert list(self.buckets) == sorted(set(self.buckets))
        most = self.buckets[-1]
        assert len(self.lane.slots_B) >= most
        self._inputs = [
            _Inputs(
                self.stream.pinned(4 * most).view(torch.int32),
                self.stream.pinned(4 * most).view(torch.int32),
                self.stream.pinned(most).view(torch.bool),
                self.stream.event(),
            )
            for _ in range(self.max_inflight_steps + 1)
        ]
        self._next = 0

    @property
    def captured(self) -> dict[GraphKey, Graph]:
        """The graphs there are; for a look, not for a replay."""
        return self._graphs.copy()

    @property
    def keys(self) -> list[GraphKey]:
        """Every graph there is or will be, the largest first: the later ones fit into its memory."""
        kinds = (False, True) if self.guided else (False,)
        return sorted((GraphKey(b, self.rows.of(b, g), g) for b in self.buckets for g in kinds), reverse=True)

    def capture(self, channel: PermissiveWord | None = None) -> None:
        """Run every shape over padding, then capture it. Blocks; no step may be in flight.

        The warm-up has loaded every kernel before the first wait is captured. While `channel.permissive` is set no
        guided request may be served.
        """
        assert not self._ready, "captured already"
        if channel is not None:
            channel.permissive = True
        try:
            for key in self.keys:
                self._fill([], key)
                for _ in range(_WARM_UPS):
                    self.program(self._batch(key))
            self.stream.synchronize()
            for key in () if self.eager else self.keys:
                with self.stream.capture() as graph:
                    self.program(self._batch(key))
                self._graphs[key] = graph
                # The first replay uploads the graph, which allocates.
                graph.replay()
            self.stream.synchronize()
        finally:
            if channel is not None:
                channel.permissive = False
        self.stats.graphs = len(self._graphs)
        self._ready = True

    def key(self, num_lanes: int, guided: bool) -> GraphKey:
        """Return the smallest key that holds such a step. Raises ValueError when there is none."""
        bucket = next((b for b in self.buckets if b >= num_lanes), None)
        if bucket is None or num_lanes < 1:
            raise ValueError(f"a step of {num_lanes} lanes does not fit: there are 1 to {self.buckets[-1]}")
        if guided and not self.guided:
            raise ValueError("a guided step, but graphs were captured without a grammar process")
        return GraphKey(bucket, self.rows.of(bucket, guided), guided)

    def launch(self, lanes: Sequence[LaneInput], *, logprobs: bool = False) -> Launched:
        """Enqueue one step over these lanes; does not wait for the device.

        With `max_inflight_steps` steps in flight it waits for the copy of the oldest one's inputs, long since done.
        """
        assert self._ready, "capture first"
        key = self.key(len(lanes), any(lane.guided for lane in lanes))
        self._fill(lanes, key)
        graph = self._graphs.get(key)
        if graph is None:
            self.program(self._batch(key))
            self.stats.eager_steps += 1
        else:
            graph.replay()
            self.stats.replays += 1
        self.stats.lanes += len(lanes)
        self.stats.padded_lanes += key.num_lanes - len(lanes)
        return Launched(key, len(lanes), self.ring.push(self._batch(key), logprobs=logprobs))

    def ready(self, launched: Launched) -> bool:
        """Return whether `read` would not wait."""
        return self.ring.ready(launched.entry)

    def read(self, launched: Launched) -> StepOutputs:
        """Wait for a step and return its outputs, padded lanes at the end. Raises when the device failed."""
        return self.ring.read(launched.entry)

    def close(self) -> None:
        """Wait for the device, then destroy the graphs. Only then may what they point to be freed or unregistered."""
        try:
            self.stream.synchronize()
        finally:
            for graph in self._graphs.values():
                graph.reset()
            self._graphs.clear()

    def _batch(self, key: GraphKey) -> StepBatch:
        # The next step is taken to be of the same bucket: drafts that a larger one has no rows for are left out there.
        return StepBatch(self.slot, self.lane, key.num_lanes, key.num_rows, key.guided, max_rows=key.num_rows)

    def _fill(self, lanes: Sequence[LaneInput], key: GraphKey) -> None:
        """Enqueue the lanes and the padding behind them."""
        inputs, B = self._inputs[self._next], key.num_lanes
        self._next = (self._next + 1) % len(self._inputs)
        if inputs.used:
            inputs.copied.wait()
        pad = B - len(lanes)
        inputs.slots_B[:B] = torch.tensor([lane.slot for lane in lanes] + [-1] * pad, dtype=torch.int32)
        inputs.slot_gens_B[:B] = torch.tensor([lane.slot_gen for lane in lanes] + [0] * pad, dtype=torch.int32)
        inputs.guided_B[:B] = torch.tensor([lane.guided for lane in lanes] + [False] * pad)
        for target, source in (
            (self.lane.slots_B, inputs.slots_B),
            (self.lane.slot_gens_B, inputs.slot_gens_B),
            (self.lane.guided_B, inputs.guided_B),
        ):
            self.stream.copy(target[:B], source[:B])
        inputs.copied.mark()
        inputs.used = True

    def __repr__(self) -> str:
        return f"StepGraphs({len(self._graphs)} of {len(self.keys)}, {self.stats})"
