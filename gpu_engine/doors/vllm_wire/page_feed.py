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
import enum
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
from gpu_engine.api.request import Salt

log = logging.getLogger(__name__)

RING_EVENTS = 8192
"""The most pages that a subscriber may have yet to read."""
BATCH_EVENTS = 512
"""Most pages of one message."""
POSTS_PER_TURN = 1024
"""Most changes that one turn of the event loop applies: about a millisecond."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A page that is indexed."""

    hash: int
    """A hash of its tokens and the tokens before them: 64 bits with a sign, equal on every server."""
    parent_hash: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    block: _Block


@dataclass(frozen=True, slots=True)
class _Removed:
    hash: int


_Event = _Stored | _Removed
_Key = tuple[int | Salt, tuple[int, ...]]


class _Sync(enum.Enum):
    """How much of the index the mirror has."""

    NONE = enum.auto()
    """Nothing: the engine has not posted its pages yet."""
    FILLING = enum.auto()
    """A part of the pages that the engine posted at once."""
    DONE = enum.auto()
    """All of it."""


@dataclass(frozen=True, slots=True)
class _Reset:
    pages: Sequence[tuple[int, _Key]]


_Post = tuple[int, _Key | None] | _Reset | None
"""A page that is stored; one that is removed, without a key; all pages at once; None: the mirror has all of these."""


class PageFeed:
    """The feed of one engine; implements `ports.PageEvents`. Made and used on the event loop, except for these
    methods."""

    def __init__(self, engine: EngineCore, ring_events: int = RING_EVENTS) -> None:
        self._engine, self._page_size = engine, engine.config.page_size
        self._loop = asyncio.get_running_loop()
        self._posts: deque[_Post] = deque()
        self._wake_up_sent = False
        self._blocks: dict[int, _Block] = {}
        """The mirror, by page; a page comes after its parent. Pages with a salt are left out."""
        self._sync = _Sync.NONE
        self._resets = 0
        """Counts the times that the mirror was filled anew; each is a reason for a snapshot."""
        self._ring: deque[_Event] = deque(maxlen=ring_events)
        self._end = 0
        """Number of events so far; the ring holds the last of them."""
        self._subscribers: set[asyncio.Event] = set()
        self._closed = False

    # On the engine's thread.

    def reset(self, pages: Sequence[tuple[int, _Key]]) -> None:
        """These pages are indexed, and no others."""
        self._post(_Reset(pages))

    def stored(self, page: int, parent: int | Salt, tokens: tuple[int, ...]) -> None:
        """A page is indexed after the page `parent`, or as the first one with that salt."""
        self._post((page, (parent, tokens)))

    def removed(self, page: int) -> None:
        """A page is not indexed any more."""
        self._post((page, None))

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
            at, resets = -1, -1
            while not self._closed:
                news.clear()
                passed = at < self._end - len(self._ring)
                if passed or resets != self._resets:
                    if passed and at >= 0:
                        log.info("a subscriber of KV events was too slow; it starts anew")
                    blocks, at, resets = list(self._blocks.values()), self._end, self._resets
                    chunks = _snapshot(blocks, self._page_size)
                else:
                    first = len(self._ring) - (self._end - at)
                    fresh = list(islice(self._ring, first, first + BATCH_EVENTS))
                    at += len(fresh)
                    chunks = iter([common.KvEventBatch(events=_grouped(fresh, self._page_size))] if fresh else [])
                for batch in chunks:
                    last += 1
                    batch.sequence_number, batch.timestamp = last, time.time()
                    yield batch
                    await asyncio.sleep(0)  # a write may return at once, and other calls also need the event loop
                if at == self._end and resets == self._resets:
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
            self._sync = _Sync.NONE
            self._posts.clear()
            self._blocks.clear()
            self._ring.clear()

    def _deliver(self) -> None:
        # Cleared before the queue is read: a post that arrives meanwhile sends another wake-up.
        self._wake_up_sent = False
        for _ in range(POSTS_PER_TURN):
            if not self._posts:
                break
            self._apply(self._posts.popleft())
        else:
            self._loop.call_soon(self._deliver)
        self._wake()

    def _apply(self, post: _Post) -> None:
        match post:
            case _Reset(pages):
                self._sync = _Sync.FILLING if self._subscribers else _Sync.NONE
                self._blocks.clear()
                self._posts.appendleft(None)
                self._posts.extendleft(reversed(pages))
            case None:
                self._sync = _Sync.DONE if self._sync is _Sync.FILLING else _Sync.NONE
                self._resets += 1
                self._ring.clear()
            case page, key if self._sync is not _Sync.NONE:
                event = self._change(page, key)
                if event is not None and self._sync is _Sync.DONE:
                    self._ring.append(event)
                    self._end += 1

    def _change(self, page: int, key: _Key | None) -> _Event | None:
        """Apply a change of one page to the mirror; None: the page has a salt."""
        if key is None:
            gone = self._blocks.pop(page, None)
            return _Removed(gone.hash) if gone else None
        parent, tokens = key
        parent_hash: int | None = None
        if parent != "":
            # No request of this service has a salt: pages after one are of no use to it.
            if not isinstance(parent, int) or parent not in self._blocks:
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
    """Yield the batches that replace what a subscriber has by `blocks`, in which a block comes after its parent."""
    count = max(1, -(-len(blocks) // BATCH_EVENTS))
    for index in range(count):
        stored = [_Stored(block) for block in blocks[index * BATCH_EVENTS : (index + 1) * BATCH_EVENTS]]
        cleared = [common.KvCacheEvent(cleared=common.KvCacheCleared())] if index == 0 else []
        yield common.KvEventBatch(
            events=[*cleared, *_grouped(stored, page_size)],
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
        last = event
    return messages
