"""One GenerateMany call: many requests over one pair of streams, each answered for itself.

Invariant: a request has exactly one message with `last`, unless the call ends before it, and its id is free once the
client has that message; a request that fails ends without effect on the others. The memory of a call is bounded whether
its client reads or not: each request holds one message, its events are merged in its Inbox, and the reader itself
refuses a request above the engine's limit, and reads no further until the client has taken the refusal.

Not responsible for: the tasks and the writer of the call (see request_stream.py), the life of one request (see
calls.py), its messages (see responses.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

import grpc

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.front.caller import Caller
from gpu_engine.front.calls import Call, Calls, Check, Context
from gpu_engine.front.request_stream import RequestStream
from gpu_engine.front.responses import Responses
from gpu_engine.front.text_output import Delta, SequenceOutput
from gpu_engine.ops.access import CallRecord
from protos.engine.v1 import engine_pb2 as pb

CheckOf = Callable[[pb.GenerateRequest], Check]
"""Returns the check of a request."""


@dataclass(slots=True)
class _Running:
    """A request of the call, until its task has ended."""

    call: Call = field(default_factory=Call)
    is_answered: bool = False
    """Its message with `last` is made, so the client may have read it before the task ends."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ManyRequests:
    """The requests of one call."""

    def __init__(self, calls: Calls, context: Context, check_of: CheckOf) -> None:
        self._calls, self._check_of = calls, check_of
        self._stream = RequestStream(calls, context, "GenerateMany")
        self._requests: dict[str, _Running] = {}

    async def run(self, actions: AsyncIterator[pb.GenerateManyRequest]) -> None:
        """Answer until the client has closed its side and its requests have ended.

        Raises InvalidRequest for a message that is no action, ShuttingDown when the server drains.
        """
        await self._stream.run(lambda: self._read(actions))

    async def _read(self, actions: AsyncIterator[pb.GenerateManyRequest]) -> None:
        async for action in actions:
            match action.WhichOneof("action"):
                case "generate":
                    await self._begin(action.generate)
                case "abort":
                    if running := self._requests.get(action.abort):
                        self._calls.end(running.call)
                case _:
                    raise InvalidRequest("action", "one of generate and abort is required")

    async def _begin(self, request: pb.GenerateRequest) -> None:
        name = request.request_id
        if (before := self._requests.get(name)) is not None and before.is_answered:
            await before.ended.wait()  # its client may have its last message, and use the id again
        is_double = name in self._requests

        def failed(status: grpc.StatusCode, problem: str) -> pb.GenerateManyResponse:
            if not is_double and (failing := self._requests.get(name)) is not None:
                failing.is_answered = True
            error = pb.RequestError(code=int(status.value[0]), message=problem)
            # The message of the request that has the name already comes later.
            return pb.GenerateManyResponse(request_id=name, error=error, last=not is_double)

        try:
            self._admit(name)
        except Exception as error:
            await self._stream.answer(partial(_refuse, error, "" if not is_double else name), failed)
            return
        self._requests[name] = _Running()
        self._stream.begin(
            name, partial(self._answer, request), failed, ended=lambda: self._requests.pop(name).ended.set()
        )

    def _admit(self, name: str) -> None:
        """Raise InvalidRequest or LimitExceeded for a request that the call cannot have."""
        if not name:
            raise InvalidRequest("request_id", "is required")
        if name in self._requests:
            raise InvalidRequest("request_id", f"{name!r} belongs to a request that is running")
        self._calls.admission.admit_to_call(len(self._requests))

    async def _answer(self, request: pb.GenerateRequest, caller: Caller, record: CallRecord) -> None:
        name, responses = request.request_id, Responses(request.response)
        running = self._requests[name]
        call = running.call
        call.record = record

        def respond(output: SequenceOutput, delta: Delta) -> list[pb.GenerateManyResponse]:
            made = responses.respond(output, delta)
            ends = delta.finish is not None and all(each.ended for each in call.outputs)
            if ends:
                running.is_answered = True
            return [
                pb.GenerateManyResponse(request_id=name, response=response, last=ends and response is made[-1])
                for response in made
            ]

        await self._calls.answer(call, caller, name, self._check_of(request), respond, self._stream.write)

    def __repr__(self) -> str:
        return f"<ManyRequests {len(self._requests)} {self._stream!r}>"


async def _refuse(error: Exception, request_id: str, caller: Caller, record: CallRecord) -> None:
    """Raise the error of a request that the call cannot have."""
    record.set_request_id(request_id)
    raise error
