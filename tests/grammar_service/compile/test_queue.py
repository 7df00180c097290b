"""The queue of compilations: accepted ones come first, and a cancellation loses no worker."""

from __future__ import annotations

import asyncio

import pytest

from grammar_service.compile.queue import CompileQueue


def acquirer(queue: CompileQueue, name: str, order: list[str], *, accepted: bool = False) -> asyncio.Task[None]:
    async def take() -> None:
        await queue.acquire(accepted=accepted)
        order.append(name)

    return asyncio.create_task(take())


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_accepted_compilations_come_first_and_each_group_keeps_its_order() -> None:
    queue, order = CompileQueue(2, 600), list[str]()
    await queue.acquire()
    await queue.acquire()
    tasks = [acquirer(queue, name, order, accepted=name.startswith("a")) for name in ("o1", "a1", "o2", "a2")]
    await settled()
    assert (order, queue.num_waiting) == ([], 2)
    for seen in (["a1"], ["a1", "a2"], ["a1", "a2", "o1"], ["a1", "a2", "o1", "o2"]):
        queue.release()
        await settled()
        assert order == seen
    queue.release()
    queue.release()
    assert repr(queue) == "<CompileQueue free=2 accepted=0 others=0>"
    await asyncio.gather(*tasks)


async def test_a_waiting_compilation_may_be_promoted() -> None:
    queue, order = CompileQueue(1, 600), list[str]()
    await queue.acquire()

    async def take(name: str) -> None:
        await queue.acquire(name)
        order.append(name)

    tasks = [asyncio.create_task(take(name)) for name in ("first", "second", "third")]
    await settled()
    queue.promote("second")
    queue.promote("unknown")
    assert queue.num_waiting == 2
    tasks.append(acquirer(queue, "accepted", order, accepted=True))
    await settled()
    for seen in ("second", "accepted", "first", "third"):
        queue.release()
        await settled()
        assert order[-1] == seen
    await asyncio.gather(*tasks)
    queue.release()
    assert repr(queue) == "<CompileQueue free=1 accepted=0 others=0>"


async def test_a_promoted_compilation_may_be_cancelled() -> None:
    queue = CompileQueue(1, 600)
    await queue.acquire()
    task = asyncio.create_task(queue.acquire("one"))
    await settled()
    queue.promote("one")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert repr(queue) == "<CompileQueue free=0 accepted=0 others=0>"


async def test_a_cancelled_waiter_gets_no_worker() -> None:
    queue, order = CompileQueue(1, 600), list[str]()
    await queue.acquire()
    first, second = (acquirer(queue, name, order) for name in ("first", "second"))
    await settled()
    first.cancel()
    # The worker is released before the cancelled task has run, which must not get it.
    queue.release()
    await settled()
    assert order == ["second"]
    assert first.cancelled()
    queue.release()
    assert repr(queue) == "<CompileQueue free=1 accepted=0 others=0>"
    await second


async def test_a_waiter_that_is_cancelled_with_a_worker_passes_it_on() -> None:
    queue, order = CompileQueue(1, 600), list[str]()
    await queue.acquire()
    first, second = acquirer(queue, "first", order, accepted=True), acquirer(queue, "second", order)
    await settled()
    queue.release()
    first.cancel()  # it has a worker and has not run yet
    with pytest.raises(asyncio.CancelledError):
        await first
    await settled()
    assert order == ["second"]
    queue.release()
    assert repr(queue) == "<CompileQueue free=1 accepted=0 others=0>"
    await second


async def test_a_compilation_that_waited_too_long_leaves_the_queue_and_the_others_keep_their_place() -> None:
    queue, order = CompileQueue(1, 0.05), list[str]()
    await queue.acquire()
    promoted = asyncio.create_task(queue.acquire("promoted"))
    await settled()
    queue.promote("promoted")
    accepted = acquirer(queue, "accepted", order, accepted=True)
    with pytest.raises(TimeoutError):
        await queue.acquire()
    assert repr(queue) == "<CompileQueue free=0 accepted=2 others=0>"
    queue.release()
    await promoted
    queue.release()
    await accepted
    queue.release()
    assert repr(queue) == "<CompileQueue free=1 accepted=0 others=0>"


async def test_a_waiter_that_is_cancelled_when_its_time_is_over_gives_back_no_worker() -> None:
    queue = CompileQueue(1, 600)
    await queue.acquire()
    late = asyncio.create_task(queue.acquire())
    await settled()
    (waiter,) = queue._others
    queue._expire(waiter)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert repr(queue) == "<CompileQueue free=0 accepted=0 others=0>"


async def test_a_worker_that_comes_in_time_is_kept() -> None:
    queue = CompileQueue(1, 600)
    await queue.acquire()
    waiting = asyncio.create_task(queue.acquire())
    await settled()
    (waiter,) = queue._others
    queue.release()
    queue._expire(waiter)
    await waiting
    assert repr(queue) == "<CompileQueue free=0 accepted=0 others=0>"
