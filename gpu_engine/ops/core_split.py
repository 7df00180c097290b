"""Cores for the model's threads and cores for everything else, on a machine with few cores to spare.

A step keeps a core busy for tens of milliseconds. The kernel may wake a thread that handles a request, compiles a
grammar or fills a row on a core that runs a step, even though another core is idle (docs/log/). So where one to three
cores are not the model's, every other thread of the engine, and the grammar process that the engine starts, is confined
to those cores. The model's threads may run on every core, because other processes may keep the model's own cores busy.

The invariant: a confined thread may use every core again once the split ends, and a thread whose cores were set by
other code keeps them. Linux only.

Not responsible for: the number of the model's threads (placement.py), or starting them (server.py).
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

MAX_SPARE = 3
"""With more spare cores, a woken thread finds an idle core without help."""


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """Two sets of core numbers, as the kernel counts them."""

    every: frozenset[int]
    """The cores that this process may use."""
    rest: frozenset[int]
    """The cores of those that are not the model's."""

    @staticmethod
    def of(config: EngineConfig, cores: frozenset[int], usable: int) -> CoreSplit | None:
        """Return how to split `cores`; None if that is not wanted or would not help.

        Args:
            config: gives the number of the model's threads; on a GPU one thread launches its work. `device` and `sync`
                are resolved.
            cores: the process's CPU set.
            usable: the number of them that a CPU quota allows; with a quota any core may be idle.
        """
        threads = (config.num_threads or usable) * config.tensor_parallel_size if config.on_cpu else 1
        spare = len(cores) - threads
        # With device flags the grammar process polls, and fills a core by itself.
        least = 2 if config.sync == "device_flag" else 1
        if usable < len(cores) or not least <= spare <= MAX_SPARE:
            return None
        return CoreSplit(cores, frozenset(sorted(cores)[-spare:]))

    def confine(self) -> bool:
        """Confine this process's threads, and the threads and processes they start, to `rest`.

        False: the kernel does not allow it here, and nothing has changed.
        """
        if _move(self.every, self.rest):
            return True
        self.release()
        return False

    def release(self) -> None:
        """Let the threads that `confine` moved use every core again."""
        _move(self.rest, self.every)

    def on_every_core(self, function: Callable[[], Result]) -> Result:
        """Return `function()`. Meanwhile this thread may use every core; each thread that it starts may for good."""
        os.sched_setaffinity(0, self.every)
        try:
            return function()
        finally:
            os.sched_setaffinity(0, self.rest)


def fills_cores(config: EngineConfig, usable: int) -> bool:
    """Return whether the model's threads use every usable core, so that whatever else computes takes time from a step.

    `device` and `num_threads` are resolved.
    """
    return config.on_cpu and config.num_threads * config.tensor_parallel_size >= usable


def _move(before: frozenset[int], after: frozenset[int]) -> bool:
    """Move every thread of this process whose cores are exactly `before` to `after`."""
    for _ in range(2):  # a second time for threads that were started by a thread not moved yet
        for thread in map(int, os.listdir("/proc/self/task")):
            try:
                if os.sched_getaffinity(thread) == before:
                    os.sched_setaffinity(thread, after)
            except ProcessLookupError:
                continue  # the thread has ended
            except OSError as error:  # not allowed, or the process's CPU set has changed
                log.warning("the kernel does not let this process set the cores of its threads: %s", error)
                return False
    return True
