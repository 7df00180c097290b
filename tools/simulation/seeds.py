"""Many seeds in one process, and what they did together.

Invariant: what a call returns can be sent to another process. Not responsible for: how many processes there are (see
__main__.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

from tools.simulation.run import Outcome, many_runs, simulate


@dataclass
class Sum:
    """What the runs of a call did together."""

    runs: int = 0
    steps: int = 0
    points: int = 0
    faults: int = 0
    virtual_s: float = 0.0

    def add(self, other: Sum) -> None:
        """Add the runs of another call."""
        self.runs, self.steps, self.points = (
            self.runs + other.runs,
            self.steps + other.steps,
            self.points + other.points,
        )
        self.faults, self.virtual_s = self.faults + other.faults, self.virtual_s + other.virtual_s

    def count(self, outcome: Outcome) -> None:
        """Add a run."""
        self.add(Sum(1, outcome.steps, outcome.points, len(outcome.happened), outcome.virtual_s))

    def __str__(self) -> str:
        return (
            f"{self.runs:,} runs: {self.steps:,} choices, {self.points:,} points, {self.faults:,} faults, "
            f"{self.virtual_s:,.0f} s of virtual time"
        )


def run_seeds(seeds: Sequence[int]) -> tuple[Sum, Outcome | None]:
    """Run seeds until one fails; return what they did, and the failure."""
    prepare_process()
    total = Sum()
    for seed in seeds:
        outcome = simulate(seed)
        total.count(outcome)
        if not outcome.ok:
            return total, outcome
    return total, None


@cache
def prepare_process() -> ExitStack:
    """Prepare a process that runs seeds until it ends; return what holds the preparation, the same every time."""
    logging.disable(logging.CRITICAL)
    stack = ExitStack()
    stack.enter_context(many_runs())
    return stack
