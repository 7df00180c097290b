"""Cores for a step and cores for the rest: on a small machine what serves the step keeps out of its way.

A step holds a core for tens of milliseconds. The kernel wakes whoever handles a request, compiles or fills a row where
it ran before, in the middle of a step as likely as not, though another core is idle (docs/log.md). So where there are
few cores and one at least is not the model's, all else of the engine, with the grammar process that it starts, is held
to those that are left; the model's threads may run anywhere, since others may be in their way, too.

Invariant: what was confined is free again when the split ends, and a thread that somebody gave other cores keeps those.
Linux only. Not here: how many threads the model has, and who starts them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpu_engine.api.config import EngineConfig

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MOST_SPARE = 3
"""Where more cores are left, whoever wakes up finds an idle one."""


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """Numbers of cores, as the kernel has them."""

    every: frozenset[int]
    """What this process may use."""
    rest: frozenset[int]
    """What is left of that by the model's threads."""

    @staticmethod
    def of(config: EngineConfig, cores: frozenset[int], usable: int) -> CoreSplit | None:
        """Return how to split `cores`; None where that is not wanted or no use.

        Args:
            config: says how many threads the model has; on a GPU one thread launches its work. `sync` is resolved.
            cores: of the process's CPU set.
            usable: how many of them a quota allows; behind a quota any of them may be idle.
        """
        threads = 1 if config.device != "cpu" else config.num_threads or usable
        spare = len(cores) - threads
        # Behind flags of a device the grammar process fills a core by itself.
        least = 2 if config.sync == "device_flag" else 1
        if not config.split_cores or usable < len(cores) or not least <= spare <= MOST_SPARE:
            return None
        return CoreSplit(cores, frozenset(sorted(cores)[-spare:]))

    def confine(self) -> bool:
        """Hold this process's threads, and whatever they start, to `rest`. False: it is not allowed here."""
        if _move(self.every, self.rest):
            return True
        self.release()
        return False

    def release(self) -> None:
        """Take `confine` back."""
        _move(self.rest, self.every)

    def at_large(self, function: Callable[[], Result]) -> Result:
        """Return `function()`, during which this thread, and for good each thread that it starts, may run anywhere."""
        os.sched_setaffinity(0, self.every)
        try:
            return function()
        finally:
            os.sched_setaffinity(0, self.rest)


def _move(before: frozenset[int], after: frozenset[int]) -> bool:
    """Move every thread of this process that may run on `before`, and on nothing else."""
    for _ in range(2):  # once more for those that were started by one that had not been moved
        for thread in map(int, os.listdir("/proc/self/task")):
            try:
                if os.sched_getaffinity(thread) == before:
                    os.sched_setaffinity(thread, after)
            except ProcessLookupError:
                continue  # it has ended
            except OSError as error:  # not allowed, or the process's CPU set has changed
                log.warning("split_cores: threads cannot be held to cores here: %s", error)
                return False
    return True
