"""Compilations that are admitted: up to the limit of a backend, and any grammar that the process is known to have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_engine.api.errors import LimitExceeded
from gpu_engine.api.request import GrammarKind, GrammarOwner, GrammarSpec
from gpu_engine.sidecar.compile_admission import QueuePlaces


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


def test_each_backend_has_a_queue_of_its_own() -> None:
    admission = QueuePlaces()
    assert admission.enter(spec(0, backend=1), 1, 1)
    assert admission.enter(spec(0, backend=2), 1, 1)
    with pytest.raises(LimitExceeded):
        admission.enter(spec(1, backend=2), 1, 1)


def test_a_process_that_names_no_bound_is_asked_always() -> None:
    admission = QueuePlaces()
    assert all(admission.enter(spec(i), 1, 0) for i in range(1000))


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
