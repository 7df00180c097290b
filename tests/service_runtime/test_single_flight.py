"""Callers with equal keys share one task, which ends with the last of them."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from service_runtime.single_flight import SingleFlight
from tests.waiting import eventually


class Work:
    """Counts its starts and cancellations; returns the number of starts once `finish` is set."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.finish = asyncio.Event()

    async def __call__(self) -> int:
        self.started += 1
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.started


Flights = SingleFlight[str, int]


async def test_callers_with_equal_keys_share_a_flight_and_others_do_not() -> None:
    flights, work = Flights(), Work()
    callers = [asyncio.create_task(flights.run(key, work)) for key in "aaab"]
    await eventually(lambda: work.started == 2)
    assert flights.get("a") is not flights.get("b")
    work.finish.set()
    assert [joined for _, joined in await asyncio.gather(*callers)] == [False, True, True, False]
    assert len(flights) == 0


async def test_a_flight_is_cancelled_when_its_last_waiter_leaves_and_the_next_caller_starts_a_new_one() -> None:
    flights, work = Flights(), Work()
    callers = [asyncio.create_task(flights.run("a", work)) for _ in range(2)]
    await eventually(lambda: work.started)
    callers[0].cancel()
    await asyncio.wait(callers[:1])
    await asyncio.sleep(0)
    assert (work.cancelled, len(flights)) == (0, 1)
    callers[1].cancel()
    await eventually(lambda: work.cancelled == 1)
    assert (flights.num_abandoned, len(flights)) == (1, 0)
    work.finish.set()
    assert await flights.run("a", work) == (2, False)


async def test_a_retained_flight_outlives_the_caller_that_started_it() -> None:
    flights, work = Flights(), Work()
    flight, joined = flights.join("a", work)
    assert not joined
    flights.retain(flight)
    flights.leave(flight)
    work.finish.set()
    assert await flights.wait(flight) == 1
    assert (flight.waiters, flights.num_abandoned) == (0, 0)


async def test_a_flight_without_grace_time_leaves_the_table_at_once() -> None:
    flights = Flights()
    flight, _ = flights.join("a", Work())
    flights.leave(flight)
    assert flights.get("a") is None
    with pytest.raises(asyncio.CancelledError):
        await flight.task


@pytest.mark.parametrize("grace_s", [30, 0.01])
async def test_a_caller_within_the_grace_time_joins_the_flight(grace_s: float) -> None:
    flights, work = Flights(grace_s=grace_s), Work()
    first = asyncio.create_task(flights.run("a", work))
    await eventually(lambda: work.started)
    first.cancel()
    await asyncio.wait([first])
    if grace_s < 1:
        await eventually(lambda: work.cancelled == 1)
        assert (flights.num_abandoned, len(flights)) == (1, 0)
        return
    second = asyncio.create_task(flights.run("a", work))
    await asyncio.sleep(0)
    work.finish.set()
    assert await second == (1, True)
    assert flights.num_abandoned == 0


async def test_the_given_spawn_starts_the_task_and_close_cancels_it() -> None:
    names: list[str] = []

    def spawn(work, name):  # type: ignore[no-untyped-def]
        names.append(name)
        return asyncio.create_task(work)

    flights, work = Flights(spawn=spawn), Work()
    caller = asyncio.create_task(flights.run("a", work))
    await eventually(lambda: work.started)
    assert names == ["flight 'a'"]
    await flights.close()
    assert work.cancelled == 1
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_close_waits_for_a_flight_that_was_abandoned() -> None:
    flights, ended = Flights(), asyncio.Event()

    async def work() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await ended.wait()
        return 1

    caller = asyncio.create_task(flights.run("a", work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    closing = asyncio.create_task(flights.close())
    await asyncio.sleep(0)
    assert (len(flights), flights.num_abandoned, closing.done()) == (0, 1, False)
    ended.set()
    await closing


@pytest.mark.parametrize("joins_first", [False, True], ids=["run", "wait"])
async def test_a_failed_flight_is_freed_with_its_last_waiter(joins_first: bool) -> None:
    """Its error holds the frames of what failed, and with them a request of any size."""

    class Held(Exception):
        pass

    errors: list[weakref.ref[Held]] = []

    async def fail() -> int:
        error = Held()
        errors.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    async def ask(flights: SingleFlight[str, int]) -> None:
        with pytest.raises(Held):
            await (flights.wait(flights.join("a", fail)[0]) if joins_first else flights.run("a", fail))

    gc.collect()
    gc.disable()
    try:
        flights = Flights()
        for failures in (1, 2):  # an error is not remembered
            await ask(flights)
            await asyncio.sleep(0)
            assert [error() for error in errors] == [None] * failures
        assert len(flights) == 0
    finally:
        gc.enable()
