"""The seam between the step program and its execution: kernels, copies and host functions in one order.

`ImmediateStream` is the CPU's: each call runs at once. `device/cuda_stream.py` has torch's CUDA stream, and the tests
have a stream that records the same nodes and replays them on its own thread. Invariant: of all methods only
`synchronize` and `Event.wait` wait for the device. Not responsible for: the enqueued work (see program.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Graph(Protocol):
    """A recording of a capture, with its addresses and constants."""

    def replay(self) -> None:
        """Enqueue every node, in order. Does not wait."""

    def reset(self) -> None:
        """Destroy the graph. The caller has waited for the last replay."""


class Event(Protocol):
    """A point in the stream; it may be marked again after it was reached."""

    def mark(self) -> None:
        """Put the point after everything enqueued so far."""

    def reached(self) -> bool:
        """Return whether the device has come to the point; raises when the device failed."""

    def wait(self) -> None:
        """Block until `reached`, with the GIL released."""


class Stream(Protocol):
    """One queue of device work, or a recording of it while `capture` is open."""

    device: torch.device
    runs_at_once: bool
    """A kernel has run when `kernel` returns, so the host may read its results."""

    def kernel(self, function: Callable[..., None], *args: object) -> None:
        """Run `function(*args)`, which launches work. Unless `runs_at_once`, it may not read anything back to the
        host."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between device and pinned memory, or between two devices; both contiguous, of one dtype and shape.

        Between two devices the current streams of both wait for each other.
        """

    def host(self, function: int, user_data: int) -> None:
        """Call the C function `void function(void *user_data)`; it may not call CUDA. Skipped after a device error."""

    def event(self) -> Event:
        """Return an event that is not marked yet."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Record the work that is enqueued inside the `with` block instead of running it."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed uint8 host memory that the device copies to and from asynchronously."""

    def synchronize(self) -> None:
        """Block until everything enqueued has run. Raises when the device failed."""

    def beside(self, device: torch.device | None = None) -> Stream:
        """Return another queue, of the same device or of another one. Their graphs share no memory, so replays of the
        two may overlap."""

    def anew(self) -> Stream:
        """Return the same queue, for graphs that share no memory with its earlier ones. Those were destroyed."""

    def current(self) -> AbstractContextManager[None]:
        """Enqueue on this stream inside the `with` block, where another one was current on this thread. Streams of
        different devices may be current at the same time; then the innermost one's device is the current one."""

    def after(self, event: Event) -> None:
        """Run nothing that is enqueued here from now on before the device has come to the point of a marked `event`,
        of this stream or of one next to it. The host does not wait."""


class ImmediateStream:
    """The CPU as a stream: a launch runs at once, on the calling thread."""

    runs_at_once = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def kernel(self, function: Callable[..., None], *args: object) -> None:
        """Call `function`."""
        function(*args)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def host(self, function: int, user_data: int) -> None:
        """Raise NotImplementedError: on a CPU the syncs call native functions directly."""
        raise NotImplementedError("host functions belong to a device stream")

    def event(self) -> ImmediateEvent:
        """Return an event that is always reached."""
        return ImmediateEvent()

    def capture(self) -> AbstractContextManager[Graph]:
        """Raise NotImplementedError: nothing is recorded on a CPU."""
        raise NotImplementedError("a CPU runs its steps and captures none")

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return plain memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Return: everything has run."""

    def beside(self, device: torch.device | None = None) -> ImmediateStream:
        """Return a stream that runs at once."""
        assert device in (None, self.device), f"{device}: a CPU has no other device next to it"
        return ImmediateStream()

    def anew(self) -> ImmediateStream:
        """Return the stream itself: it has no graphs."""
        return self

    def current(self) -> AbstractContextManager[None]:
        """Return a block that changes nothing."""
        return nullcontext()

    def after(self, event: Event) -> None:
        """Return: the point has come."""

    def __repr__(self) -> str:
        return "ImmediateStream()"


class ImmediateEvent:
    """An event of an `ImmediateStream`."""

    def mark(self) -> None:
        """Return: everything before the point has run."""

    def reached(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""
