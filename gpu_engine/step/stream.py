"""The seam between the step program and CUDA: kernels, copies and host functions in the order of one stream.

`CudaStream` is torch's current stream. The tests' stream records the same nodes and replays them on its own thread.
One invariant: nothing here waits for the device but `synchronize` and `Event.wait`. Not here: what is enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from kernels.cuda.host_launch import launch_host_function


class Graph(Protocol):
    """What a capture recorded, with its addresses and constants."""

    def replay(self) -> None:
        """Enqueue every node, in order. Does not wait."""

    def reset(self) -> None:
        """Destroy it. The caller has waited for the last replay."""


class Event(Protocol):
    """A point in the stream; may be marked again after it was reached."""

    def mark(self) -> None:
        """The point is behind everything enqueued so far."""

    def reached(self) -> bool:
        """Return whether the device has come to the point; raises when the device failed."""

    def wait(self) -> None:
        """Block until `reached`, with the GIL released."""


class Stream(Protocol):
    """One queue of device work, or a recording of it while `capture` is open."""

    device: torch.device

    def kernel(self, function: Callable[..., None], *args: object) -> None:
        """Launch what `function(*args)` launches; it may not read anything back to the host."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between device and pinned memory; both contiguous, of one dtype and shape."""

    def host(self, function: int, user_data: int) -> None:
        """Call the C function `void function(void *user_data)`; it may not call CUDA. Skipped after a device error."""

    def event(self) -> Event:
        """Return an event that is not marked yet."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Record what is enqueued inside the `with` block instead of running it."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed uint8 host memory that the device copies to and from without the host's help."""

    def synchronize(self) -> None:
        """Block until everything enqueued has run. Raises when the device failed."""


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
        """Capture what this thread enqueues on `stream`; other threads may go on calling CUDA."""
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


class CudaStream:
    """Torch's current stream. `activate` makes the own one current on the thread that will enqueue.

    Args:
        device: CUDA device.
        low_latency_host: dispatch host functions by spinning, where the driver can (CUDA 13.2).
    """

    def __init__(self, device: torch.device | str = "cuda", *, low_latency_host: bool = False) -> None:
        self.device = torch.device(device)
        self.low_latency_host = low_latency_host
        self._stream = torch.cuda.Stream(self.device)
        self._pool = torch.cuda.graph_pool_handle()

    def activate(self) -> None:
        """Make this the current stream, and its device the current device, of the calling thread.

        Waits for the device first: what other streams have written is there for this one.
        """
        torch.cuda.set_device(self._stream.device)
        torch.cuda.synchronize()
        torch.cuda.set_stream(self._stream)

    def kernel(self, function: Callable[..., None], *args: object) -> None:
        """Call `function`, which launches on the current stream."""
        function(*args)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue one asynchronous copy."""
        target.copy_(source, non_blocking=True)

    def host(self, function: int, user_data: int) -> None:
        """Enqueue a host function; a graph keeps both numbers for its life."""
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

    def __repr__(self) -> str:
        return f"CudaStream({self.device}, {self._stream.cuda_stream:#x})"
