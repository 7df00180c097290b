"""Compilations of each tenant at a time: turns, refusals, and turns of tasks that are cancelled."""

from __future__ import annotations

import asyncio

import pytest

from gpu_engine.api.errors import LimitExceeded
from gpu_engine.api.request import GrammarKind, GrammarOwner, GrammarSpec
from gpu_engine.sidecar.compile_admission import TenantTurns


def owner(tenant: str = "acme", at_once: int = 1, waiting: int = 2) -> GrammarOwner:
    return GrammarOwner(tenant, tenant, at_once, waiting, 0)


class Compilations:
    """Compilations that the test ends; each is known by a number."""

    def __init__(self) -> None:
        self.limiter = TenantTurns()
        self.running: list[int] = []
        self._ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def begin(self, number: int, of: GrammarOwner) -> None:
        self.limiter.admit(of)
        self._ends[number] = asyncio.Event()
        self.tasks[number] = task = asyncio.create_task(self._run(number, of))
        task.add_done_callback(lambda _: self.limiter.ended(of))
        await self.settle()

    async def _run(self, number: int, of: GrammarOwner) -> None:
        async with self.limiter.turn(of):
            self.running.append(number)
            try:
                await self._ends[number].wait()
            finally:
                self.running.remove(number)

    async def end(self, number: int) -> None:
        self._ends[number].set()
        await self.tasks[number]
        await self.settle()

    async def cancel(self, *numbers: int) -> None:
        for number in numbers:
            self.tasks[number].cancel()
        await asyncio.gather(*(self.tasks[number] for number in numbers), return_exceptions=True)
        await self.settle()

    async def settle(self) -> None:
        """Run every task up to where it waits: each passes a turn on within two rounds of the loop."""
        for _ in range(5):
            await asyncio.sleep(0)


async def test_so_many_run_some_wait_and_one_more_is_refused() -> None:
    made, mine = Compilations(), owner()
    for number in range(3):
        await made.begin(number, mine)
    assert made.running == [0]
    with pytest.raises(LimitExceeded, match="max_compilations: tenant acme: 1 compilations may run, and 2 wait"):
        made.limiter.admit(mine)
    await made.begin(9, owner("beta"))
    assert made.running == [0, 9], "another tenant has turns of its own"
    await made.end(0)
    assert made.running == [9, 1]
    await made.begin(3, mine)
    await made.end(1)
    assert made.running == [9, 2]
    for number in (2, 3, 9):
        await made.end(number)
    assert repr(made.limiter) == "<TenantTurns 0 refused=1>"


async def test_a_turn_of_a_task_that_is_cancelled_is_the_next_one_s() -> None:
    made, mine = Compilations(), owner(waiting=5)
    for number in range(4):
        await made.begin(number, mine)
    await made.cancel(1)  # it waits
    assert made.running == [0]
    await made.cancel(0)  # it runs
    assert made.running == [2]
    # The turn comes to 3 in the moment in which it is cancelled.
    await made.begin(4, mine)
    made.tasks[2].cancel()
    await asyncio.sleep(0)
    await made.cancel(3)
    assert made.running == [4]
    await made.end(4)
    await made.begin(5, mine)
    assert made.running == [5]
    await made.cancel(5)
    assert repr(made.limiter) == "<TenantTurns 0 refused=0>"


async def test_no_limit_lets_all_run() -> None:
    made, mine = Compilations(), owner(at_once=0)
    for number in range(20):
        await made.begin(number, mine)
    assert len(made.running) == 20
    await made.cancel(*range(20))


def test_owners_with_one_space_share_a_grammar_whoever_compiles_it() -> None:
    one, other = (
        GrammarSpec(GrammarKind.REGEX, "a", owner=GrammarOwner("", name, 1, 1, 1)) for name in ("acme", "beta")
    )
    apart = GrammarSpec(GrammarKind.REGEX, "a", owner=owner("acme"))
    assert one == other
    assert hash(one) == hash(other)
    assert apart != one
    assert apart != GrammarSpec(GrammarKind.REGEX, "a")
