"""Compilations that are admitted: up to the limit of a backend, and any grammar that the process is known to have."""

from __future__ import annotations

import pytest

from gpu_engine.api.errors import LimitExceeded
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.sidecar.compilations import Admission


def spec(number: int, backend: int = 0) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, f"a{number}", whitespace=0, backend=backend)


def test_one_more_than_the_bound_is_refused_by_the_name_of_its_setting() -> None:
    admission = Admission()
    assert [admission.enter(spec(i), 1, 2) for i in range(2)] == [True, True]
    with pytest.raises(LimitExceeded, match="compile_queue: 2 compilations"):
        admission.enter(spec(2), 1, 2)
    assert admission.refused == 1
    admission.leave(spec(0))
    assert admission.enter(spec(2), 1, 2)


def test_each_backend_has_a_queue_of_its_own() -> None:
    admission = Admission()
    assert admission.enter(spec(0, backend=1), 1, 1)
    assert admission.enter(spec(0, backend=2), 1, 1)
    with pytest.raises(LimitExceeded):
        admission.enter(spec(1, backend=2), 1, 1)


def test_a_process_that_names_no_bound_is_asked_always() -> None:
    admission = Admission()
    assert all(admission.enter(spec(i), 1, 0) for i in range(1000))


def test_what_the_process_has_is_let_through_and_takes_no_place() -> None:
    admission = Admission()
    admission.compiled(spec(0), 1)
    assert admission.enter(spec(1), 1, 1)
    assert not admission.enter(spec(0), 1, 1)
    with pytest.raises(LimitExceeded):
        admission.enter(spec(2), 1, 1)


def test_what_the_last_process_had_is_not_known_of_the_next() -> None:
    admission = Admission()
    admission.compiled(spec(0), 1)
    assert admission.enter(spec(0), 2, 1)
    admission.compiled(spec(1), 2)
    with pytest.raises(LimitExceeded):
        admission.enter(spec(2), 2, 1)
    assert not admission.enter(spec(1), 2, 1)


def test_what_is_used_stays_known() -> None:
    admission = Admission(max_known=2)
    admission.compiled(spec(0), 1)
    admission.compiled(spec(1), 1)
    assert not admission.enter(spec(0), 1, 1)
    admission.compiled(spec(2), 1)
    assert not admission.enter(spec(0), 1, 1)
    assert admission.enter(spec(1), 1, 1)
