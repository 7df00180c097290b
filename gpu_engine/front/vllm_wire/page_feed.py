"""The pages of the prefix index as a stream of events, for gateways that send a request where its prompt is cached.

The engine's thread posts changes of the index while there is a subscriber, and nothing otherwise. On the event loop a
mirror of the index and a bounded ring of events are kept. A subscriber gets the mirror first (an `AllBlocksCleared` and
the blocks, as a snapshot), then the events; one that is so slow that the ring has passed it gets a snapshot again.

Invariant: a subscriber that has applied its batches in order has the blocks of the index as they were a moment ago. Its
batches are numbered without a gap from `start_sequence_number` + 1 on, snapshots included, so that a client that
resumes an earlier stream takes them for its continuation.

Not responsible for: the index (see core/kv_cache.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from smg_grpc_proto.generated import common_pb2 as common

from gpu_engine.api.ports import EngineCore

log = logging.getLogger(__name__)

RING_EVENTS = 8192
"""A subscriber may be this many pages behind."""
BATCH_EVENTS = 512
"""Most pages of one message."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A page that is indexed."""

    hash: int
    """Of its tokens and those before them; 64 bits with a sign, equal in every server."""
    parent_hash: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    block: _Block


@dataclass(frozen=True, slots=True)
class _Removed:
    hash: int


@dataclass(frozen=True, slots=True)
class _Cleared:
    pass


_Event = _Stored | _Removed | _Cleared
_Post = tuple[int, int | str, tuple[int, ...] | None] | None


class PageFeed:
    """The feed of one engine; implements `ports.PageEvents`. Made and used on the event loop, but for these methods."""

    def __init__(self, engine: EngineCore, ring_events: int = RING_EVENTS) -> None:
        self._engine, self._page_size = engine, engine.config.page_size
        self._loop = asyncio.get_running_loop()
        self._posts: deque[_Post] = deque()
        """(page, parent, tokens) of a page that is stored, without tokens of one that is removed; None: cleared."""
        self._wake_up_sent = False
        self._blocks: dict[int, _Block] = {}
        """The mirror, by page; a page comes behind its parent. Pages with a salt are left out."""
        self._synced = False
        """A `cleared` has arrived since the engine began to post."""
        self._ring: deque[_Event] = deque(maxlen=ring_events)
        self._end = 0
        """Number of events so far; the ring holds the last of them."""
        self._subscribers: set[asyncio.Event] = set()
        self._closed = False

    # On the engine's thread.

    def stored(self, page: int, parent: int | str, tokens: tuple[int, ...]) -> None:
        """A page is indexed behind the page `parent`, or as the first one with that salt."""
        self._post((page, parent, tokens))

    def removed(self, page: int) -> None:
        """A page is not indexed any more."""
        self._post((page, "", None))

    def cleared(self) -> None:
        """No page is indexed."""
        self._post(None)

    def _post(self, post: _Post) -> None:
        self._posts.append(post)
        if not self._wake_up_sent:
            self._wake_up_sent = True
            self._loop.call_soon_threadsafe(self._deliver)

    # On the event loop.

    def close(self) -> None:
        """End every subscription."""
        self._closed = True
        self._wake()

    async def batches(self, last: int) -> AsyncGenerator[common.KvEventBatch, None]:
        """Yield the batches of one subscriber, numbered from `last` + 1 on, until `close`."""
        news = asyncio.Event()
        self._subscribe(news)
        try:
            at = -1
            while not self._closed:
                news.clear()
                if at < self._end - len(self._ring):
                    if at >= 0:
                        log.info("a subscriber of KV events was too slow; it starts anew")
                    blocks, at = list(self._blocks.values()), self._end
                    chunks = list(_snapshot(blocks, self._page_size))
                else:
                    fresh = list(islice(self._ring, len(self._ring) - (self._end - at), None))[:BATCH_EVENTS]
                    at += len(fresh)
                    chunks = [common.KvEventBatch(events=_grouped(fresh, self._page_size))] if fresh else []
                for batch in chunks:
                    last += 1
                    batch.sequence_number, batch.timestamp = last, time.time()
                    yield batch
                if at == self._end:
                    await news.wait()
        finally:
            self._unsubscribe(news)

    def _subscribe(self, news: asyncio.Event) -> None:
        self._subscribers.add(news)
        if len(self._subscribers) == 1:
            self._engine.watch_pages(self)

    def _unsubscribe(self, news: asyncio.Event) -> None:
        self._subscribers.discard(news)
        if not self._subscribers:
            self._engine.watch_pages(None)
            self._synced = False
            self._blocks.clear()
            self._ring.clear()

    def _deliver(self) -> None:
        # Cleared before the queue is read: a post that arrives meanwhile sends a wake-up of its own.
        self._wake_up_sent = False
        while self._posts:
            event = self._apply(self._posts.popleft())
            if event is not None:
                self._ring.append(event)
                self._end += 1
        self._wake()

    def _apply(self, post: _Post) -> _Event | None:
        """Apply a post to the mirror; None: its page has a salt, or it is from before the engine was asked to post."""
        if post is None:
            self._synced = bool(self._subscribers)
            self._blocks.clear()
            return _Cleared()
        if not self._synced:
            return None
        page, parent, tokens = post
        if tokens is None:
            gone = self._blocks.pop(page, None)
            return _Removed(gone.hash) if gone else None
        parent_hash: int | None = None
        if parent != "":
            # No request of this service has a salt: pages behind one are of no use to it.
            if isinstance(parent, str) or parent not in self._blocks:
                return None
            parent_hash = self._blocks[parent].hash
        block = self._blocks[page] = _Block(_hash(parent_hash, tokens), parent_hash, tokens)
        return _Stored(block)

    def _wake(self) -> None:
        for news in self._subscribers:
            news.set()

    def __repr__(self) -> str:
        return f"<PageFeed {len(self._subscribers)} subscribers, {len(self._blocks)} pages, {self._end} events>"


def _hash(parent_hash: int | None, tokens: Sequence[int]) -> int:
    digest = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=8)
    if parent_hash is not None:
        digest.update(parent_hash.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little", signed=True)


def _snapshot(blocks: Sequence[_Block], page_size: int) -> Iterator[common.KvEventBatch]:
    """Yield the batches that replace what a subscriber has by `blocks`, in which a block comes behind its parent."""
    count = max(1, -(-len(blocks) // BATCH_EVENTS))
    for index in range(count):
        events: list[_Event] = [_Stored(block) for block in blocks[index * BATCH_EVENTS : (index + 1) * BATCH_EVENTS]]
        if index == 0:
            events.insert(0, _Cleared())
        yield common.KvEventBatch(
            events=_grouped(events, page_size),
            snapshot=common.KvSnapshotChunk(index=index, count=count, blocks=len(blocks)),
        )


def _grouped(events: Sequence[_Event], page_size: int) -> list[common.KvCacheEvent]:
    """Return the events as messages; blocks in a row of one chain are one event, and so are removals in a row."""
    messages: list[common.KvCacheEvent] = []
    last: _Event | None = None
    for event in events:
        match event:
            case _Stored(block):
                if not (isinstance(last, _Stored) and last.block.hash == block.parent_hash):
                    messages.append(common.KvCacheEvent())
                    stored = messages[-1].stored
                    stored.tier, stored.locality = common.KV_CACHE_TIER_DEVICE, common.KV_CACHE_LOCALITY_LOCAL
                    if block.parent_hash is not None:
                        stored.parent_block_hash = block.parent_hash
                messages[-1].stored.blocks.add(block_hash=block.hash, token_ids=block.tokens, block_size=page_size)
            case _Removed(block_hash):
                if not isinstance(last, _Removed):
                    messages.append(common.KvCacheEvent())
                    messages[-1].removed.tier = common.KV_CACHE_TIER_DEVICE
                messages[-1].removed.block_hashes.append(block_hash)
            case _Cleared():
                messages.append(common.KvCacheEvent(cleared=common.KvCacheCleared()))
        last = event
    return messages
