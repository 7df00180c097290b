"""`python -m tools.mutants`: tries each seeded defect of the sources, and prints what catches it.

A defect of flags.c and of the rest of shared_mem is put into a copy, which a search of interleavings, the tests and
two threads at full speed try in turn (tools/step_plane/mutants.py). A defect of the Python of both processes is tried
by seeds of the simulation, and then by the tests of its file (tools/simulation/mutants.py). The sources as they are
come first: nothing may catch these.

Invariant: the checkout is not touched, and each try has a bound in time. Status 1 means that a defect was not caught,
or that a check fails without one. Not responsible for: the model's own defects (see tools/step_plane).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from service_runtime.cores import usable_cores
from tools.simulation import mutants as python
from tools.simulation.run import simulate
from tools.simulation.seeds import prepare_process
from tools.step_plane import mutants as native

AS_THEY_ARE = "the sources as they are"
CONTROL_SEEDS = 100


class Try(NamedTuple):
    """What became of one defect."""

    caught_by: str
    """What showed it, or "": nothing."""
    seconds: float


def try_native(name: str, seeds: int, limit_s: float) -> Try:
    """Try a defect of shared_mem, or none; `seeds` is not used."""
    edits = next((mutant.edits for mutant in native.MUTANTS if mutant.name == name), ())
    run = native.try_sources(edits, limit_s)
    return Try(run.failure, run.seconds)


def try_python(name: str, seeds: int, limit_s: float) -> Try:
    """Try a defect of the Python of both processes, or none, with seeds from 1 on, then with the tests of its files."""
    prepare_process()
    mutant, begun, seconds = python.MUTANTS.get(name), time.monotonic(), 0.0
    with ExitStack() as stack:
        if mutant is not None:
            stack.enter_context(python.in_effect(mutant))
        for seed in range(1, seeds + 1):
            outcome = simulate(seed)
            seconds = time.monotonic() - begun
            if not outcome.ok:
                return Try(f"seed {seed}: {outcome.problems[0].splitlines()[-1][:130]}", seconds)
            if seconds > limit_s:
                break
    if mutant is None:
        return Try("", seconds)
    with tempfile.TemporaryDirectory() as folder:
        tests = python.copy_with(mutant, Path(folder))
        run = native.run_tests(Path(folder), limit_s, tests)
    seconds += run.seconds
    if run.failure.startswith("tests/"):
        # A test that fails without the defect as well, because of the machine, has caught nothing.
        control = native.run_tests(python.ROOT, limit_s, [run.failure])
        return Try("" if control.failure else run.failure, seconds + control.seconds)
    return Try("", seconds)


def rows(names: Sequence[str]) -> list[tuple[str, str, Callable[[str, int, float], Try]]]:
    """Return (name, what it changes, how it is tried) of the chosen defects."""
    found: list[tuple[str, str, Callable[[str, int, float], Try]]] = []
    for mutant in native.MUTANTS:
        if mutant.edits:
            found.append((mutant.name, f"{mutant.edits[0][0]}: {mutant.what}", try_native))
    for other in python.MUTANTS.values():
        found.append((other.name, ", ".join(other.files), try_python))
    return [row for row in found if not names or row[0] in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m tools.mutants", description=summary)
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects (default: all)")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes (default: the cores, %(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=200, help="seeds of the simulation a defect (default: %(default)s)"
    )
    parser.add_argument("--limit-s", type=float, default=240.0, help="longest try of one check (default: %(default)s)")
    args = parser.parse_args(arguments)
    begun, missed, chosen = time.monotonic(), [], rows(args.names)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        controls = [
            pool.submit(try_native, AS_THEY_ARE, 0, args.limit_s),
            pool.submit(try_python, AS_THEY_ARE, CONTROL_SEEDS, args.limit_s),
        ]
        tries: list[Future[Try]] = [pool.submit(attempt, name, args.seeds, args.limit_s) for name, _, attempt in chosen]
        print("| defect | where | what catches it | after |\n|---|---|---|---|")
        for control in controls:
            caught_by, seconds = control.result()
            print(f"| {AS_THEY_ARE} | | {caught_by or 'nothing'} | {seconds:.0f} s |", flush=True)
            missed += [AS_THEY_ARE] if caught_by else []
        for (name, where, _), attempt in zip(chosen, tries, strict=True):
            caught_by, seconds = attempt.result()
            print(f"| {name} | {where} | {caught_by or 'NOTHING'} | {seconds:.1f} s |", flush=True)
            missed += [] if caught_by else [name]
    print(
        f"\n{len(chosen) - len(set(missed) - {AS_THEY_ARE})} of {len(chosen)} caught, {time.monotonic() - begun:.0f} s"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
