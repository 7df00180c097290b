"""`python -m tools.simulation`: runs seeds of the simulation and reports the first that breaks a promise.

Invariant: a seed that is reported fails again with `--seed N`, on every machine. Progress goes to stderr, the report to
stdout; status 1 means that a seed failed.

Not responsible for: a run (see run.py), seeded defects (see tools/mutants.py).
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from service_runtime.cores import usable_cores
from tools.simulation.run import Outcome, many_runs, simulate
from tools.simulation.seeds import Sum, run_seeds

DESCRIPTION = """
Runs the engine process and the grammar process in one thread under a virtual clock. A seed chooses what happens next at
every point: which thread goes on, when a message arrives, and which faults strike (kills, hangs, lost sockets, no
memory, no descriptors, a full disk, leaps of the clock, clients that leave). Afterwards every answer must have the
tokens of an undisturbed run, and nothing may be left behind. docs/testing.md has the list.
"""
EPILOG = """
examples:
  make simulate                              2,000 seeds, some minutes
  make simulate ARGS="--hours 1"             new seeds for an hour, on every core
  make simulate ARGS="--seed 4711 --log"     one seed, with its trace and the log lines of both processes

A seed that fails is printed with the command that repeats it. Its trace is the same every time: add a line of output
anywhere and run it again. A defect that it shows gets the seed as a test in tests/tools/simulation.
"""
_CHUNK = 20
_SHOWN_LINES = 80


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        "python -m tools.simulation",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = made.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="run only this seed, and show what happened")
    made.add_argument("--seeds", type=int, default=2000, help="run so many seeds (default: %(default)s)")
    what.add_argument("--hours", type=float, help="run seeds for so long")
    made.add_argument("--first", type=int, default=1, help="the first seed (default: %(default)s)")
    made.add_argument("--jobs", type=int, default=usable_cores(), help="processes (default: the cores, %(default)s)")
    made.add_argument("--log", action="store_true", help="show the log lines of both processes")
    return made


def many(chunks: Iterator[Sequence[int]], jobs: int, progress: Progress, *, total: float, until_s: float | None) -> int:
    """Run chunks of seeds on processes of their own; return the exit status."""
    bar, summed, begun_s = progress.add_task("seeds", total=total), Sum(), time.monotonic()
    pending: set[Future[tuple[Sum, Outcome | None]]] = set()
    failure: Outcome | None = None
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool, progress:
        while failure is None:
            while len(pending) < jobs * 2 and (until_s is None or time.monotonic() < until_s):
                chunk = next(chunks, None)
                if chunk is None:
                    break
                pending.add(pool.submit(run_seeds, chunk))
            if not pending:
                break
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                ran, failed = future.result()
                summed.add(ran)
                failure = failure or failed
            ended = summed.runs if until_s is None else time.monotonic() - begun_s
            progress.update(bar, completed=ended, description=f"{summed.runs} seeds")
        pool.shutdown(cancel_futures=True)
    print(f"{summed}, in {time.monotonic() - begun_s:.0f} s")
    if failure is None:
        print("every promise was kept")
        return 0
    report(failure)
    return 1


def report(outcome: Outcome) -> None:
    """Print a run."""
    print(f"\nseed {outcome.seed}: {outcome.steps} choices, {outcome.virtual_s:.3f} s, trace {outcome.trace}")
    print(f"faults: {', '.join(outcome.happened) or 'none'}")
    for end in outcome.ends:
        print(f"  {end}")
    for problem in outcome.problems:
        print(f"FAILED: {problem}")
    if not outcome.ok:
        print("the end of its trace:")
        for line in outcome.lines[-_SHOWN_LINES:]:
            print(f"  {line}")
        print(f'repeat it: make simulate ARGS="--seed {outcome.seed} --log"')


def one(seed: int, *, logs: bool) -> int:
    """Run one seed and print it; return the exit status."""
    if logs:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    else:
        logging.disable(logging.CRITICAL)
    with many_runs():
        outcome = simulate(seed)
    report(outcome)
    return 0 if outcome.ok else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(arguments)
    if args.seed is not None:
        return one(args.seed, logs=args.log)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    if args.hours is not None:
        seconds = args.hours * 3600
        chunks = (range(at, at + _CHUNK) for at in itertools.count(args.first, _CHUNK))
        return many(chunks, args.jobs, progress, total=round(seconds), until_s=time.monotonic() + seconds)
    last = args.first + args.seeds
    chunks = (range(at, min(at + _CHUNK, last)) for at in range(args.first, last, _CHUNK))
    return many(chunks, args.jobs, progress, total=args.seeds, until_s=None)


if __name__ == "__main__":
    sys.exit(main())
