"""One gRPC call whose client sends many requests: a task answers each of them, and one writer sends all responses.

    reader    reads the client's messages, and begins a task for each request
    request   a task each: runs as a Generate call does, and writes to the call's stream
    writing   one message at a time, in the order in which the tasks come

Invariant: a request that fails has a last message with its error, and the other requests of the call go on. However the
call ends, `run` ends its tasks, and they release what their requests hold. A server that drains ends the call when its
requests have ended; the client's messages are read until then.

Not responsible for: the life of one request (see calls.py), what the client's messages say and how many requests a
call may have (see the services: generate_many.py, doors/kserve/).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc

from gpu_engine.api.errors import LockstepError, ShuttingDown
from gpu_engine.front.caller import Caller
from gpu_engine.front.calls import Calls, Context, Rename
from gpu_engine.ops.access import CallRecord
from service_runtime.aborted_calls import forget_frames, send
from service_runtime.owned_tasks import OwnedTasks

Run = Callable[[Caller, CallRecord], Awaitable[None]]
"""Answers one request: writes its responses, or raises its error."""

Failed = Callable[[grpc.StatusCode, str], Any]
"""Returns the last message of a request that failed, given the status and the text of its error."""


class RequestStream:
    """The requests of one streaming call, and the writer of its responses. Must be used on the event loop."""

    def __init__(self, calls: Calls, context: Context, method: str) -> None:
        """Args: `method` is the name of the gRPC method."""
        self._calls, self._context, self._method = calls, context, method
        self._caller = calls.caller_of(context)
        self._tasks = OwnedTasks(LockstepError)
        self._writing = asyncio.Lock()
        self._unfinished = 0
        self._changed = asyncio.Event()
        """A task has ended, or the server drains."""
        self._draining = False

    async def run(self, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Answer until `read` has returned, as the client has closed its side, and the requests have ended.

        Raises the error of `read`, and ShuttingDown when the server drains.
        """
        self._calls.refuse_if_draining()
        withdraw = self._calls.at_drain(self._drain)
        reader = self._tasks.spawn(read(), f"{self._method} reader")
        reader.add_done_callback(lambda _: self._changed.set())
        try:
            while not (reader.done() or self._draining) or self._unfinished:
                self._changed.clear()
                await self._changed.wait()
                if reader.done():
                    reader.result()
            if not reader.done():
                raise ShuttingDown("the server is shutting down")
            reader.result()
        finally:
            withdraw()
            await self._tasks.aclose()

    def begin(
        self, name: str, run: Run, failed: Failed, ended: Callable[[], object], rename: Rename | None = None
    ) -> None:
        """Start a task for a request, which `answer` runs; `ended` is called at its end."""
        self._unfinished += 1

        def over(_: asyncio.Task[None]) -> None:
            self._unfinished -= 1
            ended()
            self._changed.set()

        self._tasks.spawn(self.answer(run, failed, rename), f"request {name}").add_done_callback(over)

    async def answer(self, run: Run, failed: Failed, rename: Rename | None = None) -> None:
        """Run a request to its end; an error becomes its last message. Errors name fields as `rename` does."""
        # A tenant may have lost its token since the call began.
        caller = self._caller if self._caller.account is None else self._calls.caller_of(self._context)
        with self._calls.watch.call(caller.metadata, caller.tenant) as record:
            record.method = self._method
            try:
                await run(caller, record)
            except Exception as error:
                if self._context.cancelled() or self._context.done():
                    return  # there is no client to tell
                status, problem = self._calls.count_failure(error, record, rename)
                await self.write(failed(status, problem))
                forget_frames(error)

    async def write(self, message: Any) -> None:
        """Send one message when the messages before it are sent."""
        async with self._writing:
            await send(self._context, message)

    def _drain(self) -> None:
        self._draining = True
        self._changed.set()

    def __repr__(self) -> str:
        return f"<RequestStream {self._method} unfinished={self._unfinished}>"
