"""Checks the step plane: `python -m tools.step_plane model | mutants | sources [NAME ...]`. Prints tables.

    model     every configuration is searched to its end, and has no error and no run without an end
    mutants   every mutant of the model is found, in the configuration that is said to find it
    sources   both ends in two threads, then the tests, over a copy for each mutant that the sources can have

Invariant: the exit status is 1 when a configuration has an error, when the model misses a mutant, or when the
tests miss one that they are said to catch. Not responsible for: searching (see model.py), copying and testing (see
mutants.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.step_plane import model
from tools.step_plane.mutants import MUTANTS, Mutant, copy_sources, run_race, run_tests, try_sources

BY_NAME = {configuration.name: configuration for configuration in model.CONFIGURATIONS}


def check_model(names: Sequence[str]) -> bool:
    """Search each configuration for errors, and the small ones for runs without an end; print a row for each."""
    good = True
    for configuration in model.CONFIGURATIONS:
        if names and configuration.name not in names:
            continue
        outcome = model.search(configuration.options, timeout_s=3600.0)
        result = outcome.error or "no error"
        if configuration.is_small:
            cycle = model.search(configuration.options, no_cycles=True).error
            result += f"; {cycle}" if cycle else ", every run ends"
            good &= not cycle
        good &= not outcome.error
        print(f"| {configuration.name} | {' '.join(configuration.options)} | {outcome.states} | {result} |", flush=True)
    return good


def check_mutants(names: Sequence[str]) -> bool:
    """Have the model find each mutant; print a row for each."""
    good = True
    for mutant in chosen(names):
        if mutant.found_in:
            outcome = model.search((*BY_NAME[mutant.found_in].options, mutant.name), timeout_s=600.0)
            good &= bool(outcome.error)
            print(f"| {mutant.name} | {mutant.what} | {mutant.found_in} | {outcome.error or 'MISSED'} |", flush=True)
    return good


def check_sources(names: Sequence[str]) -> bool:
    """Try a copy of the sources as they are, then a copy with each mutant; print a row for each."""
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder), ())
        race, control = run_race(Path(folder), 600.0), run_tests(Path(folder), 600.0)
    seconds = f"{race.seconds:.0f} s and {control.seconds:.0f} s"
    print(f"| the sources as they are | | {race.failure or control.failure or 'all pass'} | {seconds} |", flush=True)
    good = not race.failure and not control.failure
    for mutant in chosen(names):
        if mutant.edits:
            run = try_sources(mutant, 20 + 5 * race.seconds, 20 + 5 * control.seconds)
            good &= bool(run.failure) or mutant.is_silent
            caught = run.failure or "not caught"
            print(f"| {mutant.name} | {mutant.what} | {caught} | {run.seconds:.0f} s |", flush=True)
    return good


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants of these names, or all."""
    return [mutant for mutant in MUTANTS if not names or mutant.name in names]


def main() -> None:
    """Run one of the checks."""
    checks = {"model": check_model, "mutants": check_mutants, "sources": check_sources}
    parser = argparse.ArgumentParser(
        prog="python -m tools.step_plane", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("check", choices=checks)
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations or mutants; default: all")
    arguments = parser.parse_args()
    if arguments.check != "sources" and (problem := model.missing_tools()):
        sys.exit(problem)
    sys.exit(0 if checks[arguments.check](arguments.names) else 1)


if __name__ == "__main__":
    main()
