"""The queue of compilations: accepted ones come first, a cancellation loses no worker, and between tenants workers and
places go by weight, under a clock that the test moves."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_service.compile.queue import NO_TENANT, CompileQueue, QueueFullError, Share

ACME, BETA = Share("acme"), Share("beta")


class Clock:
    """The time of a queue."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A queue with compilations that end when the test says so."""

    def __init__(self, workers: int, max_waiting: float = math.inf) -> None:
        self.clock = Clock()
        self.queue = CompileQueue(workers, 600, self.clock, max_waiting=max_waiting)
        self.running: list[str] = []
        self.refused: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._shares: dict[str, Share] = {}

    async def ask(self, name: str, share: Share, *, accepted: bool = False) -> None:
        async def take() -> None:
            try:
                await self.queue.acquire(name, accepted=accepted, share=share)
            except QueueFullError:
                self.refused.append(name)
            else:
                self.running.append(name)

        self._tasks[name], self._shares[name] = asyncio.create_task(take()), share
        await settled()

    async def end(self, name: str, after_s: float = 0.0) -> None:
        self.clock.now_s += after_s
        self.running.remove(name)
        self.queue.release(self._shares[name])
        await settled()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settled()

    async def end_one_by_one(self, count: int, seconds: float) -> list[str]:
        """End the oldest running compilation `count` times, each `seconds` later; return which began meanwhile."""
        begun = list[str]()
        for _ in range(count):
            before = set(self.running)
            await self.end(self.running[0], seconds)
            begun += [name for name in self.running if name not in before]
        return begun


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_time_of_a_compilation_counts_while_it_runs() -> None:
    bench = Bench(2)
    for name, share in (("a0", ACME), ("a1", ACME), ("a2", ACME), ("b0", BETA), ("b1", BETA)):
        await bench.ask(name, share)
    await bench.end("a1", 5.0)
    assert bench.running == ["a0", "b0"]
    await bench.end("b0", 6.0)
    # a1 took 5 s, b0 took 6 s, and a0 has run for 11 s.
    assert bench.running == ["a0", "b1"]


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75), (0.25, 0.2)])
@pytest.mark.parametrize("accepted", [False, True])
async def test_workers_are_shared_by_weight(weight: float, share: float, accepted: bool) -> None:
    bench, heavy = Bench(2), Share("acme", weight)
    for i in range(150):
        await bench.ask(f"a{i}", heavy, accepted=accepted)
        await bench.ask(f"b{i}", BETA, accepted=accepted)
    begun = await bench.end_one_by_one(120, 0.5)
    assert sum(name[0] == "a" for name in begun) / len(begun) == pytest.approx(share, abs=0.03)


async def test_compilations_of_accepted_sequences_come_before_a_tenant_with_a_smaller_counter() -> None:
    bench = Bench(1)
    for name, share in (("a0", ACME), ("a1", ACME), ("b0", BETA)):
        await bench.ask(name, share)
    await bench.ask("a2", ACME, accepted=True)
    assert await bench.end_one_by_one(3, 1.0) == ["a2", "b0", "a1"]
    await bench.ask("a3", ACME)
    await bench.ask("b1", BETA)
    bench.queue.promote("a3")
    assert await bench.end_one_by_one(2, 1.0) == ["a3", "b1"]


async def test_nothing_is_kept_of_tenants_without_a_compilation() -> None:
    bench = Bench(1)
    for i in range(5):
        await bench.ask(f"a{i}", Share(f"tenant {i}"))
    await bench.cancel("a4")
    await bench.end_one_by_one(4, 1.0)
    assert not bench.running
    assert not bench.queue._usages
    assert repr(bench.queue) == "<CompileQueue free=1 accepted=0 others=0>"


async def test_a_cancelled_waiter_passes_its_worker_to_the_tenant_that_is_next() -> None:
    bench = Bench(1)
    for name, share in (("a0", ACME), ("a1", ACME), ("b0", BETA), ("b1", BETA)):
        await bench.ask(name, share)
    bench.clock.now_s += 1.0
    bench.running.remove("a0")
    bench.queue.release(ACME)
    await bench.cancel("b0")  # it has a worker and has not run yet
    assert bench.running == ["b1"]
    await bench.end("b1", 1.0)
    assert bench.running == ["a1"]


async def test_a_full_queue_takes_the_newest_place_of_the_tenant_with_the_most() -> None:
    bench = Bench(1, max_waiting=4)
    for i in range(6):
        await bench.ask(f"a{i}", ACME)
    assert bench.refused == ["a5"], "one tenant alone may take every place, and no more"
    for i in range(3):
        await bench.ask(f"b{i}", BETA)
    assert bench.refused == ["a5", "a4", "a3", "b2"], "each has two places now"
    await bench.ask("a6", ACME)
    assert bench.refused[4:] == ["a6"]
    assert bench.queue.num_waiting == 4
    assert await bench.end_one_by_one(5, 1.0) == ["b0", "a1", "b1", "a2"]


async def test_a_place_moves_only_to_a_tenant_that_then_has_fewer() -> None:
    bench = Bench(1, max_waiting=5)
    for name in ("a0", "a1", "a2", "a3"):
        await bench.ask(name, ACME)
    for name in ("b0", "b1", "b2"):
        await bench.ask(name, BETA)
    assert bench.refused == ["b2"], "with it both would have three"


async def test_places_are_shared_by_weight() -> None:
    bench, heavy = Bench(1, max_waiting=8), Share("acme", 3.0)
    await bench.ask("running", NO_TENANT)
    for i in range(8):
        await bench.ask(f"b{i}", BETA)
    for i in range(8):
        await bench.ask(f"a{i}", heavy)
    assert bench.refused == ["b7", "b6", "b5", "b4", "b3", "b2", "a6", "a7"]
    await bench.ask("b8", BETA)
    assert bench.refused[-1] == "b8"


async def test_accepted_and_promoted_compilations_need_no_place_and_lose_none() -> None:
    bench = Bench(1, max_waiting=2)
    for name in ("a0", "a1", "a2"):
        await bench.ask(name, ACME)
    bench.queue.promote("a2")
    await bench.ask("a3", ACME)
    await bench.ask("a4", ACME, accepted=True)
    await bench.ask("b0", BETA)
    assert bench.refused == ["a3"]
    assert repr(bench.queue) == "<CompileQueue free=0 accepted=2 others=2>"


async def test_a_compilation_that_loses_its_place_as_it_is_cancelled_gives_back_no_worker() -> None:
    bench = Bench(1, max_waiting=3)
    for i in range(4):
        await bench.ask(f"a{i}", ACME)
    taking = asyncio.create_task(bench.queue.acquire(share=BETA))
    await asyncio.sleep(0)
    bench._tasks["a3"].cancel()  # it has lost its place and has not run yet
    await settled()
    assert bench._tasks["a3"].cancelled()
    assert bench.refused == []
    assert repr(bench.queue) == "<CompileQueue free=0 accepted=0 others=3>"
    taking.cancel()


async def test_a_place_of_a_cancelled_compilation_is_free_at_once() -> None:
    bench = Bench(1, max_waiting=2)
    for i in range(3):
        await bench.ask(f"a{i}", ACME)
    bench._tasks["a2"].cancel()
    taking = bench.queue.acquire(share=ACME)
    assigned = taking.send(None)  # before the task of a2 has run: no QueueFullError
    assigned.cancel()
    with pytest.raises(asyncio.CancelledError):
        taking.throw(asyncio.CancelledError())
    await settled()
    assert repr(bench.queue) == "<CompileQueue free=0 accepted=0 others=1>"


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", ""]), st.booleans(), st.booleans()), max_size=80),
    st.integers(1, 9),
    st.sampled_from([(1.0, 1.0, 1.0), (1.0, 3.0, 0.5), (100.0, 1.0, 1.0)]),
)
@settings(deadline=None, max_examples=60)
def test_no_tenant_within_its_share_of_the_places_is_refused_or_displaced(
    asked: list[tuple[str, bool, bool]], max_waiting: int, weights: tuple[float, ...]
) -> None:
    shares = {name: Share(name, weight) for name, weight in zip("abc", weights, strict=True)} | {"": NO_TENANT}
    asyncio.run(_fill(asked, max_waiting, shares))


async def _fill(asked: list[tuple[str, bool, bool]], max_waiting: int, shares: dict[str, Share]) -> None:
    bench, waiting = Bench(1, max_waiting), dict[str, str]()
    for i, (tenant, accepted, ends) in enumerate(asked):
        name, refused = f"{tenant}{i}", len(bench.refused)
        before = Counter(waiting.values())
        await bench.ask(name, shares[tenant], accepted=accepted)
        if not accepted and name not in bench.running:
            waiting[name] = tenant
            before[tenant] += 1
        assert len(bench.refused) <= refused + 1
        for lost in bench.refused[refused:]:
            loser = waiting.pop(lost)
            total = sum(shares[other].weight for other in before)
            assert before[loser] > max_waiting * shares[loser].weight / total
        assert bench.queue.num_waiting == len(waiting) <= max_waiting
        if ends and bench.running:
            await bench.end(bench.running[0], 1.0)
            for begun in bench.running:
                waiting.pop(begun, None)
    for task in bench._tasks.values():
        task.cancel()


@dataclass
class Served:
    """The workers' time of each tenant over its weight, as the property counts it."""

    weights: dict[str, float]
    running: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    since: dict[tuple[str, str], float] = field(default_factory=dict)
    """By pairs that wait at once: the difference when the second began to wait."""

    def passes(self, seconds: float) -> None:
        for name, count in self.running.items():
            self.seconds[name] += count * seconds / self.weights[name]

    def difference(self, waiting: set[str]) -> float:
        """Return the largest difference, of two tenants that wait, since both have waited."""
        most = 0.0
        for pair in combinations(sorted(self.weights), 2):
            one, other = pair
            now = self.seconds[one] - self.seconds[other]
            if waiting.issuperset(pair):
                most = max(most, abs(now - self.since.setdefault(pair, now)))
            else:
                self.since.pop(pair, None)
        return most


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3), st.floats(0.1, 10)), min_size=1, max_size=60),
    st.integers(1, 3),
    st.sampled_from([(1.0, 1.0, 1.0), (1.0, 3.0, 0.5), (100.0, 1.0, 1.0)]),
)
@settings(deadline=None, max_examples=60)
def test_the_shares_of_two_tenants_that_wait_stay_close(
    jobs: list[tuple[str, float, float]], workers: int, weights: tuple[float, ...]
) -> None:
    shares = {name: Share(name, weight) for name, weight in zip("abc", weights, strict=True)}
    bound = 2 * workers * 10 / min(weights)
    asyncio.run(_serve(jobs, workers, shares, bound))


async def _serve(jobs: list[tuple[str, float, float]], workers: int, shares: dict[str, Share], bound: float) -> None:
    bench, served = Bench(workers), Served({name: share.weight for name, share in shares.items()})
    arrivals, ends, begun = list[tuple[float, str]](), list[tuple[float, str]](), set[str]()
    lasts = dict[str, float]()
    at_s = bench.clock.now_s
    for i, (name, gap_s, lasts_s) in enumerate(jobs):
        at_s += gap_s
        arrivals.append((at_s, f"{name}{i}"))
        lasts[f"{name}{i}"] = lasts_s
    asked = set[str]()
    while arrivals or ends:
        arrives = not ends or bool(arrivals and arrivals[0] <= ends[0])
        moment_s, job = arrivals.pop(0) if arrives else heapq.heappop(ends)
        served.passes(moment_s - bench.clock.now_s)
        bench.clock.now_s = moment_s
        if arrives:
            asked.add(job)
            await bench.ask(job, shares[job[0]])
        else:
            served.running[job[0]] -= 1
            await bench.end(job)
        for new in set(bench.running) - begun:
            begun.add(new)
            served.running[new[0]] += 1
            heapq.heappush(ends, (moment_s + lasts[new], new))
        assert served.difference({name[0] for name in asked - begun}) <= bound + 1e-6
    assert begun == set(lasts)
    assert repr(bench.queue) == f"<CompileQueue free={workers} accepted=0 others=0>"


# -- cancellations and time limits ----------------------------------------------------------------------------------


async def test_accepted_and_promoted_compilations_come_first_and_each_group_keeps_its_order() -> None:
    bench = Bench(1)
    for name in ("running", "o1", "o2", "o3"):
        await bench.ask(name, NO_TENANT)
    bench.queue.promote("o3")
    bench.queue.promote("unknown")
    assert bench.queue.num_waiting == 2
    for name in ("a1", "a2"):
        await bench.ask(name, NO_TENANT, accepted=True)
    assert await bench.end_one_by_one(5, 0.0) == ["o3", "a1", "a2", "o1", "o2"]
    await bench.end("o2")
    assert repr(bench.queue) == "<CompileQueue free=1 accepted=0 others=0>"


@pytest.mark.parametrize("promoted", [False, True])
async def test_a_cancelled_waiter_gets_no_worker(promoted: bool) -> None:
    bench = Bench(1)
    for name in ("running", "first", "second"):
        await bench.ask(name, NO_TENANT)
    if promoted:
        bench.queue.promote("first")
    bench._tasks["first"].cancel()
    # The worker is released before the cancelled task has run, which must not get it.
    await bench.end("running")
    assert bench.running == ["second"]
    assert bench._tasks["first"].cancelled()
    await bench.end("second")
    assert repr(bench.queue) == "<CompileQueue free=1 accepted=0 others=0>"


async def test_a_compilation_that_waited_too_long_leaves_the_queue_and_the_others_keep_their_place() -> None:
    queue = CompileQueue(1, 1.5)
    await queue.acquire()
    promoted = asyncio.create_task(queue.acquire("promoted"))
    await settled()
    queue.promote("promoted")
    accepted = asyncio.create_task(queue.acquire(accepted=True))
    with pytest.raises(TimeoutError):
        await queue.acquire()
    assert repr(queue) == "<CompileQueue free=0 accepted=2 others=0>"
    for waiting in (promoted, accepted):
        queue.release()
        await waiting
    queue.release()
    assert repr(queue) == "<CompileQueue free=1 accepted=0 others=0>"


@pytest.mark.parametrize("in_time", [False, True])
async def test_a_waiter_whose_time_is_over_as_it_is_cancelled_or_served_keeps_the_count(in_time: bool) -> None:
    queue = CompileQueue(1, 600)
    await queue.acquire()
    waiting = asyncio.create_task(queue.acquire())
    await settled()
    (waiter,) = queue._others
    if in_time:
        queue.release()
    queue._expire(waiter)
    if in_time:
        await waiting
    else:
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert repr(queue) == "<CompileQueue free=0 accepted=0 others=0>"
