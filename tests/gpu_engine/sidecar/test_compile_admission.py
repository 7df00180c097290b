"""Compilations that are admitted, to the queue of the grammar process and to the turns of their tenant."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gpu_engine.api.errors import LimitExceeded
from gpu_engine.api.request import GrammarKind, GrammarOwner, GrammarSpec
from gpu_engine.sidecar.compile_admission import QueuePlaces, TenantTurns


def spec(number: int, backend: int = 0) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, f"a{number}", whitespace=0, backend=backend)


def owned(number: int, tenant: str, weight: float = 1.0) -> GrammarSpec:
    return replace(spec(number), owner=GrammarOwner(tenant, tenant, 0, 0, 0, weight))


def test_one_more_than_the_bound_is_refused_by_the_name_of_its_setting() -> None:
    admission = QueuePlaces()
    assert [admission.enter(spec(i), 1, 2) for i in range(2)] == [True, True]
    with pytest.raises(LimitExceeded, match="compile_queue: 2 compilations"):
        admission.enter(spec(2), 1, 2)
    assert admission.refused == 1
    admission.leave(spec(0))
    assert admission.enter(spec(2), 1, 2)


def test_each_backend_has_a_queue_of_its_own_unless_the_process_names_no_bound() -> None:
    admission = QueuePlaces()
    assert admission.enter(spec(0, backend=1), 1, 1)
    assert admission.enter(spec(0, backend=2), 1, 1)
    with pytest.raises(LimitExceeded):
        admission.enter(spec(1, backend=2), 1, 1)
    assert all(QueuePlaces().enter(spec(i), 1, 0) for i in range(1000))


def test_what_the_process_has_is_let_through_and_takes_no_place() -> None:
    admission = QueuePlaces()
    admission.compiled(spec(0), 1)
    assert admission.enter(spec(1), 1, 1)
    assert not admission.enter(spec(0), 1, 1)
    with pytest.raises(LimitExceeded):
        admission.enter(spec(2), 1, 1)


def test_what_the_last_process_had_is_not_known_of_the_next() -> None:
    admission = QueuePlaces()
    admission.compiled(spec(0), 1)
    assert admission.enter(spec(0), 2, 1)
    admission.compiled(spec(1), 2)
    with pytest.raises(LimitExceeded):
        admission.enter(spec(2), 2, 1)
    assert not admission.enter(spec(1), 2, 1)


def test_what_is_used_stays_known() -> None:
    admission = QueuePlaces(max_known=2)
    admission.compiled(spec(0), 1)
    admission.compiled(spec(1), 1)
    assert not admission.enter(spec(0), 1, 1)
    admission.compiled(spec(2), 1)
    assert not admission.enter(spec(0), 1, 1)
    assert admission.enter(spec(1), 1, 1)


def test_above_the_bound_a_tenant_is_sent_while_another_has_more_over_its_weight() -> None:
    admission = QueuePlaces()
    for i in range(6):
        admission.enter(owned(i, "flood"), 1, 6)
    for i in range(2):
        admission.enter(owned(i, "steady"), 1, 6)
    with pytest.raises(LimitExceeded, match="compile_queue: 6 compilations"):
        admission.enter(owned(6, "flood"), 1, 6)
    # The grammar process refuses the newest ones of the tenant with the most.
    for i in (5, 4):
        admission.leave(owned(i, "flood"))
    with pytest.raises(LimitExceeded):
        admission.enter(owned(6, "flood"), 1, 6)
    assert admission.enter(owned(2, "steady"), 1, 6)
    with pytest.raises(LimitExceeded):
        admission.enter(owned(3, "steady"), 1, 6)
    assert admission.enter(owned(0, "heavy", 2.0), 1, 6)
    assert admission.refused == 3


def test_a_tenant_whose_compilations_have_ended_holds_nothing() -> None:
    admission = QueuePlaces()
    admission.enter(owned(0, "acme"), 1, 1)
    admission.leave(owned(0, "acme"))
    assert repr(admission) == "<QueuePlaces running=0 known=0 refused=0>"
    assert admission._running == {0: {}}
    assert admission.enter(spec(0), 1, 1)


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
    for number in range(20, 40):
        await made.begin(number, owner("without a limit", at_once=0))
    assert len(made.running) == 20
    await made.cancel(*range(20, 40))
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


async def test_a_task_that_is_cancelled_while_a_turn_is_passed_on_ends_as_cancelled() -> None:
    made, mine = Compilations(), owner()
    for number in range(3):
        await made.begin(number, mine)
    await made.cancel(0, 1)  # the turn of 0 is passed on when 1 is cancelled and has not run yet
    assert made.tasks[1].cancelled()
    assert made.running == [2]
    await made.end(2)
    assert repr(made.limiter) == "<TenantTurns 0 refused=0>"


def test_owners_with_one_space_share_a_grammar_whoever_compiles_it() -> None:
    one, other = (
        GrammarSpec(GrammarKind.REGEX, "a", owner=GrammarOwner("", name, 1, 1, 1)) for name in ("acme", "beta")
    )
    apart = GrammarSpec(GrammarKind.REGEX, "a", owner=owner("acme"))
    assert one == other
    assert hash(one) == hash(other)
    assert apart != one
    assert apart != GrammarSpec(GrammarKind.REGEX, "a")
