"""Graphs of a model over ranks on devices: each rank replays its own, in rank 0's order.

A graph of rank 0 knows which forwards of the model it has, and announces them ahead of each replay. Another rank
captures its part of such a forward when it meets it first, and replays that graph from then on. Rank 0 replays each
graph once at its start, so no request waits for a capture.
Not responsible for: the collectives, which are nodes of these graphs (see model/parallel/device_collectives.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from gpu_engine.model.parallel.collectives import Call
from gpu_engine.model.parallel.device_collectives import DeviceCollectives, Plan, Plans
from gpu_engine.model.parallel.forward import Allocate, PartForward, run_part
from gpu_engine.step.stream import Event, Graph, Stream
from kernels.kv_pages import KVPages, copy_page


class AnnouncedGraph:
    """A graph of rank 0."""

    def __init__(self, graph: Graph, stream: Stream, plans: Plans, forwards: list[Plan]) -> None:
        self._graph, self._stream, self._plans, self._forwards = graph, stream, plans, forwards

    def replay(self) -> None:
        """Announce the forwards of the graph, and enqueue its nodes. Raises RankLost."""
        for forward in self._forwards:
            self._stream.kernel(self._plans.announce, forward)
        self._graph.replay()

    def reset(self) -> None:
        """Destroy the graph."""
        self._graph.reset()


class AnnouncingStream:
    """Rank 0's stream: `own`, whose graphs announce the forwards in them."""

    def __init__(self, own: Stream, plans: Plans) -> None:
        self._own, self._plans = own, plans
        self.device, self.runs_at_once = own.device, own.runs_at_once
        self.kernel, self.copy, self.host = own.kernel, own.copy, own.host
        self.pinned, self.synchronize, self.beside = own.pinned, own.synchronize, own.beside

    def event(self) -> Event:
        """See `Stream.event`."""
        return self._own.event()

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """See `Stream.capture`."""
        with self._plans.capturing() as forwards, self._own.capture() as graph:
            yield AnnouncedGraph(graph, self._own, self._plans, forwards)

    def anew(self) -> Stream:
        """See `Stream.anew`."""
        return AnnouncingStream(self._own.anew(), self._plans)

    def current(self) -> AbstractContextManager[None]:
        """See `Stream.current`."""
        return self._own.current()

    def after(self, event: Event) -> None:
        """See `Stream.after`."""
        self._own.after(event)

    def __repr__(self) -> str:
        return f"AnnouncingStream({self._own})"


class DeviceFollower:
    """Enqueues on another rank's device what rank 0 announces. Used by one thread, with the stream current.

    Args:
        stream: of this rank's device.
        forward: of this rank's part.
        collectives: this rank's ends.
        plans: what rank 0 announces.
        allocate: the cache of this rank's heads.
    """

    def __init__(
        self,
        stream: Stream,
        forward: PartForward,
        collectives: DeviceCollectives,
        plans: Plans,
        allocate: Allocate,
    ) -> None:
        self._stream, self._forward, self._collectives = stream, forward, collectives
        self._plans, self._allocate = plans, allocate
        self._pages: list[KVPages] = []
        self.graphs: dict[tuple[Call, tuple[int, ...]], Graph] = {}
        """By what rank 0 announces of them."""

    @torch.no_grad()
    def run(self) -> None:
        """Follow until rank 0 is gone. Raises RankLost."""
        doing: dict[Call, Callable[..., None]] = {Call.ALLOCATE: self._begin, Call.COPY: self._copy}
        while True:
            plan = self._plans.receive()
            if plan.call in doing:
                doing[plan.call](*plan.numbers[:2])
            elif plan.captured:
                self._replay(plan)
            else:
                self._stream.kernel(self._run, plan.call, *plan.numbers)

    def _begin(self, num_pages: int, page_size: int) -> None:
        """Allocate the cache of another engine of rank 0; the graphs of the one before have another cache."""
        self._stream.synchronize()
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()
        self._pages = self._allocate(num_pages, page_size)

    def _copy(self, source: int, target: int) -> None:
        self._stream.kernel(copy_page, self._pages, source, target)

    def _replay(self, plan: Plan) -> None:
        key = plan.call, plan.numbers
        if key not in self.graphs:
            with self._stream.capture() as self.graphs[key]:
                self._stream.kernel(self._run, plan.call, *plan.numbers)
        self.graphs[key].replay()

    def _run(self, call: Call, num_lanes: int, num_rows: int, length: int) -> None:
        payload = self._collectives.take(length)
        run_part(self._forward, self._collectives, self._pages, call, (num_lanes, num_rows), payload)
