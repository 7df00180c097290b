"""Moves token events from the engine thread to the event loop.

The invariant: `post` never blocks, and one wake-up of the loop is on its way exactly while events wait. A step of
sixteen sequences thus costs the loop one wake-up, not sixteen. What waits for a slow client is merged when it is
written, so the backlog of a sequence is bounded by its own answer. Not here: what the events mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from gpu_engine.api.request import TokenEvent


class Inbox:
    """Where the events of one RPC wait, by sequence. Used on the event loop alone."""

    def __init__(self) -> None:
        self._events: dict[int, list[TokenEvent]] = {}
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        """Add an event of one of the sequences."""
        self._events.setdefault(event.index, []).append(event)
        self._news.set()

    def fail(self, failure: Exception) -> None:
        """Make the next `take` raise `failure`; of several the first counts."""
        self._failure = self._failure or failure
        self._news.set()

    async def take(self) -> dict[int, list[TokenEvent]]:
        """Wait for news and return all of it; raises what `fail` was given."""
        await self._news.wait()
        self._news.clear()
        if self._failure:
            raise self._failure
        events, self._events = self._events, {}
        return events

    def __repr__(self) -> str:
        return f"<Inbox waiting={sum(map(len, self._events.values()))}>"


class Mailbox:
    """One per loop. The engine thread posts, the loop delivers in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posts: deque[tuple[Inbox, TokenEvent]] = deque()
        self._wake_up_sent = False

    def sink(self, inbox: Inbox) -> Callable[[TokenEvent], None]:
        """Return a `Request.sink` that ends in `inbox`; callable from any thread."""

        def post(event: TokenEvent) -> None:
            self._posts.append((inbox, event))
            if not self._wake_up_sent:
                self._wake_up_sent = True
                self._loop.call_soon_threadsafe(self._deliver)

        return post

    def _deliver(self) -> None:
        # Cleared before the queue is read: an event that comes meanwhile sends a wake-up of its own, at worst for
        # nothing.
        self._wake_up_sent = False
        while self._posts:
            inbox, event = self._posts.popleft()
            inbox.put(event)

    def __repr__(self) -> str:
        return f"<Mailbox waiting={len(self._posts)}>"
