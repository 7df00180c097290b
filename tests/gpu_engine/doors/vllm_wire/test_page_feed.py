"""A subscriber's blocks are those of the prefix index, however slow it is and whenever it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2 as common

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.ports import PageEvents
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.doors.vllm_wire.page_feed import BATCH_EVENTS, POSTS_PER_TURN, PageFeed
from tests.fakes import FakeEngine

PAGE = 16


class Chains:
    """`PageEvents` that keeps the tokens of each page without a salt, those before it included, and tells another."""

    def __init__(self) -> None:
        self.chains: dict[int, tuple[int, ...]] = {}
        self.other: PageEvents | None = None

    def _store(self, page: int, parent: int | str, tokens: tuple[int, ...]) -> None:
        if parent == "":
            self.chains[page] = tokens
        elif isinstance(parent, int) and parent in self.chains:
            self.chains[page] = (*self.chains[parent], *tokens)

    def reset(self, pages: Sequence[tuple[int, tuple[int | str, tuple[int, ...]]]]) -> None:
        self.chains.clear()
        for page, key in pages:
            self._store(page, *key)
        if self.other is not None:
            self.other.reset(pages)

    def stored(self, page: int, parent: int | str, tokens: tuple[int, ...]) -> None:
        self._store(page, parent, tokens)
        if self.other is not None:
            self.other.stored(page, parent, tokens)

    def removed(self, page: int) -> None:
        self.chains.pop(page, None)
        if self.other is not None:
            self.other.removed(page)


class Cache(FakeEngine):
    """An engine that is nothing but a prefix cache; every method runs on the caller's thread."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(EngineConfig(page_size=PAGE))
        self.allocator = PageAllocator(num_pages, PAGE)
        self.watchers_seen: list[PageEvents | None] = []
        self._chains = Chains()
        self.allocator.watch(self._chains)

    def watch_pages(self, events: PageEvents | None) -> None:
        self.watchers_seen.append(events)
        self._chains.other = events
        self.allocator.watch(self._chains)

    def serve(self, tokens: list[int], salt: str = "") -> None:
        """Run a sequence with these tokens, from its slot to its end."""
        pages = self.allocator.match_prefix(tokens, salt)
        if self.allocator.grow(pages, len(tokens)):
            self.allocator.insert(tokens, pages, salt=salt)
        self.allocator.free(pages)

    def chains(self) -> set[tuple[int, ...]]:
        """Return the tokens of every indexed page without a salt, those before it included."""
        return set(self._chains.chains.values())


class Subscriber:
    """Applies batches as a gateway does: it refuses gaps, unknown parents, and removals of what it does not have."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.snapshots = 0
        self.blocks: dict[int, tuple[int, ...]] = {}

    def apply(self, batch: common.KvEventBatch) -> None:
        assert batch.sequence_number == self.last + 1
        self.last += 1
        if batch.HasField("snapshot") and batch.snapshot.index == 0:
            self.snapshots += 1
            assert batch.events[0].WhichOneof("data") == "cleared"
        for event in batch.events:
            match event.WhichOneof("data"):
                case "stored":
                    tokens: tuple[int, ...] = ()
                    if event.stored.HasField("parent_block_hash"):
                        tokens = self.blocks[event.stored.parent_block_hash]
                    for block in event.stored.blocks:
                        assert block.block_size == len(block.token_ids) == PAGE
                        tokens = self.blocks[block.block_hash] = (*tokens, *block.token_ids)
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        del self.blocks[block_hash]
                case _:
                    self.blocks.clear()


async def follow(feed: PageFeed, subscriber: Subscriber) -> None:
    async with aclosing(feed.batches(subscriber.last)) as batches:
        async for batch in batches:
            subscriber.apply(batch)


async def caught_up(batches: AsyncIterator[common.KvEventBatch], subscriber: Subscriber, cache: Cache) -> None:
    """Apply batches until the subscriber has what the cache has."""
    async with asyncio.timeout(10):
        while set(subscriber.blocks.values()) != cache.chains():
            subscriber.apply(await anext(batches))


async def settled(check: Callable[[], bool]) -> None:
    """Let the event loop run until `check` holds."""
    for turn in count():
        if check():
            return
        assert turn < 200
        await asyncio.sleep(0)


def sequence(seed: int, length: int) -> list[int]:
    """Return tokens whose beginning is shared with other seeds of the same parity."""
    return [seed % 2] * min(length, 2 * PAGE) + [seed + 2] * max(0, length - 2 * PAGE)


CLEAR = 8
Actions = st.lists(st.tuples(st.integers(0, CLEAR), st.sampled_from([20, 50, 90])), max_size=30)
"""(seed, length) of sequences, or CLEAR instead of a seed."""


@settings(max_examples=40, deadline=None)
@given(before=Actions, after=Actions, ring=st.sampled_from([2, 8, 64]), turns=st.sampled_from([1, 3, 8]))
async def test_a_subscriber_follows_any_history(before: Any, after: Any, ring: int, turns: int) -> None:
    cache = Cache(8)

    def act(actions: Any) -> None:
        for action in actions:
            if action[0] == CLEAR:
                cache.allocator.clear_index()
            else:
                cache.serve(sequence(*action))

    act(before)
    feed, subscriber = PageFeed(cache, ring), Subscriber()
    task = asyncio.create_task(follow(feed, subscriber))
    await settled(lambda: subscriber.snapshots > 0)
    for action in after:
        act([action])
        for _ in range(turns):
            await asyncio.sleep(0)
    await settled(lambda: task.done() or set(subscriber.blocks.values()) == cache.chains())
    feed.close()
    await task
    cache.close(5)


async def test_a_subscriber_that_the_ring_has_passed_starts_anew_and_one_that_comes_again_counts_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = Cache(8)
    feed, subscriber = PageFeed(cache, ring_events=3), Subscriber()
    async with aclosing(feed.batches(0)) as batches:
        subscriber.apply(await anext(batches))
        for seed in range(6):
            cache.serve(sequence(seed, 64))
        await asyncio.sleep(0)
        with caplog.at_level("INFO"):
            subscriber.apply(await anext(batches))
        assert subscriber.snapshots == 2
        assert "too slow" in caplog.text
        assert set(subscriber.blocks.values()) == cache.chains()
    again = Subscriber(last=41)
    async with aclosing(feed.batches(41)) as batches:
        await caught_up(batches, again, cache)
    cache.close(5)


async def test_nothing_is_reported_without_a_subscriber() -> None:
    cache = Cache(8)
    feed = PageFeed(cache)
    assert cache.watchers_seen == []
    for _ in range(2):
        first = feed.batches(0)
        await anext(first)
        second = feed.batches(0)
        await anext(second)
        await first.aclose()
        assert cache.watchers_seen[-1] is feed
        await second.aclose()
        assert cache.watchers_seen[-1] is None
    assert len(cache.watchers_seen) == 4
    cache.close(5)


async def test_pages_with_a_salt_are_not_reported() -> None:
    cache, subscriber = Cache(6), Subscriber()
    feed = PageFeed(cache)
    async with aclosing(feed.batches(0)) as batches:
        subscriber.apply(await anext(batches))
        cache.serve(sequence(0, 32))
        cache.serve(sequence(0, 64), salt="secret")
        assert len(cache.chains()) == 2
        await caught_up(batches, subscriber, cache)
        # Every page is evicted, those with a salt as well.
        assert cache.allocator.grow([], 6 * PAGE)
        await caught_up(batches, subscriber, cache)
        assert not subscriber.blocks
    cache.close(5)


async def test_a_large_index_arrives_in_several_batches_of_one_snapshot() -> None:
    pages = 2 * BATCH_EVENTS + 3
    cache = Cache(pages)
    cache.serve([token % 5 for token in range(pages * PAGE)])
    feed = PageFeed(cache)
    async with aclosing(feed.batches(0)) as warming:
        await anext(warming)
        for _ in range(pages // POSTS_PER_TURN + 2):
            await asyncio.sleep(0)
        subscriber = Subscriber()
        async with aclosing(feed.batches(0)) as batches:
            chunks = [await anext(batches) for _ in range(3)]
        for chunk in chunks:
            subscriber.apply(chunk)
    assert [(c.snapshot.index, c.snapshot.count, c.snapshot.blocks) for c in chunks] == [
        (i, 3, pages) for i in range(3)
    ]
    assert len(chunks[1].events) == 1, "blocks of one chain are one event"
    assert len(subscriber.blocks) == pages
    cache.close(5)


async def test_equal_tokens_have_equal_hashes_in_every_server() -> None:
    hashes = []
    for seeds in ((0, 2), (2, 0)):
        cache, subscriber = Cache(16), Subscriber()
        for seed in seeds:
            cache.serve(sequence(seed, 64))
        feed = PageFeed(cache)
        task = asyncio.create_task(follow(feed, subscriber))
        await settled(lambda subscriber=subscriber: len(subscriber.blocks) == 6)  # type: ignore[misc]
        hashes.append(subscriber.blocks)
        feed.close()
        await task
        cache.close(5)
    assert hashes[0] == hashes[1]
    assert all(-(2**63) <= block_hash < 2**63 for block_hash in hashes[0])
