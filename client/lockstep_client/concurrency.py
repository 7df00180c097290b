"""What differs between an event loop and threads: each name is there twice, with and without `async`.

The generated twins (see tools/client_twins.py in the project's checkout) use the second of each pair where their source
uses the first. Nothing else of the client knows which of the two it runs on.

Not responsible for: what is waited for, sent or read (see async_client.py and executing/async_executor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any

import grpc

from lockstep_client.wire import engine_pb2 as pb


async def async_read(call: Any) -> Any:
    """Return the next response of a call, or None at its end. Raises grpc.RpcError."""
    response = await call.read()
    return None if response is grpc.aio.EOF else response  # type: ignore[attr-defined]  # not in the stub


def read(call: Any) -> Any:
    """Return the next response of a call, or None at its end. Raises grpc.RpcError."""
    return next(call, None)


async def async_pause(seconds: float) -> None:
    """Sleep."""
    await asyncio.sleep(seconds)


def pause(seconds: float) -> None:
    """Sleep."""
    time.sleep(seconds)


async def in_thread(run: Callable[[], None], *, if_cancelled: Callable[[], None] | None = None) -> None:
    """Run a blocking function next to the event loop; call `if_cancelled` where this wait is cancelled meanwhile."""
    try:
        await asyncio.to_thread(run)
    except asyncio.CancelledError:
        if if_cancelled is not None:
            if_cancelled()
        raise


def in_this_thread(run: Callable[[], None]) -> None:
    """Run a blocking function."""
    run()


class AsyncChanges:
    """Lets the tasks of one event loop wait for changes. `with` locks nothing: tasks switch only at an `await`."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        """Set, and replaced, at each change."""

    async def wait_for(self, condition: Callable[[], object], timeout_s: float | None = None) -> None:
        """Wait until the condition holds, or for `timeout_s`; it is looked at whenever something has changed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()

    def notify_all(self) -> None:
        """Say that something has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


Changes = threading.Condition
"""Lets threads wait for changes; `with` locks what it guards."""


class AsyncWorker:
    """A task that runs a function to its end."""

    def __init__(self, run: Callable[[], Awaitable[None]], name: str) -> None:
        async def to_its_end() -> None:
            await run()

        self._task = asyncio.create_task(to_its_end(), name=name)

    async def join(self) -> None:
        """Wait for its end; what it reads has been cancelled."""
        await asyncio.wait([self._task])


class Worker:
    """A thread that runs a function to its end."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for its end; what it reads has been cancelled."""
        self._thread.join()


class AsyncActions:
    """A call of GenerateMany: actions are sent without waiting, and responses are read with `async_read`."""

    def __init__(self, open_call: Callable[..., Any], metadata: tuple[tuple[str, str], ...]) -> None:
        self._call = open_call(metadata=metadata)
        self._queue: asyncio.Queue[pb.GenerateManyRequest] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write(), name="executor actions")

    async def read(self) -> Any:
        """Return the next response. `grpc.aio.EOF` is the end."""
        return await self._call.read()

    def send(self, action: pb.GenerateManyRequest) -> None:
        """Send an action; the reader gets the error of a call that has ended."""
        self._queue.put_nowait(action)

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()

    async def aclose(self) -> None:
        """Cancel the call, and wait until nothing is sent any more."""
        self._writer.cancel()
        self._call.cancel()
        await asyncio.wait([self._writer])

    async def _write(self) -> None:
        with contextlib.suppress(
            grpc.RpcError, asyncio.InvalidStateError
        ):  # the call has ended: its reader has the error
            while True:
                await self._call.write(await self._queue.get())


class Actions:
    """A call of GenerateMany: actions are sent without waiting, and responses are read with `read`."""

    def __init__(self, open_call: Callable[..., Any], metadata: tuple[tuple[str, str], ...]) -> None:
        self._queue: queue.SimpleQueue[pb.GenerateManyRequest | None] = queue.SimpleQueue()
        sent: Iterator[Any] = iter(self._queue.get, None)  # read on a thread of gRPC's
        self._call = open_call(sent, metadata=metadata)

    def __next__(self) -> Any:
        """Return the next response."""
        return next(self._call)

    def send(self, action: pb.GenerateManyRequest) -> None:
        """Send an action; the reader gets the error of a call that has ended."""
        self._queue.put(action)

    def cancel(self) -> None:
        """Cancel the call, and end gRPC's thread that reads the actions."""
        self._queue.put(None)
        self._call.cancel()

    def close(self) -> None:
        """As `cancel`."""
        self.cancel()
