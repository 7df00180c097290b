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


async def test_callers_with_equal_keys_share_a_flight() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    callers = [asyncio.create_task(flights.run("a", work)) for _ in range(3)]
    await eventually(lambda: work.started)
    work.finish.set()
    assert await asyncio.gather(*callers) == [(1, False), (1, True), (1, True)]
    assert len(flights) == 0


async def test_callers_with_different_keys_do_not_share_a_flight() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    callers = [asyncio.create_task(flights.run(key, work)) for key in "ab"]
    await eventually(lambda: work.started == 2)
    assert flights.get("a") is not flights.get("b")
    work.finish.set()
    assert [joined for _, joined in await asyncio.gather(*callers)] == [False, False]


async def test_a_flight_is_cancelled_when_its_last_waiter_leaves() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    callers = [asyncio.create_task(flights.run("a", work)) for _ in range(2)]
    await eventually(lambda: work.started)
    callers[0].cancel()
    await asyncio.wait(callers[:1])
    await asyncio.sleep(0)
    assert (work.cancelled, len(flights)) == (0, 1)
    callers[1].cancel()
    await eventually(lambda: work.cancelled == 1)
    assert (flights.num_abandoned, len(flights)) == (1, 0)


async def test_a_retained_flight_outlives_the_caller_that_started_it() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    flight, joined = flights.join("a", work)
    assert not joined
    flights.retain(flight)
    flights.leave(flight)
    work.finish.set()
    assert await flights.wait(flight) == 1
    assert (flight.waiters, flights.num_abandoned) == (0, 0)


async def test_a_flight_without_grace_time_leaves_the_table_at_once() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    flight, _ = flights.join("a", Work())
    flights.leave(flight)
    assert flights.get("a") is None
    with pytest.raises(asyncio.CancelledError):
        await flight.task


async def test_a_caller_within_the_grace_time_joins_the_flight() -> None:
    flights: SingleFlight[str, int] = SingleFlight(grace_s=30)
    work = Work()
    first = asyncio.create_task(flights.run("a", work))
    await eventually(lambda: work.started)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(flights.run("a", work))
    await asyncio.sleep(0)
    work.finish.set()
    assert await second == (1, True)
    assert flights.num_abandoned == 0


async def test_a_flight_is_cancelled_at_the_end_of_the_grace_time() -> None:
    flights: SingleFlight[str, int] = SingleFlight(grace_s=0.01)
    work = Work()
    first = asyncio.create_task(flights.run("a", work))
    await eventually(lambda: work.started)
    first.cancel()
    await eventually(lambda: work.cancelled == 1)
    assert (flights.num_abandoned, len(flights)) == (1, 0)


async def test_a_caller_after_an_abandoned_flight_starts_a_new_one() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    first = asyncio.create_task(flights.run("a", work))
    await eventually(lambda: work.started)
    first.cancel()
    await eventually(lambda: flights.num_abandoned == 1)
    second = asyncio.create_task(flights.run("a", work))
    await eventually(lambda: work.started == 2)
    work.finish.set()
    assert await second == (2, False)


async def test_an_error_reaches_every_waiter_and_is_not_remembered() -> None:
    flights: SingleFlight[str, int] = SingleFlight()

    async def fail() -> int:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await flights.run("a", fail)
    assert len(flights) == 0


async def test_the_given_spawn_starts_the_task() -> None:
    names: list[str] = []

    def spawn(work, name):  # type: ignore[no-untyped-def]
        names.append(name)
        return asyncio.create_task(work)

    flights: SingleFlight[str, int] = SingleFlight(spawn=spawn)
    work = Work()
    work.finish.set()
    assert await flights.run("a", work) == (1, False)
    assert names == ["flight 'a'"]


async def test_close_cancels_running_flights() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    caller = asyncio.create_task(flights.run("a", work))
    await eventually(lambda: work.started)
    await flights.close()
    assert work.cancelled == 1
    with pytest.raises(asyncio.CancelledError):
        await caller


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
        flights: SingleFlight[str, int] = SingleFlight()
        await ask(flights)
        await asyncio.sleep(0)
        assert [error() for error in errors] == [None]
    finally:
        gc.enable()
