"""Seeds of the simulation: each keeps every promise, a seed repeats itself exactly, and mutants are caught."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpu_engine.core.scheduler import Scheduler
from tools.simulation.mutants import MUTANTS, ROOT, Mutant, changed, in_effect
from tools.simulation.run import many_runs, references, simulate
from tools.simulation.workload import kinds

FOUND = {
    16: "two starts of a compile worker failed with EMFILE, and no later grammar was compiled",
    5206: "a process that was stopped while its sockets broke counted as hung after the time of a start",
    531: "a SIGKILL that the supervisor saw before the link was counted against the requests",
}
"""Seeds that have found a defect, and what it was."""

QUICKLY_CAUGHT = ("an ended request keeps its compilation", "rejected drafts stay in the matcher")
CAUGHT = ("slots are not opened again after a loss", "a preempted sequence keeps its matcher")
"""Mutants that take longer. `make mutants` tries all; some of the others run on for a minute before they are caught."""
MOST_SEEDS = 30


@pytest.fixture(scope="module", autouse=True)
def collected_between_runs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # a record that a test keeps holds the run's objects, and its mappings
    try:
        with many_runs():
            yield
        gc.freeze()  # `many_runs` gives the objects of the collection back to the collector
    finally:
        logging.disable(logging.NOTSET)


def run(first: int, last: int) -> None:
    for seed in range(first, last + 1):
        outcome = simulate(seed)
        assert outcome.ok, f'{outcome.problems[0]}\nmake simulate ARGS="--seed {seed} --log"'


def test_the_undisturbed_answers_have_tokens_and_ends() -> None:
    for kind in kinds():
        answer = references()[kind.number]
        assert bool(answer.tokens) == (answer.finish is not None) == (not kind.refused)
    assert len({answer.tokens for answer in references().values()}) > len(references()) // 2


def test_the_same_seed_gives_the_same_trace() -> None:
    first, other, again = simulate(11), simulate(12), simulate(11)
    assert first.trace == again.trace != other.trace
    assert (first.steps, first.happened, first.answers) == (again.steps, again.happened, again.answers)


def test_seeds_keep_every_promise() -> None:
    run(1, 10)


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_a_defect_keeps_every_promise(seed: int) -> None:
    run(seed, seed)


@pytest.mark.parametrize("name", QUICKLY_CAUGHT)
def test_a_mutant_is_caught_soon(name: str) -> None:
    with in_effect(MUTANTS[name]):
        assert any(not simulate(seed).ok for seed in range(1, 9))


def test_functions_have_their_own_code_again_behind_a_mutant() -> None:
    before = Scheduler.sequence.__code__
    with in_effect(MUTANTS["an event of an earlier owner reaches the slot's present one"]):
        assert Scheduler.sequence.__code__ is not before
    assert Scheduler.sequence.__code__ is before


@pytest.mark.parametrize("name", MUTANTS)
def test_the_text_of_a_mutant_is_in_its_file_once(name: str) -> None:
    for file in MUTANTS[name].files:
        text = (ROOT / file).read_text()
        assert changed(text, MUTANTS[name], file) != text


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    gone = Mutant("gone", (("gpu_engine/core/scheduler.py", "no such text", ""),))
    with pytest.raises(ValueError, match="0 times"), in_effect(gone):
        pass


@pytest.mark.slow
def test_a_trace_is_the_same_in_another_process_with_other_hashes() -> None:
    command = [sys.executable, "-m", "tools.simulation", "--seed", "333"]
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    assert f"trace {simulate(333).trace}" in told


@pytest.mark.slow
def test_many_seeds_keep_every_promise() -> None:
    run(11, 160)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUGHT)
def test_a_mutant_is_caught(name: str) -> None:
    with in_effect(MUTANTS[name]):
        assert any(not simulate(seed).ok for seed in range(1, MOST_SEEDS + 1))
