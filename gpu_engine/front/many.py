"""One GenerateMany call: many requests over one pair of streams, each answered for itself.

    reader    reads the client's actions: starts a task for each request, and ends requests by their ids
    request   a task each: runs as a Generate call does, and writes to the call's stream
    writing   one message at a time, in the order in which the tasks come

Invariant: a request has exactly one message with `last`, unless the call ends before it; a request that fails ends
alone. The memory of a call is bounded whether its client reads or not: each request holds one message, its events are
merged in its Inbox, and a request above `limit` is refused by the reader, which reads no further until the client has
taken the refusal. However the call ends, `run` ends its tasks, and they release what their requests hold.

Not responsible for: the life of one request (see calls.py), its messages (see responses.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from gpu_engine.api.errors import InvalidRequest, LimitExceeded, LockstepError, ShuttingDown, status_of
from gpu_engine.api.owned_tasks import OwnedTasks
from gpu_engine.front.calls import Call, Caller, Calls, Check, Context, public_error
from gpu_engine.front.responses import Responses
from gpu_engine.front.text_output import Delta, SequenceOutput
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.aborted_calls import forget_frames

CheckOf = Callable[[pb.GenerateRequest], Check]
"""Returns the check of a request."""


class OpenManyCalls:
    """The open GenerateMany calls of a server. Made and used on the event loop."""

    def __init__(self, calls: Calls, check_of: CheckOf) -> None:
        self._calls, self._check_of = calls, check_of
        config = calls.engine.config
        self._limit = config.max_queue_size + config.max_batch_size
        self._open: set[ManyRequests] = set()
        calls.at_drain(self._drain)

    async def run(self, actions: AsyncIterator[pb.GenerateManyRequest], context: Context) -> None:
        """Run one call to its end. Raises the error that ends it."""
        self._calls.refuse_if_draining()
        many = ManyRequests(self._calls, context, self._check_of, self._limit)
        self._open.add(many)
        try:
            await many.run(actions)
        finally:
            self._open.discard(many)

    def _drain(self) -> None:
        for many in self._open:
            many.drain()

    def __repr__(self) -> str:
        return f"<OpenManyCalls {len(self._open)}>"


class ManyRequests:
    """The requests of one call."""

    def __init__(self, calls: Calls, context: Context, check_of: CheckOf, limit: int) -> None:
        """Args: `limit` is the number of requests that may run, or have responses that the client has not taken."""
        self._calls, self._context, self._check_of, self._limit = calls, context, check_of, limit
        self._caller: Caller = calls.caller_of(context)
        self._requests: dict[str, Call] = {}
        self._tasks = OwnedTasks()
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        """A task has ended, or the server drains."""
        self._draining = False

    async def run(self, actions: AsyncIterator[pb.GenerateManyRequest]) -> None:
        """Answer until the client has closed its side and its requests have ended.

        Raises InvalidRequest for a message that is no action, ShuttingDown when the server drains.
        """
        reader = self._tasks.spawn(self._read(actions), "GenerateMany reader")
        reader.add_done_callback(lambda _: self._changed.set())
        try:
            while not (reader.done() or self._draining) or self._requests:
                self._changed.clear()
                await self._changed.wait()
                if reader.done():
                    reader.result()
            if not reader.done():
                raise ShuttingDown("the server is shutting down")
            reader.result()
        finally:
            await self._tasks.aclose()

    def drain(self) -> None:
        """End the call when its requests have ended."""
        self._draining = True
        self._changed.set()

    async def _read(self, actions: AsyncIterator[pb.GenerateManyRequest]) -> None:
        async for action in actions:
            match action.WhichOneof("action"):
                case "generate":
                    await self._begin(action.generate)
                case "abort":
                    if call := self._requests.get(action.abort):
                        self._calls.end(call)
                case _:
                    raise InvalidRequest("action", "one of generate and abort is required")

    async def _begin(self, request: pb.GenerateRequest) -> None:
        name = request.request_id
        if refusal := self._refusal(name):
            await self._answer(request, Call(), refusal)
            return
        call = self._requests[name] = Call()

        def ended(_: asyncio.Task[None]) -> None:
            del self._requests[name]
            self._changed.set()

        self._tasks.spawn(self._answer(request, call), f"request {name}").add_done_callback(ended)

    def _refusal(self, name: str) -> LockstepError | None:
        if not name:
            return InvalidRequest("request_id", "is required")
        if name in self._requests:
            return InvalidRequest("request_id", f"{name!r} belongs to a request that is running")
        if len(self._requests) >= self._limit:
            return LimitExceeded(
                f"{self._limit} requests of this call run, wait, or have responses that were not read; max_queue_size "
                f"= {self._calls.engine.config.max_queue_size}"
            )
        return None

    async def _answer(self, request: pb.GenerateRequest, call: Call, refusal: LockstepError | None = None) -> None:
        """Run one request to its last message; with `refusal`, send that alone."""
        name, responses = request.request_id, Responses(request.response)

        def respond(output: SequenceOutput, delta: Delta) -> list[pb.GenerateManyResponse]:
            made = responses.respond(output, delta)
            ends = delta.finish is not None and all(each.ended for each in call.outputs)
            return [
                pb.GenerateManyResponse(request_id=name, response=response, last=ends and response is made[-1])
                for response in made
            ]

        # A tenant may have lost its token since the call began.
        caller = self._caller if self._caller.account is None else self._calls.caller_of(self._context)
        with self._calls.watch.call(caller.metadata, caller.tenant) as record:
            call.record = record
            record.method = "GenerateMany"
            try:
                if refusal is not None:
                    record.set_request_id(name if name in self._requests else "")
                    raise refusal
                await self._calls.answer(call, caller, name, self._check_of(request), respond, self._write)
            except Exception as error:
                if self._context.cancelled() or self._context.done():
                    return  # there is no client to tell
                failure = public_error(error)
                status = status_of(failure)
                self._calls.failed[status.name] += 1
                record.status = status.name
                message = pb.RequestError(code=int(status.value[0]), message=str(failure))
                last = refusal is None or name not in self._requests
                await self._write(pb.GenerateManyResponse(request_id=name, error=message, last=last))
                forget_frames(error)

    async def _write(self, message: pb.GenerateManyResponse) -> None:
        async with self._writing:
            await self._context.write(message)

    def __repr__(self) -> str:
        return f"<ManyRequests {len(self._requests)} of {self._limit}>"
