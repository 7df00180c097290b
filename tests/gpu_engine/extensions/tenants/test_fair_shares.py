"""Slots between tenants: who is next, how much each gets, and what still holds of priorities and waits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_engine.api.prefill_shapes import PrefillShapes
from gpu_engine.api.request import Scheduling, TenantShare
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.scheduler import Plan, Scheduler, Sequence
from gpu_engine.extensions.tenants.fair_shares import FairShares


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class Named(Sequence):
    name: str


PAGE, CHUNK, ROWS = 16, 32, 4

ACME, BETA = TenantShare("acme", 1.0, 0), TenantShare("beta", 1.0, 0)


def scheduler(
    num_slots: int = 1,
    num_pages: int = 64,
    max_starvation_s: float = math.inf,
    order: FairShares[Named] | None = None,
) -> Scheduler[Named]:
    shapes = PrefillShapes(CHUNK, 1, CHUNK)
    allocator = PageAllocator(num_pages, PAGE)
    options = {
        "prefill_chunk": CHUNK,
        "lookahead": ROWS,
        "shapes": shapes,
        "max_starvation_s": max_starvation_s,
        "slot_order": order or FairShares(),
    }
    return Scheduler(num_slots, allocator, **options)  # type: ignore[arg-type]


def sequence(
    name: str,
    tenant: TenantShare | None,
    length: int = 10,
    *,
    priority: int = 0,
    max_queue_ms: int | None = None,
    waits_since_s: float = 0.0,
    held: bool = False,
) -> Named:
    scheduling = Scheduling(priority=priority, max_queue_ms=max_queue_ms, tenant=tenant)
    return Named(length, False, scheduling=scheduling, waits_since_s=waits_since_s, held=held, name=name)


def assigned(plan: Plan[Named]) -> list[str]:
    return [each.name for each in plan.assigned]


def answer(machine: Scheduler[Named], tokens: int = 10) -> str:
    """Give the only slot to the next sequence, which answers with so many tokens and ends; return its name."""
    ((one,),) = [machine.plan().assigned]
    one.length += tokens
    machine.remove(one)
    machine.check_integrity()
    return one.name


def test_a_tenant_s_flood_does_not_stand_in_front_of_another_s_request() -> None:
    machine = scheduler()
    for i in range(50):
        machine.add(sequence(f"a{i}", ACME))
    assert answer(machine) == "a0"
    machine.add(sequence("b0", BETA))
    assert answer(machine) == "b0"
    assert answer(machine) == "a1"


def test_a_priority_orders_the_requests_of_its_tenant_alone() -> None:
    machine = scheduler()
    for name, tenant, priority in (("a0", ACME, 1000), ("a1", ACME, 1000), ("b0", BETA, 0), ("b1", BETA, 5)):
        machine.add(sequence(name, tenant, priority=priority))
    assert [answer(machine) for _ in range(4)] == ["a0", "b1", "a1", "b0"]


def test_a_long_wait_counts_within_its_tenant() -> None:
    machine = scheduler(max_starvation_s=10.0)
    machine.add(sequence("a0", ACME, priority=-1, waits_since_s=0.0))
    machine.add(sequence("a1", ACME, waits_since_s=5.0))
    machine.plan(11.0)  # a1 has the slot, by its priority
    (running,) = machine.running
    assert running.name == "a0", "a0 had waited for too long"


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    machine = scheduler()
    for i in range(20):
        machine.add(sequence(f"a{i}", ACME))
    for _ in range(10):
        answer(machine)
    for i in range(10):
        machine.add(sequence(f"b{i}", BETA))
    # They take turns: beta does not get ten slots for the time in which it was idle.
    order = [answer(machine)[0] for _ in range(10)]
    assert sorted(order) == ["a"] * 5 + ["b"] * 5
    assert all(pair in ("ab", "ba") for pair in map("".join, zip(order[::2], order[1::2], strict=True)))


def test_a_queue_that_was_empty_lifts_the_next_tenant_to_the_last_one() -> None:
    machine = scheduler()
    for i in range(3):
        machine.add(sequence(f"a{i}", ACME))
    for _ in range(3):
        answer(machine)
    machine.add(sequence("b0", BETA))
    machine.add(sequence("b1", BETA))
    machine.add(sequence("a3", ACME))
    assert [answer(machine) for _ in range(3)] == ["b0", "a3", "b1"]


def test_a_tenant_never_has_more_slots_than_it_may_and_leaves_no_slot_empty_that_another_may_have() -> None:
    machine = scheduler(num_slots=4)
    few = TenantShare("acme", 1.0, 2)
    for i in range(6):
        machine.add(sequence(f"a{i}", few))
    assert assigned(machine.plan()) == ["a0", "a1"]
    machine.add(sequence("b0", BETA))
    assert assigned(machine.plan()) == ["b0"]
    assert assigned(machine.plan()) == []
    machine.remove(machine.running[0])
    assert assigned(machine.plan()) == ["a2"]
    machine.check_integrity()


def test_beams_take_their_slots_together_and_count_each() -> None:
    machine = scheduler(num_slots=4)
    few = TenantShare("acme", 1.0, 3)
    beams = [sequence(f"beam{i}", few if not i else None, length=10 if not i else 0, held=bool(i)) for i in range(3)]
    for beam in beams:
        beam.group = tuple(beams)
    machine.add(beams[0])
    machine.add(sequence("a0", few))
    assert assigned(machine.plan()) == ["beam0", "beam1", "beam2"]
    assert assigned(machine.plan()) == []
    machine.remove(beams[0])
    assert assigned(machine.plan()) == ["a0"]
    machine.check_integrity()


def test_a_preempted_sequence_goes_on_before_any_new_one() -> None:
    machine = scheduler(num_slots=2)
    machine.add(sequence("a0", ACME, length=20))
    machine.add(sequence("a1", ACME, length=20))
    first, second = machine.plan().assigned
    machine.add(sequence("b0", BETA))
    machine.preempt(second)
    machine.remove(first)
    assert assigned(machine.plan()) == ["a1", "b0"]


def test_a_sequence_that_waits_for_too_long_is_taken_out() -> None:
    machine = scheduler()
    machine.add(sequence("a0", ACME))
    machine.plan(0.0)
    machine.add(sequence("b0", BETA, waits_since_s=0.0, max_queue_ms=1000))
    plan = machine.plan(2.0)
    assert [each.name for each in plan.expired] == ["b0"]
    machine.remove(plan.expired[0])
    machine.remove(machine.running[0])
    assert assigned(machine.plan(3.0)) == []


def test_a_sequence_without_a_tenant_has_its_place_in_the_queue() -> None:
    machine = scheduler(num_slots=1)
    machine.add(sequence("a0", ACME))
    machine.add(sequence("none", None))
    machine.add(sequence("b0", BETA))
    assert [answer(machine) for _ in range(3)] == ["none", "a0", "b0"]


def test_a_cached_prompt_costs_its_tenant_nothing() -> None:
    tokens = {"a0": list(range(160)), "a1": list(range(160)), "b0": list(range(500, 660)), "a2": [7] * 20}
    shapes = PrefillShapes(CHUNK, 1, CHUNK)
    order: FairShares[Named] = FairShares()
    machine: Scheduler[Named] = Scheduler(
        1,
        PageAllocator(64, PAGE),
        prefill_chunk=CHUNK,
        lookahead=ROWS,
        shapes=shapes,
        tokens_of=lambda each: tokens[each.name],
        slot_order=order,
    )
    machine.add(sequence("a0", ACME, length=160))
    machine.plan()
    (first,) = machine.running
    first.prefilled = first.prefill_end
    machine.index_pages(first)
    machine.add(sequence("a1", ACME, length=160))
    machine.remove(first)
    machine.plan()
    (again,) = machine.running
    assert again.num_cached_tokens == 144
    assert order.counters["acme"] == 160 + 16


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75), (0.25, 0.2)])
def test_tenants_that_always_wait_get_the_tokens_of_their_weights(weight: float, share: float) -> None:
    machine = scheduler()
    heavy, served = TenantShare("acme", weight, 0), {"a": 0, "b": 0}
    for i in range(400):
        machine.add(sequence(f"a{i}", heavy, length=30))
        machine.add(sequence(f"b{i}", BETA, length=10))
    for _ in range(300):
        name = answer(machine, tokens=20)
        served[name[0]] += (30 if name[0] == "a" else 10) + 2 * 20
    assert served["a"] / sum(served.values()) == pytest.approx(share, abs=0.03)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=60),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=60)
def test_while_two_tenants_wait_their_counters_stay_close(jobs: list[tuple[str, int, int]], num_slots: int) -> None:
    """The bound of the paper (theorem 4.4 there), with what one round of slots adds at most."""
    order: FairShares[Named] = FairShares()
    machine = scheduler(num_slots=num_slots, num_pages=256, order=order)
    shares = {name: TenantShare(name, 1.0, 0) for name in "abc"}
    answers = {}
    for i, (name, prompt, length) in enumerate(jobs):
        machine.add(sequence(f"{name}{i}", shares[name], length=prompt))
        answers[f"{name}{i}"] = length
    bound = 2 * num_slots * (60 + 2 * 60)
    while machine.waiting:
        for one in machine.plan().assigned:
            one.length += answers[one.name]
        for one in machine.running:
            machine.remove(one)
        waiting = {each.tenant.name for each in machine.waiting if each.tenant}
        counters = [order.counters.get(name, 0.0) for name in waiting]
        assert not counters or max(counters) - min(counters) <= bound
        machine.check_integrity()
