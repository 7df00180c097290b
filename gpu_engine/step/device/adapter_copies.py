"""Copies of adapters' weights into device memory, between the replays that read it.

A load runs on its own thread. It stages the weights in pinned memory, and the engine's thread enqueues the copies.
They come after the steps in flight, which may have a lane of the adapter that had the memory before, and before
every step with a lane of the new one. Invariant: the staging memory is written only when its last copy has run.
Not responsible for: which adapter gets which memory (see model/adapters/).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

import torch

from gpu_engine.api.errors import InternalError, ShuttingDown
from gpu_engine.model.adapters.device_pool import STAGED_ALIGNMENT, Writes
from gpu_engine.step.stream import Event, Stream

Post = Callable[[Callable[[], None]], None]
"""Has the engine's thread call a function, between two iterations."""


@dataclass(eq=False)
class AdapterCopies:
    """`write` is for any thread but the engine's, one at a time; only the engine's thread calls `close`.

    Args:
        stream: of the steps.
        num_bytes: the most that one `write` copies.
    """

    stream: Stream
    num_bytes: int
    _post: Post | None = None
    _pending: Future[Event] | None = None
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the three fields before."""

    def __post_init__(self) -> None:
        # An allocation of pinned memory may wait for the device, so there is none while steps run.
        self._staging = self.stream.pinned(self.num_bytes)

    def open(self, post: Post) -> None:
        """Let `write` reach the engine's thread, which takes messages from now on."""
        with self._lock:
            self._post = post

    def write(self, writes: Writes) -> None:
        """Copy contents from the CPU to the device; return when they are there. Raises ShuttingDown when the engine
        closes, and InternalError when it has lost its device."""
        staged = self._staged(writes)
        done: Future[Event] = Future()
        with self._lock:
            if self._closed or self._post is None:
                raise ShuttingDown("the server is shutting down")
            self._pending = done
            self._post(lambda: self._enqueue(staged, done))
        try:
            done.result().wait()
        except CancelledError as error:
            raise ShuttingDown("the server is shutting down") from error
        except RuntimeError as error:
            raise InternalError("the engine lost its device; see its log") from error

    def close(self) -> None:
        """End a `write` that waits; later ones raise."""
        with self._lock:
            self._closed = True
            if self._pending is not None:
                self._pending.cancel()

    def _staged(self, writes: Writes) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each target with a view of the staging memory that has its content."""
        staged, at = [], 0
        for target, source in writes:
            assert (target.shape, target.dtype) == (source.shape, source.dtype), (target.shape, source.shape)
            size = source.numel() * source.element_size()
            assert at + size <= self.num_bytes, (at, size, self.num_bytes)
            view = self._staging[at : at + size].view(source.dtype).view(source.shape)
            view.copy_(source)
            staged.append((target, view))
            at += -(-size // STAGED_ALIGNMENT) * STAGED_ALIGNMENT
        return staged

    def _enqueue(self, staged: list[tuple[torch.Tensor, torch.Tensor]], done: Future[Event]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            for target, source in staged:
                self.stream.copy(target, source)
            event = self.stream.event()
            event.mark()
        except BaseException as error:
            done.set_exception(error)
            raise
        done.set_result(event)

    def __repr__(self) -> str:
        return f"<AdapterCopies of {self.num_bytes} bytes on {self.stream}>"
