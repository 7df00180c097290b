"""Places to compile in: who was accepted goes first, and nothing is lost to a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from grammar_service.compile.queue import CompileQueue


def taker(turns: CompileQueue, name: str, order: list[str], *, accepted: bool = False) -> asyncio.Task[None]:
    async def take() -> None:
        await turns.take(accepted=accepted)
        order.append(name)

    return asyncio.create_task(take())


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_accepted_go_first_and_each_line_keeps_its_order() -> None:
    turns, order = CompileQueue(2), list[str]()
    await turns.take()
    await turns.take()
    tasks = [taker(turns, name, order, accepted=name.startswith("a")) for name in ("o1", "a1", "o2", "a2")]
    await settled()
    assert (order, turns.waiting) == ([], 2)
    for seen in (["a1"], ["a1", "a2"], ["a1", "a2", "o1"], ["a1", "a2", "o1", "o2"]):
        turns.give_back()
        await settled()
        assert order == seen
    turns.give_back()
    turns.give_back()
    assert repr(turns) == "<CompileQueue free=2 accepted=0 others=0>"
    await asyncio.gather(*tasks)


async def test_one_that_waits_may_be_hurried() -> None:
    turns, order = CompileQueue(1), list[str]()
    await turns.take()

    async def take(name: str) -> None:
        await turns.take(name)
        order.append(name)

    tasks = [asyncio.create_task(take(name)) for name in ("first", "second", "third")]
    await settled()
    turns.promote("second")
    turns.promote("nobody")
    assert turns.waiting == 2
    tasks.append(taker(turns, "accepted", order, accepted=True))
    await settled()
    for seen in ("second", "accepted", "first", "third"):
        turns.give_back()
        await settled()
        assert order[-1] == seen
    await asyncio.gather(*tasks)
    turns.give_back()
    assert repr(turns) == "<CompileQueue free=1 accepted=0 others=0>"


async def test_a_hurried_one_may_be_cancelled() -> None:
    turns = CompileQueue(1)
    await turns.take()
    task = asyncio.create_task(turns.take("one"))
    await settled()
    turns.promote("one")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert repr(turns) == "<CompileQueue free=0 accepted=0 others=0>"


async def test_one_that_leaves_the_line_takes_nothing() -> None:
    turns, order = CompileQueue(1), list[str]()
    await turns.take()
    first, second = (taker(turns, name, order) for name in ("first", "second"))
    await settled()
    first.cancel()
    # Given back before the cancelled one has run: it must not get the place.
    turns.give_back()
    await settled()
    assert order == ["second"]
    assert first.cancelled()
    turns.give_back()
    assert repr(turns) == "<CompileQueue free=1 accepted=0 others=0>"
    await second


async def test_one_that_is_cancelled_with_its_turn_passes_it_on() -> None:
    turns, order = CompileQueue(1), list[str]()
    await turns.take()
    first, second = taker(turns, "first", order, accepted=True), taker(turns, "second", order)
    await settled()
    turns.give_back()
    first.cancel()  # its turn has come and it has not run yet
    with pytest.raises(asyncio.CancelledError):
        await first
    await settled()
    assert order == ["second"]
    turns.give_back()
    assert repr(turns) == "<CompileQueue free=1 accepted=0 others=0>"
    await second
