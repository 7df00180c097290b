"""Prefill over a stream: the next chunks of some sequences in one forward, at one of a few shapes.

Launched between steps whose waits may be running. On a device each shape is a separate captured graph, so a launch
is one copy and one replay instead of some hundred kernels from the engine's thread. Invariant on a device: after
`warm_up` no launch has a shape that was not warmed up. A library that plans for a new shape, or a kernel that is loaded
late, may wait for the device, while a wait inside a step waits for another process. Not responsible for: the choice
of sequences (see scheduler.py), the shapes (see api/prefill_shapes.py).

Shapes: B lanes, P padded length.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gpu_engine.core.running import RunningSequence, SlotWriter
from gpu_engine.core.scheduler import Chunk
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.states import SequenceStates
from gpu_engine.step.program import Drafter
from gpu_engine.step.prompt_rows import Chunks, Hidden, prefill
from gpu_engine.step.stream import Event, Graph, Stream
from kernels.paged_attention import KVPages

log = logging.getLogger(__name__)

MAX_GRAPHS = 64
"""Shapes that are captured, those with the fewest tokens. A large forward takes longer than its launches, which the
thread enqueues meanwhile; a small one does not. A model that takes adapters has two graphs of a shape."""
_AHEAD = 3
"""Launches whose numbers are stored. A step that is not collected was launched in the last iteration at the earliest,
so before a third launch only prefills are waited for."""


class _Shape(NamedTuple):
    """The shape that a graph is captured for."""

    lanes: int
    length: int
    adapted: bool
    """The graph has the products of adapters and the embeddings of virtual tokens."""


@dataclass(slots=True)
class _Numbers:
    """Pinned: slots, starts and ends of one launch, and the event of their copy."""

    numbers: torch.Tensor
    copied: Event
    used: bool = False


class Prefill:
    """Enqueues prefills. Used only by the engine thread, with the stream current.

    Args:
        stream: where they are enqueued.
        model: the target, on the stream's device.
        pages: its cache, which the steps own.
        drafter: sees the same tokens.
        slot_writer: writes the slots, the last of which is spare, for padded lanes.
        shape_of: returns (B, P) for a number of chunks and the longest of them; None: they fit no shape.
        max_lanes: the largest B.
        states: of the model's recurrent layers; None: it has none.
    """

    def __init__(
        self,
        stream: Stream,
        model: LoadedModel,
        pages: list[KVPages],
        drafter: Drafter,
        slot_writer: SlotWriter,
        shape_of: Callable[[int, int], tuple[int, int] | None],
        max_lanes: int,
        states: SequenceStates | None = None,
    ) -> None:
        self._stream, self._model, self._pages, self._drafter = stream, model, pages, drafter
        self._slot_writer, self._shape_of, self._spare = slot_writer, shape_of, len(slot_writer.buffers.length_S) - 1
        self._states, max_numbers = states, 3 * max_lanes
        self._chunks = torch.zeros(max_numbers, dtype=torch.int32, device=stream.device)
        """Slots, starts and ends of the launch that runs, B of each."""
        self._numbers = [
            _Numbers(stream.pinned(4 * max_numbers).view(torch.int32), stream.event()) for _ in range(_AHEAD)
        ]
        self._next = 0
        self.launches: Counter[tuple[int, int]] = Counter()
        """Number of launches by (B, P), the warm-up included."""
        self._graphs: dict[_Shape, Graph] = {}
        # On a stream that runs at once the model itself looks whether a row has an adapter.
        self._variants = (True,) if stream.runs_at_once else (False, True) if model.adapters is not None else (False,)

    @property
    def captured(self) -> frozenset[tuple[int, int]]:
        """The shapes (B, P) that launches replay; the others are launched kernel by kernel."""
        return frozenset((shape.lanes, shape.length) for shape in self._graphs if not shape.adapted)

    def __call__(self, chunks: tuple[Chunk[RunningSequence], ...]) -> None:
        """Enqueue filling the caches with chunks of different sequences, which fit one of the shapes."""
        shape = self._shape_of(len(chunks), max(chunk.end - chunk.start for chunk in chunks))
        assert shape is not None, f"{len(chunks)} chunks fit none of the shapes"
        for chunk in chunks:
            self._slot_writer.write_pages(chunk.sequence)
        adapted = self._variants[0]
        if len(self._variants) > 1:
            adapted = any(chunk.sequence.request.adapters for chunk in chunks)
        rows = [(chunk.sequence.slot, chunk.start, chunk.end) for chunk in chunks]
        self._launch(rows, _Shape(*shape, adapted))

    def warm_up(self, shapes: tuple[tuple[int, int], ...]) -> None:
        """Run every shape once, over page 0, which no sequence owns yet.

        A later launch has one of these shapes and differs only by numbers on the device. Slots, starts and ends are no
        arguments of a kernel, so nothing is compiled for them.
        """
        # A drafter may read the token after a chunk, so the last place of the history is no position of one.
        room = self._slot_writer.buffers.history_SL.shape[1] - 1
        for lanes, length in shapes:
            for adapted in self._variants:
                rows = [(self._spare, 0, min(length, room))] * lanes
                self._launch(rows, _Shape(lanes, length, adapted))

    def capture(self, shapes: tuple[tuple[int, int], ...]) -> None:
        """Capture the smallest `MAX_GRAPHS` of the shapes, which are ordered from the largest on and were warmed up.

        The stream's graphs share memory, so prefills take as much as the largest one, and none where a step takes more.
        After a capture that runs out of memory no further one is tried, and the log says how many shapes are launched
        eagerly. Any other error is raised: it may have invalidated the capture, and then torch's allocator goes on
        serving this stream from the memory of the graph. Runs nothing: the first replay uploads a graph, so a warm-up
        follows.
        """
        every = [_Shape(*shape, adapted) for shape in shapes for adapted in self._variants]
        for shape in every[-MAX_GRAPHS * len(self._variants) :]:
            try:
                with self._stream.capture() as graph:
                    self._stream.kernel(self._run, *shape)
            except torch.OutOfMemoryError as error:
                eager = len(every) - len(self._graphs)
                log.warning("%d of %d prefill shapes are launched eagerly: %s", eager, len(every), error)
                return
            except RuntimeError as error:
                raise RuntimeError(
                    f"the prefill of {shape.lanes} x {shape.length} tokens cannot be captured as a CUDA graph; "
                    f"enforce_eager = true starts without graphs: {error}"
                ) from error
            self._graphs[shape] = graph

    def close(self) -> None:
        """Destroy the graphs. The caller has waited for the device."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _launch(self, chunks: list[tuple[int, int, int]], shape: _Shape) -> None:
        """Enqueue (slot, start, end) of each lane, and padding after them."""
        lanes, length, _ = shape
        numbers = self._numbers[self._next]
        self._next = (self._next + 1) % _AHEAD
        if numbers.used:
            numbers.copied.wait()
        rows = chunks + [(self._spare, 0, 0)] * (lanes - len(chunks))
        numbers.numbers[: 3 * lanes] = torch.tensor(rows, dtype=torch.int32).T.flatten()
        self._stream.copy(self._chunks[: 3 * lanes], numbers.numbers[: 3 * lanes])
        numbers.copied.mark()
        numbers.used = True
        graph = self._graphs.get(shape)
        if graph is None:
            self._stream.kernel(self._run, *shape)
        else:
            graph.replay()
        self.launches[lanes, length] += 1

    @torch.no_grad()
    def _run(self, lanes: int, length: int, adapted: bool) -> None:
        place_B, start_B, end_B = self._chunks[: 3 * lanes].view(3, lanes)
        chunks = Chunks.cut(self._slot_writer.buffers, place_B.long(), start_B, end_B, length)
        hidden: Hidden = dict.fromkeys(self._drafter.layers)
        prefill(self._model, self._pages, chunks, hidden, adapted=adapted, states=self._states)
        self._drafter.prefill(chunks, hidden)

    def __repr__(self) -> str:
        return f"<Prefill, {self.launches.total()} launches, {len(self._graphs)} graphs>"
