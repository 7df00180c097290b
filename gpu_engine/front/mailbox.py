"""Moves token events from the engine thread to the event loop.

Invariant: a sink never blocks, and one wake-up of the loop is under way exactly while events wait in the mailbox, so a
step of sixteen sequences costs the loop one wake-up. Events that wait for a slow client are merged when they are
written, so the backlog of a sequence is bounded by its own answer.

Not responsible for: what the events mean (see text_output.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from gpu_engine.api.request import TokenEvent


class Inbox:
    """The waiting events of one RPC, by sequence. Used only on the event loop."""

    def __init__(self) -> None:
        self._events: dict[int, list[TokenEvent]] = {}
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        """Add an event of one of the sequences."""
        self._events.setdefault(event.index, []).append(event)
        self._news.set()
        if event.finish is not None or event.error is not None:
            self._urgent.set()

    def fail(self, failure: Exception) -> None:
        """Make the next `take` raise `failure`; the first of several counts."""
        self._failure = self._failure or failure
        self._news.set()
        self._urgent.set()

    async def take(self) -> dict[int, list[TokenEvent]]:
        """Wait for events and return all of them, by index; raises the error that `fail` was given."""
        await self._news.wait()
        self._news.clear()
        self._urgent.clear()
        if self._failure:
            raise self._failure
        events, self._events = self._events, {}
        return events

    async def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the last event of a sequence or a failure has arrived."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._urgent.wait()

    def __repr__(self) -> str:
        return f"<Inbox waiting={sum(map(len, self._events.values()))}>"


class Mailbox:
    """One per event loop. The engine thread posts events, the loop delivers them in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posts: deque[tuple[Inbox, TokenEvent]] = deque()
        self._wake_up_sent = False

    def sink(self, inbox: Inbox) -> Callable[[TokenEvent], None]:
        """Return a `Request.sink` whose events arrive in `inbox`; it may be called from any thread."""

        def post(event: TokenEvent) -> None:
            self._posts.append((inbox, event))
            if not self._wake_up_sent:
                self._wake_up_sent = True
                self._loop.call_soon_threadsafe(self._deliver)

        return post

    def _deliver(self) -> None:
        # Cleared before the queue is read: an event that arrives meanwhile sends another wake-up, which may find
        # an empty queue.
        self._wake_up_sent = False
        while self._posts:
            inbox, event = self._posts.popleft()
            inbox.put(event)

    def __repr__(self) -> str:
        return f"<Mailbox waiting={len(self._posts)}>"
