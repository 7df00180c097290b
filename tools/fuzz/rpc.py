"""Calls of a gRPC service without sockets: bytes in, messages and a status out.

Invariant: a call is what grpc.aio makes of it: a message that does not parse never reaches the method, responses are
serialised, an exception that is no abort is a defect. Not responsible for: HTTP/2, interceptors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tools.fuzz.target import Broken, require

HANG_S = 15.0
ENDLESS_S = 0.01
"""How long a call that has no end of its own runs."""
DEFECTS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})
"""Statuses that a client must never cause."""
_LENGTH_BYTES = 2


class Aborted(Exception):
    """The method has ended its call with a status."""


@dataclass
class CallContext:
    """What a servicer uses of grpc.aio.ServicerContext."""

    responses: list[bytes] = field(default_factory=list)
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """End the call."""
        details.encode()
        self.code, self.details = code, details
        raise Aborted

    async def write(self, message: Message) -> None:
        """Take a response."""
        self.responses.append(message.SerializeToString())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the client's metadata."""
        return self.metadata

    def peer_identities(self) -> None:
        """Return that there is no certificate."""

    def peer(self) -> str:
        """Return the client's address."""
        return "unix:"

    def cancelled(self) -> bool:
        """Return whether the client has left."""
        return False

    def done(self) -> bool:
        """Return whether the call has ended."""
        return False


def methods(service: ServiceDescriptor) -> list[MethodDescriptor]:
    """Return the methods in the order of the .proto file."""
    return list(service.methods)


def request_type(method: MethodDescriptor) -> type[Message]:
    """Return the class of the method's requests."""
    return GetMessageClass(method.input_type)


def split(data: bytes) -> list[bytes]:
    """Return the messages of a stream: each has its length in front, two bytes."""
    found = []
    while data:
        size = int.from_bytes(data[:_LENGTH_BYTES], "little")
        found.append(data[_LENGTH_BYTES : _LENGTH_BYTES + size])
        data = data[_LENGTH_BYTES + size :]
    return found


def joined(messages: Sequence[bytes]) -> bytes:
    """Return the messages as `split` reads them."""
    return b"".join(len(message).to_bytes(_LENGTH_BYTES, "little") + message for message in messages)


async def call(
    servicer: Any, method: MethodDescriptor, data: bytes, *, endless: bool = False, hang_s: float = HANG_S
) -> CallContext | None:
    """Make one call; None: the bytes are no message. `endless`: it has no end of its own. Raises Broken."""
    kind, context = request_type(method), CallContext()
    try:
        if method.client_streaming:
            messages = [kind.FromString(part) for part in split(data)]
            request: Any = _stream(messages)
        else:
            request = kind.FromString(data)
    except DecodeError:
        return None
    work = getattr(servicer, method.name)(request, context)
    task = asyncio.ensure_future(_ended(work, context))
    done, _ = await asyncio.wait((task,), timeout=ENDLESS_S if endless else hang_s)
    if not done:
        task.cancel()
        await asyncio.wait((task,), timeout=HANG_S)
        require(task.done(), f"{method.name} does not end when it is cancelled")
        if not endless:
            raise Broken(f"{method.name} does not end")
    if not task.cancelled():
        task.result()
    require(context.code not in DEFECTS, f"{method.name}: {context.code.name}: {context.details}")
    return context


async def _ended(work: Any, context: CallContext) -> None:
    try:
        response = await work
    except Aborted:
        return
    if isinstance(response, Message):
        context.responses.append(response.SerializeToString())


async def _stream(messages: Sequence[Message]) -> AsyncIterator[Message]:
    for message in messages:
        yield message
