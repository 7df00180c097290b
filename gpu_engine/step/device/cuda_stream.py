"""`Stream` over CUDA: torch's current stream, its events and its graphs.

Invariant: all graphs of one stream share a memory pool, so their replays follow each other on that stream; streams
next to each other share none. Not responsible for: the enqueued work (see ../program.py), the choice of graphs (see
graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any

import torch

from gpu_engine.step.stream import Event
from kernels.cuda.host_launch import launch_host_function


class CudaGraph:
    """A captured graph. Every graph of one stream shares its memory pool, so replays must follow each other there."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        """Launch on the current stream."""
        self._graph.replay()

    def reset(self) -> None:
        """Destroy the executable."""
        self._graph.reset()

    @contextmanager
    def captured(self, stream: torch.cuda.Stream, pool: Any) -> Iterator[CudaGraph]:
        """Capture the work that this thread enqueues on `stream`; other threads may go on calling CUDA."""
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield self


class CudaEvent:
    """A torch event without timing."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def mark(self) -> None:
        """Record on the current stream."""
        self._event.record()

    def reached(self) -> bool:
        """Query; raises torch's error when the context is broken."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Synchronise with the event; torch releases the GIL for it."""
        self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have `stream` wait for the point."""
        stream.wait_event(self._event)


class CudaStream:
    """A new CUDA stream. The thread that will enqueue calls `activate`, which makes it torch's current stream there.

    Args:
        device: CUDA device.
        low_latency_host: dispatch host functions by spinning, if the driver supports it (CUDA 13.2).
        urgent: its kernels are scheduled before those of other streams.
    """

    runs_at_once = False

    def __init__(
        self, device: torch.device | str = "cuda", *, low_latency_host: bool = False, urgent: bool = False
    ) -> None:
        self.device = torch.device(device)
        self.low_latency_host = low_latency_host
        self._stream = torch.cuda.Stream(self.device, priority=-1 if urgent else 0)
        self._pool = torch.cuda.graph_pool_handle()

    def activate(self) -> None:
        """Make this the current stream, and its device the current device, of the calling thread.

        Waits for the device first, so that this stream sees all writes of other streams.
        """
        torch.cuda.set_device(self._stream.device)
        torch.cuda.synchronize()
        torch.cuda.set_stream(self._stream)

    def kernel(self, function: Callable[..., None], *args: object) -> None:
        """Call `function`, which launches on the current stream."""
        function(*args)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue one asynchronous copy.

        Between two devices torch enqueues it on the current stream of the source's, and has the current streams of both
        wait for each other.
        """
        target.copy_(source, non_blocking=True)

    def host(self, function: int, user_data: int) -> None:
        """Enqueue a host function; a graph holds both numbers until it is destroyed."""
        launch_host_function(function, user_data, low_latency=self.low_latency_host)

    def event(self) -> CudaEvent:
        """Return a new event."""
        return CudaEvent()

    def capture(self) -> AbstractContextManager[CudaGraph]:
        """Capture on this stream, into the pool that all its graphs share."""
        return CudaGraph().captured(self._stream, self._pool)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate page-locked memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        """Wait for this stream."""
        self._stream.synchronize()

    def beside(self, device: torch.device | None = None) -> CudaStream:
        """Return another stream of the device, or one of another device, with its own pool."""
        return CudaStream(device or self.device, low_latency_host=self.low_latency_host)

    def anew(self) -> CudaStream:
        """Return the same CUDA stream with another pool: torch's allocator may still hold the freed one."""
        again = copy(self)
        again._pool = torch.cuda.graph_pool_handle()
        return again

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current stream inside the `with` block."""
        with torch.cuda.stream(self._stream):
            yield

    def after(self, event: Event) -> None:
        """Enqueue a wait for the event."""
        assert isinstance(event, CudaEvent), f"{event} is no event of CUDA"
        event.hold(self._stream)

    def __repr__(self) -> str:
        return f"CudaStream({self.device}, {self._stream.cuda_stream:#x})"
