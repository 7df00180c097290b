"""A whole server in this process whose engine notes each request, and each event that it sends for it.

Invariant: the engine, the grammar process and the services are the real ones; the notes change nothing.
Not responsible for: models and adapters (see conftest.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.request import Request, Telemetry, TokenEvent
from gpu_engine.core.engine import Engine
from gpu_engine.server import open_server, real_parts

START_S = 120.0


@dataclass(slots=True)
class Noted:
    """The sequences of one request, as the engine got them, and its events."""

    requests: list[Request] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    def tokens(self, index: int) -> list[int]:
        """Return the tokens of one sequence."""
        return [token for event in self.events if event.index == index for token in event.token_ids]


class NotingEngine(Engine):
    """An engine that notes what it is asked for, by request id."""

    notes: dict[str, Noted]
    queued: dict[Request, Request]
    """By the request of a sequence: the same with another sink."""

    def submit(self, request: Request, *, awaits_pages: bool = False) -> Telemetry:
        """Note the request and its events, and queue the sequence."""
        noted, sink = self.notes.setdefault(request.request_id, Noted()), request.sink

        def note(event: TokenEvent) -> None:
            noted.events.append(event)
            sink(event)

        noted.requests.append(request)
        self.queued[request] = replace(request, sink=note)
        return super().submit(self.queued[request], awaits_pages=awaits_pages)

    def drop(self, request: Request) -> None:
        """Release what the sequence holds."""
        super().drop(self.queued.pop(request, request))


@contextmanager
def recorded_server(engine: EngineConfig, server: ServerConfig) -> Iterator[tuple[str, dict[str, Noted]]]:
    """Run a server on another thread; yield its address and the notes, by request id."""
    notes: dict[str, Noted] = {}
    ready, addresses, stop = threading.Event(), list[str](), asyncio.Event()
    loop = asyncio.new_event_loop()

    def build(*arguments: Any, **hooks: Any) -> Engine:
        made = NotingEngine(*arguments, **hooks)
        made.notes, made.queued = notes, {}
        return made

    async def run() -> None:
        async with open_server(engine, server, parts=replace(real_parts(), build_engine=build)) as opened:
            addresses.append(opened.address)
            ready.set()
            await stop.wait()

    def serve() -> None:
        try:
            loop.run_until_complete(run())
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=serve, name="recorded server")
    thread.start()
    try:
        assert ready.wait(START_S)
        yield addresses[0], notes
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join()
