"""Server-sent events, and work that ends with its client.

Invariant: when the client goes away, the work is cancelled at once, and its `finally` frees what it holds on an
engine. A slow reader stops only the reading of its own call: the send waits until the connection takes more.

Not responsible for: what the events are (answers/).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from http_gateway.wire.errors import ApiError

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
"""In metrics and log lines: the client went away before its answer."""


class ClientGone(Exception):
    """The client closed its connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; cancel it when the client goes away. Raises ClientGone, and what `work` raises."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_SEPARATORS = {char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Where Python's `str.splitlines`, by which some clients read events, ends a line and the specification does not, with
the escape of each. JSON has them only within strings; it escapes the others by itself."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Return one event, with its name where the API has names. Its data is one line to every client."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for char, escape in _SEPARATORS.items():
        text = text.replace(char, escape)
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Events:
    """The events of an answer that has begun."""

    items: AsyncGenerator[bytes]
    close: Callable[[], None]
    """Frees what the answer holds on an engine; called once, also where `items` were never read."""


class EventStream(Response):
    """An answer of events, which it owns."""

    media_type = "text/event-stream"

    def __init__(self, events: Events) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they or the client end."""
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._events.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events.items) as items:
            async for data in items:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def ended(items: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the events; then the end, or an event with the error that ended them."""
    try:
        async for data in items:
            yield data
    except ApiError as error:
        yield event(error.body())
    yield DONE
