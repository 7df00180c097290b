"""Steps as captured graphs: one per (bucket of lanes, rows, guided or not, with adapters or not), captured at the start
and then replayed.

A launch copies the lanes into the device's lane buffers, replays the graph, and copies its outputs into the ring.
A launch never waits for the device. Without graphs (`eager`), and where a lane is a beam, the same step runs at the
same padded shapes. A step in which the host calls logits processors runs so as well, and waits for its forward.

Invariant: after `capture` a replay allocates, loads and registers nothing. Each of those calls may wait for the device,
and the device may wait, inside a step, for the grammar process. Steps that are not replayed allocate: each capture has
emptied torch's cache, so the first step of each size may wait.

Padded lanes have slot -1 and are not guided. Posts and waits, native and kernels, skip them, and their rows are ALL;
the step gives them token 0 at position -1, which attention computes and does not store; accept and draft sampling emit
nothing and touch no slot; the row store writes nothing, or into its spare row; the ring carries them, and the reader
drops them.

Drafts of a model apart from the step (`DrafterGraphs`) are launched after each step that proposes, on another stream,
and the next step waits there for them.

Not responsible for: the content of a step (see ../program.py), the choice of its sequences (see core/scheduler.py).

Shapes: B lanes of a bucket, P rows of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from gpu_engine.api.processors import captured_together
from gpu_engine.api.request import Request
from gpu_engine.step.buffers import LaneBuffers, LaneInputs, SlotBuffers, StepBatch
from gpu_engine.step.handle import StepHandle
from gpu_engine.step.output_ring import OutputRing, StepOutputs
from gpu_engine.step.processing.processing import Processing
from gpu_engine.step.stream import Event, Graph, Stream
from kernels.logprobs import BeamRows

EnqueueStep = Callable[[StepBatch], None]
"""Enqueues one step over the batch's buffers. A launch depends on nothing but `num_lanes`, `num_rows`, `any_guided`,
`captured_processing` and `adapted`, but where the host calls logits processors."""

_FEW_ROWS = 4
"""Between a step without drafts and one with all of them."""
_WARM_UPS = 2
"""Libraries choose at the first run and allocate at the second."""


class PermissiveWord(Protocol):
    """While it is set, the grammar process answers ALL to everything. `shared_mem.channel.EngineEnd` has it."""

    permissive: bool


class DrafterGraphs(Protocol):
    """A drafter whose launches are no part of the steps: they run on their own stream, each after a step."""

    def capture(self, *, eager: bool) -> None:
        """Run every shape over padding; unless `eager`, capture it. Every step has been run over padding, the device is
        idle, and idle again after it."""

    def launch(self, batch: StepBatch) -> None:
        """Enqueue the drafts of the step that was enqueued last. Does not wait."""

    def join(self) -> None:
        """Let nothing that is enqueued for the steps from now on run before these drafts."""

    def close(self) -> None:
        """Wait for the drafts, and destroy the graphs."""


class _Shape(NamedTuple):
    """The shape that a graph is captured for."""

    num_lanes: int
    num_rows: int
    guided: bool
    processed: bool = False
    """With the captured logits processors."""
    adapted: bool = False
    """With the products of adapters."""

    @property
    def plain(self) -> bool:
        """Without both."""
        return not (self.processed or self.adapted)


@dataclass(frozen=True, slots=True)
class StepRows:
    """P, the rows a lane, of the steps of a bucket. A captured step verifies P rows whatever its lanes have drafted.

    A bucket has up to three such numbers: none of its lanes' drafts, a few, or the most, which `of` says. A launch
    takes the smallest that holds the drafts that were chosen for the step. A step of one row a lane proposes no drafts
    either: it has no lookup, and no request for jump-forward tokens, whose answer would not come after a forward.
    The drafter needs K + 1 rows for the most.
    A bucket has them while its lanes together have at most `max_step_rows` rows; a larger
    bucket has fewer rows a lane. A forward of few rows is bound by reading the weights (below about 200 rows on an H100
    or an H200, 150 on an RTX 4090). More rows take time in proportion, most of it for drafts that are not accepted.
    There may be more than K jump-forward tokens: guided steps of at most `max_guided_rows` rows verify up to
    `max_rows` - 1 drafts. The rows after K + 1 are empty in most steps and cost little more than their share of
    attention and sampling. When a slot comes into a larger bucket, only its first drafts are verified. Every lane has
    at least one draft, because a drafting network sees only the rows of its forward.
    """

    drafter_rows: int
    """K + 1."""
    max_rows: int
    """R = max(K, F) + 1."""
    max_step_rows: int = 1 << 30
    max_guided_rows: int = 64
    links: bool = False
    """A drafting network reads the rows of the forward, so there are at least two; it drafts one less than the step
    has rows."""

    def choices(self, num_lanes: int, guided: bool) -> tuple[int, ...]:
        """Return every P of a bucket of so many lanes, ascending."""
        most, least = self.of(num_lanes, guided), 1 + self.links
        return tuple(sorted({min(rows, most) for rows in (least, _FEW_ROWS, most)}))

    def of(self, num_lanes: int, guided: bool) -> int:
        """Return the largest P of a bucket of so many lanes."""
        if guided and num_lanes * self.max_rows <= min(self.max_guided_rows, self.max_step_rows):
            return self.max_rows
        return min(self.drafter_rows, max(2, self.max_step_rows // num_lanes))


@dataclass(slots=True)
class GraphStats:
    """Counters since the start."""

    graphs: int = 0
    replays: int = 0
    eager_steps: int = 0
    lanes: int = 0
    padded_lanes: int = 0


def _captured(processed: tuple[Request | None, ...]) -> bool:
    """Return whether a captured step can run the logits processors of all lanes."""
    return all(captured_together(request.logits_processors) for request in processed if request is not None)


def lane_buckets(max_lanes: int) -> tuple[int, ...]:
    """Return batch sizes to capture: 1, 2, 4, then multiples of 4 up to 32, of 16 up to 128, of 32, and `max_lanes`.

    Padding then costs at most half of a small batch and an eighth of a large one.
    """
    sizes = {1, 2, *range(4, 33, 4), *range(48, 129, 16), *range(160, max_lanes + 1, 32), max_lanes}
    return tuple(sorted(size for size in sizes if size <= max_lanes))


@dataclass(slots=True)
class _Inputs:
    """A pinned copy of the lane inputs of one step, after an event."""

    lanes: LaneInputs
    copied: Event
    used: bool = False


@dataclass(eq=False)
class StepGraphs:
    """Captures and launches. Used only by the engine thread, with the stream current.

    Args:
        stream: where everything runs.
        program: one step, including `ring.pack` at its end.
        slot: buffers on the stream's device.
        lane: the same; as many lanes as the largest bucket.
        ring: over the same stream and lanes.
        buckets: batch sizes, ascending.
        rows: P of each.
        guided: capture graphs with posts and waits too.
        eager: capture nothing.
        processing: the program's; with captured logits processors every shape is captured with them as well.
        adapts: the model takes adapters: every shape is captured with their products as well. A shape with logits
            processors then always has them, so there are three graphs of a shape at most.
        drafter: makes the drafts after each step that proposes; None: the program makes them.
        max_inflight_steps: launches that may be in flight, at least 1.
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
    processing: Processing | None = None
    adapts: bool = False
    drafter: DrafterGraphs | None = None
    max_inflight_steps: int = 2
    stats: GraphStats = field(default_factory=GraphStats)
    ms_by_rows: dict[int, float] = field(default_factory=dict)
    """Milliseconds of the captured steps over padding, by their rows in all; `capture` measures them."""
    _graphs: dict[_Shape, Graph] = field(default_factory=dict)
    _ready: bool = False

    def __post_init__(self) -> None:
        assert list(self.buckets) == sorted(set(self.buckets))
        max_lanes = self.buckets[-1]
        assert len(self.lane.slots_B) >= max_lanes
        self._inputs = [
            _Inputs(LaneInputs.of(self.stream.pinned(len(self.lane.inputs))), self.stream.event())
            for _ in range(self.max_inflight_steps + 1)
        ]
        self._next = 0

    @property
    def captured(self) -> dict[tuple[int, int, bool], Graph]:
        """The captured graphs by (lanes, rows, guided), those without logits processors and adapters; to be inspected,
        not replayed."""
        return {(*shape[:3],): graph for shape, graph in self._graphs.items() if shape.plain}

    @property
    def _captures_processors(self) -> bool:
        return self.processing is not None and self.processing.captured is not None

    @property
    def _shapes(self) -> list[_Shape]:
        """Every shape, the largest first: the later graphs fit into its memory."""
        kinds = (False, True) if self.guided else (False,)
        more = [(False, False)]
        more += [(False, True)] if self.adapts else []
        more += [(True, self.adapts)] if self._captures_processors else []
        every = (_Shape(b, rows, g) for b in self.buckets for g in kinds for rows in self.rows.choices(b, g))
        return sorted((shape._replace(processed=p, adapted=a) for shape in every for p, a in more), reverse=True)

    def capture(self, channel: PermissiveWord | None = None) -> None:
        """Run every shape over padding, then capture it. Blocks; no step may be in flight.

        The warm-up has loaded every kernel before the first wait is captured. While `channel.permissive` is set no
        guided request may be served.
        """
        assert not self._ready, "captured already"
        if channel is not None:
            channel.permissive = True
        try:
            for shape in self._shapes:
                self._fill(None, shape)
                for _ in range(_WARM_UPS):
                    self.program(self._batch(shape))
            self.stream.synchronize()
            for shape in () if self.eager else self._shapes:
                with self.stream.capture() as graph:
                    self.program(self._batch(shape))
                self._graphs[shape] = graph
                # The first replay uploads the graph, which allocates.
                graph.replay()
            self.stream.synchronize()
            if self.drafter is not None:
                self.drafter.capture(eager=self.eager)
            self._measure()
        finally:
            if channel is not None:
                channel.permissive = False
        self.stats.graphs = len(self._graphs)
        self._ready = True

    def _measure(self) -> None:
        """Run every captured shape once over padding and fill `ms_by_rows`. The device is idle, and idle again after
        it."""
        for shape in self._shapes:
            if shape.guided == self.guided and shape.plain and shape in self._graphs:
                self._fill(None, shape)
                self.stream.synchronize()
                begun_s = time.perf_counter()
                self._graphs[shape].replay()
                drafts = self._draft(self._batch(shape))
                if drafts is not None:
                    drafts.join()
                self.stream.synchronize()
                ms, rows = (time.perf_counter() - begun_s) * 1e3, shape.num_lanes * shape.num_rows
                self.ms_by_rows[rows] = min(ms, self.ms_by_rows.get(rows, ms))

    def _bucket_of(self, num_lanes: int, guided: bool) -> int:
        """Return the smallest bucket that holds such a step. Raises ValueError when there is none."""
        bucket = next((b for b in self.buckets if b >= num_lanes), None)
        if bucket is None or num_lanes < 1:
            raise ValueError(f"a step of {num_lanes} lanes does not fit: there are 1 to {self.buckets[-1]}")
        if guided and not self.guided:
            raise ValueError("a guided step, but graphs were captured without a grammar process")
        return bucket

    def _shape_of(self, num_lanes: int, guided: bool, max_drafts: int) -> _Shape:
        """Return the smallest shape that holds a step with so many drafts of a lane; the largest where none does."""
        bucket = self._bucket_of(num_lanes, guided)
        choices = self.rows.choices(bucket, guided)
        rows = next((rows for rows in choices if rows > max_drafts), choices[-1])
        return _Shape(bucket, rows, guided)

    @property
    def max_drafts(self) -> int:
        """See `StepLauncher.max_drafts`."""
        return self.rows.max_rows - 1

    def drafts(self, slots: tuple[int, ...]) -> None:
        """Return None: the step that makes the drafts may be in flight."""
        return

    def shapes(self, num_lanes: int, *, guided: bool) -> list[tuple[int, int]]:
        """See `StepLauncher.shapes`."""
        bucket = self._bucket_of(num_lanes, guided)
        return [(rows, bucket * rows) for rows in self.rows.choices(bucket, guided)]

    def launch(self, handle: StepHandle[Any]) -> None:
        """Enqueue one step over the handle's lanes; does not wait for the device. See `StepLauncher.launch`.

        With `max_inflight_steps` steps in flight it waits for the copy of the oldest step's inputs, which has long run.
        """
        assert self._ready, "capture first"
        lanes = len(handle.slots)
        max_drafts = max(handle.draft_limits, default=self.max_drafts)
        shape = self._shape_of(lanes, handle.any_guided, max(max_drafts, handle.propose_rows > 1))
        if handle.processed:
            shape = shape._replace(processed=self._captures_processors and _captured(handle.processed))
        if self.adapts and (handle.adapted or shape.processed):
            shape = shape._replace(adapted=True)
        self._fill(handle, shape)
        graph, batch = self._graphs.get(shape), self._batch(shape)
        if handle.processed and not shape.processed:
            graph, batch = None, replace(batch, host_processed=handle.processed)
        if handle.beams is not None:
            # The number of beams and of their edits is no constant of a shape.
            beams = BeamRows.of(handle.beams.lanes, handle.beams.edits, self.stream.device)
            graph, batch = None, replace(batch, beams=beams)
        if graph is None:
            self.program(batch)
            self.stats.eager_steps += 1
        else:
            graph.replay()
            self.stats.replays += 1
        drafts = self._draft(batch)
        if batch.host_processed and self.processing is not None:
            handle.failures = self.processing.host.failures
        self.stats.lanes += lanes
        self.stats.padded_lanes += shape.num_lanes - lanes
        handle.num_lanes, handle.num_rows = shape.num_lanes, shape.num_rows
        handle.forward_rows = shape.num_lanes * shape.num_rows
        handle.entry = self.ring.push(batch, logprobs=handle.wants_logprobs)
        if drafts is not None:
            drafts.join()  # after the copies of the step's outputs, which need no drafts

    def _draft(self, batch: StepBatch) -> DrafterGraphs | None:
        """Enqueue the drafts after the step, if it proposes any; return the drafter that the next step waits for."""
        if self.drafter is None or batch.max_rows == 1:
            return None
        self.drafter.launch(batch)
        return self.drafter

    def ready(self, handle: StepHandle[Any]) -> bool:
        """Return whether `read` would not wait."""
        return self.ring.ready(handle.entry)

    def read(self, handle: StepHandle[Any]) -> StepOutputs:
        """Wait for a step and return its outputs, padded lanes at the end. Raises when the device failed."""
        return self.ring.read(handle.entry)

    def close(self) -> None:
        """Wait for the device, then destroy the graphs. Memory that they point to may be freed only after that."""
        try:
            self.stream.synchronize()
            if self.drafter is not None:
                self.drafter.close()
        finally:
            for graph in self._graphs.values():
                graph.reset()
            self._graphs.clear()

    def _batch(self, shape: _Shape) -> StepBatch:
        # The next step is assumed to be of the same bucket; a larger one verifies only the drafts that it has rows for.
        # A drafting network drafts as many as this step has rows for; other drafts cost next to nothing.
        most = self.rows.of(shape.num_lanes, shape.guided) if shape.num_rows > 1 else 1
        links = shape.num_rows - 1 if self.rows.links else most - 1
        return StepBatch(
            slot=self.slot,
            lane=self.lane,
            num_lanes=shape.num_lanes,
            num_rows=shape.num_rows,
            any_guided=shape.guided,
            max_rows=most,
            max_links=links,
            captured_processing=shape.processed,
            adapted=shape.adapted,
        )

    def _fill(self, handle: StepHandle[Any] | None, shape: _Shape) -> None:
        """Enqueue the inputs of the handle's lanes, then padding up to `shape`; without a handle, only padding."""
        inputs, B = self._inputs[self._next], shape.num_lanes
        self._next = (self._next + 1) % len(self._inputs)
        if inputs.used:
            inputs.copied.wait()
        slots, gens, guided = ((), (), ()) if handle is None else (handle.slots, handle.slot_gens, handle.guided)
        limits = () if handle is None else handle.draft_limits or (self.max_drafts,) * len(slots)
        if self.lane.tree is not None:
            # A limit counts the drafts of a chain; the rows of a branch lie after them, and the shape has them anyway.
            limits = tuple(shape.num_rows - 1 if limit else 0 for limit in limits)
        pad, lanes = B - len(slots), inputs.lanes
        lanes.slots_B[:B] = torch.tensor([*slots, *[-1] * pad], dtype=torch.int32)
        lanes.slot_gens_B[:B] = torch.tensor([*gens, *[0] * pad], dtype=torch.int32)
        lanes.draft_limit_B[:B] = torch.tensor([*limits, *[0] * pad], dtype=torch.int32)
        lanes.guided_B[:B] = torch.tensor([*guided, *[False] * pad])
        self.stream.copy(self.lane.inputs, lanes.memory)
        inputs.copied.mark()
        inputs.used = True

    def __repr__(self) -> str:
        return f"StepGraphs({len(self._graphs)} of {len(self._shapes)}, {self.stats})"
