"""Checks the model of the step plane: `python -m tools.step_plane model | mutants [NAME ...]`. Prints tables.

    model     every configuration is searched to its end, and has no error and no run without an end
    mutants   every mutant of the model is found, in the configuration that is said to find it

Invariant: the exit status is 1 when a configuration has an error, or when the model misses a mutant. Not responsible
for: searching (see model.py), mutants of the sources (see tools/mutants.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tools.step_plane import model
from tools.step_plane.mutants import MUTANTS, Mutant

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


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants of these names, or all."""
    return [mutant for mutant in MUTANTS if not names or mutant.name in names]


def main() -> None:
    """Run one of the checks."""
    checks = {"model": check_model, "mutants": check_mutants}
    parser = argparse.ArgumentParser(
        prog="python -m tools.step_plane", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("check", choices=checks)
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations or mutants; default: all")
    arguments = parser.parse_args()
    if problem := model.missing_tools():
        sys.exit(problem)
    begun = time.monotonic()
    good = checks[arguments.check](arguments.names)
    print(f"\n{time.monotonic() - begun:.0f} s")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
