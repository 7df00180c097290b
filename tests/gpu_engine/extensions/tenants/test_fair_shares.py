"""Slots between tenants: which sequence is next, how much each tenant gets, which priorities and waits hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_engine.api.request import TenantShare
from gpu_engine.extensions.tenants.fair_shares import ANSWER_COST, PROMPT_COST, FairShares
from tests.gpu_engine.core import schedulers
from tests.gpu_engine.core.schedulers import Named, Names, added, beams, names, sequence

ACME, BETA = TenantShare("acme", 1.0, 0), TenantShare("beta", 1.0, 0)


def scheduler(num_slots: int, num_pages: int = 40, **options: Any) -> Names:
    return schedulers.scheduler(num_slots, num_pages, **{"slot_order": FairShares(), **options})


def answer(machine: Names, tokens: int = 10) -> str:
    """Give the only slot to the next sequence, which answers with so many tokens and ends; return its name."""
    (one,) = machine.plan().assigned
    one.length += tokens
    machine.remove(one)
    machine.check_integrity()
    return one.name


def flood(machine: Names, letter: str, tenant: TenantShare, count: int, length: int = 10) -> None:
    added(machine, *(sequence(f"{letter}{i}", length, tenant=tenant) for i in range(count)))


def test_a_flood_of_one_tenant_delays_no_other_and_idle_time_is_not_saved_up() -> None:
    machine = scheduler(1)
    flood(machine, "a", ACME, 50)
    assert answer(machine) == "a0"
    flood(machine, "b", BETA, 1)
    assert [answer(machine) for _ in range(11)] == ["b0", *(f"a{i}" for i in range(1, 11))]
    flood(machine, "b", BETA, 10)
    # They take turns: beta does not get ten slots for the time in which it was idle.
    order = "".join(answer(machine)[0] for _ in range(10))
    assert order in ("ab" * 5, "ba" * 5)


@pytest.mark.parametrize(
    ("sequences", "order"),
    [
        pytest.param(
            [("a0", ACME, 1000), ("a1", ACME, 1000), ("b0", BETA, 0), ("b1", BETA, 5)],
            ["a0", "b1", "a1", "b0"],
            id="a priority orders only the requests of its tenant",
        ),
        pytest.param(
            [("a0", ACME, 0), ("none", None, 0), ("b0", BETA, 0)],
            ["none", "a0", "b0"],
            id="a sequence without a tenant has its place in the queue",
        ),
    ],
)
def test_the_order_of_two_tenants(sequences: list[tuple[str, TenantShare | None, int]], order: list[str]) -> None:
    machine = scheduler(1)
    added(machine, *(sequence(name, tenant=tenant, priority=priority) for name, tenant, priority in sequences))
    assert [answer(machine) for _ in order] == order


def test_a_queue_that_was_empty_lifts_the_next_tenant_to_the_last_one() -> None:
    machine = scheduler(1)
    flood(machine, "a", ACME, 3)
    for _ in range(3):
        answer(machine)
    added(machine, *(sequence(name, tenant=BETA) for name in ("b0", "b1")), sequence("a3", tenant=ACME))
    assert [answer(machine) for _ in range(3)] == ["b0", "a3", "b1"]


def test_a_long_wait_counts_within_its_tenant_and_too_long_a_wait_ends() -> None:
    machine = scheduler(1, max_starvation_s=10.0)
    added(machine, sequence("a0", tenant=ACME, priority=-1), sequence("a1", tenant=ACME, waits_since_s=5.0))
    machine.plan(11.0)
    assert names(machine.running) == ["a0"], "a0 had waited for too long"
    machine = added(scheduler(1), sequence("a0", tenant=ACME))
    machine.plan(0.0)
    machine.add(sequence("b0", tenant=BETA, max_queue_ms=1000))
    plan = machine.plan(2.0)
    assert names(plan.expired) == ["b0"]
    machine.remove(plan.expired[0])
    machine.remove(machine.running[0])
    assert machine.plan(3.0).assigned == ()


def test_a_tenant_never_has_more_slots_than_it_may_and_leaves_no_slot_empty_that_another_may_have() -> None:
    machine = scheduler(4)
    flood(machine, "a", TenantShare("acme", 1.0, 2), 6)
    assert names(machine.plan().assigned) == ["a0", "a1"]
    flood(machine, "b", BETA, 1)
    assert names(machine.plan().assigned) == ["b0"]
    assert machine.plan().assigned == ()
    machine.remove(machine.running[0])
    assert names(machine.plan().assigned) == ["a2"]
    machine.check_integrity()


def test_beams_take_their_slots_together_and_count_each() -> None:
    few = TenantShare("acme", 1.0, 3)
    group = beams(3, tenant=few)
    machine = added(scheduler(4), group[0], sequence("a0", tenant=few))
    assert names(machine.plan().assigned) == ["beam0", "beam1", "beam2"]
    assert machine.plan().assigned == ()
    machine.remove(group[0])
    assert names(machine.plan().assigned) == ["a0"]
    machine.check_integrity()


def test_a_preempted_sequence_goes_on_before_any_new_one() -> None:
    machine = added(scheduler(2), *(sequence(name, 20, tenant=ACME) for name in ("a0", "a1")))
    first, second = machine.plan().assigned
    machine.add(sequence("b0", tenant=BETA))
    machine.preempt(second)
    machine.remove(first)
    assert names(machine.plan().assigned) == ["a1", "b0"]


def test_tokens_that_are_taken_back_cost_their_tenant_as_much_as_others() -> None:
    order = FairShares[Named]()
    one = sequence("a0", 10, tenant=ACME)
    machine = added(scheduler(1, slot_order=order), one)
    schedulers.prefills(machine)
    for _ in range(3):
        one.length, one.prefilled = 15, 14
        assert machine.cut(one, 10)
    assert "slots={'acme': 1}" in repr(order)
    one.length = 15
    machine.remove(one)
    assert order.counters == {"acme": 10 * PROMPT_COST + 4 * 5 * ANSWER_COST}
    assert "slots={}" in repr(order)


def test_a_cached_prompt_costs_its_tenant_nothing() -> None:
    """After a prompt of which only its last part was new, the tenant is ahead of one with a short prompt."""
    machine = scheduler(1, 64, tokens_of=lambda each: [ord(each.name[0])] * each.length)
    for name, tenant, length in (("a0", ACME, 160), ("b0", BETA, 170)):
        (one,) = added(machine, sequence(name, length, tenant=tenant)).plan().assigned
        one.prefilled = one.prefill_end
        machine.remove(one)
    added(machine, *(sequence(name, 160, tenant=ACME) for name in ("a1", "a2")))
    added(machine, *(sequence(name, 100, tenant=BETA) for name in ("b1", "b2")))
    order = []
    for _ in range(4):
        (one,) = machine.plan().assigned
        assert one.num_cached_tokens == (144 if one.name[0] == "a" else 96)
        order.append(one.name)
        machine.remove(one)
    assert order == ["a1", "b1", "b2", "a2"], "16 new tokens of acme, and 4 of beta"


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75), (0.25, 0.2)])
def test_tenants_that_always_wait_get_the_tokens_of_their_weights(weight: float, share: float) -> None:
    machine, served = scheduler(1, 64), {"a": 0, "b": 0}
    flood(machine, "a", TenantShare("acme", weight, 0), 400, length=30)
    flood(machine, "b", BETA, 400)
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
    order = FairShares[Named]()
    machine = scheduler(num_slots, 256, slot_order=order)
    shares = {name: TenantShare(name, 1.0, 0) for name in "abc"}
    answers = {}
    for i, (name, prompt, length) in enumerate(jobs):
        machine.add(sequence(f"{name}{i}", prompt, tenant=shares[name]))
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
