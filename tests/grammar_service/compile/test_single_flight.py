"""One task for many askers; it ends with the last of them."""

from __future__ import annotations

import asyncio

import pytest

from grammar_service.compile.single_flight import Flights
from tests.waiting import eventually


class Work:
    """Counts its starts and ends; returns when told."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    async def __call__(self) -> int:
        self.started += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.started


async def test_equal_askers_share_a_flight() -> None:
    flights: Flights[int] = Flights()
    work = Work()
    asked = [asyncio.create_task(flights.join("a", work)) for _ in range(3)]
    await eventually(lambda: work.started)
    work.go.set()
    assert await asyncio.gather(*asked) == [(1, False), (1, True), (1, True)]
    assert len(flights) == 0


async def test_a_flight_ends_with_its_last_asker() -> None:
    flights: Flights[int] = Flights(grace_s=0)
    work = Work()
    asked = [asyncio.create_task(flights.join("a", work)) for _ in range(2)]
    await eventually(lambda: work.started)
    asked[0].cancel()
    await asyncio.wait(asked[:1])
    await asyncio.sleep(0)
    assert (work.cancelled, len(flights)) == (0, 1)
    asked[1].cancel()
    await eventually(lambda: work.cancelled == 1)
    assert (flights.abandoned, len(flights)) == (1, 0)


async def test_an_asker_within_the_grace_finds_the_flight() -> None:
    flights: Flights[int] = Flights(grace_s=30)
    work = Work()
    first = asyncio.create_task(flights.join("a", work))
    await eventually(lambda: work.started)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(flights.join("a", work))
    await asyncio.sleep(0)
    work.go.set()
    assert await second == (1, True)
    assert flights.abandoned == 0


async def test_who_comes_after_a_flight_was_given_up_starts_a_new_one() -> None:
    flights: Flights[int] = Flights(grace_s=0)
    work = Work()
    first = asyncio.create_task(flights.join("a", work))
    await eventually(lambda: work.started)
    first.cancel()
    await eventually(lambda: flights.abandoned == 1)
    second = asyncio.create_task(flights.join("a", work))
    await eventually(lambda: work.started == 2)
    work.go.set()
    assert await second == (2, False)


async def test_an_error_is_for_every_asker_and_not_kept() -> None:
    flights: Flights[int] = Flights()

    async def fails() -> int:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await flights.join("a", fails)
    assert len(flights) == 0


async def test_closing_ends_what_runs() -> None:
    flights: Flights[int] = Flights()
    work = Work()
    asked = asyncio.create_task(flights.join("a", work))
    await eventually(lambda: work.started)
    await flights.close()
    assert work.cancelled == 1
    with pytest.raises(asyncio.CancelledError):
        await asked
