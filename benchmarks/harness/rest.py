"""Wait until every system of a benchmark is at rest, so that none takes time from the one that is measured next.

Invariant: a wait ends, at rest or not; a wait that ran out says so in one line on stderr.
Not responsible for: other processes of the machine.

A system that has answered may go on computing: threads of OpenMP or of a message queue poll for a second or two
before they sleep. On a machine with as many cores as each system has threads, these polls are the next system's loss.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

_BUSY_SHARE = 0.1
"""Share of a core above which the processes together are not at rest. An idle engine beats its heart with 2%."""
_WINDOW_S = 0.25
_LIMIT_S = 10.0


def cpu_seconds() -> float:
    """Return the CPU seconds that all children of this process have used so far, and theirs, threads included.

    A child that has ended is left out, so the sum may fall.
    """
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def await_rest(
    limit_s: float = _LIMIT_S,
    used_s: Callable[[], float] = cpu_seconds,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Return True when the children used less than a tenth of a core for a quarter of a second.

    Returns False, and says so on stderr, after `limit_s` seconds. `used_s`, `clock_s` and `sleep` are seams for tests.
    """
    ends_s = clock_s() + limit_s
    used = used_s()
    while clock_s() < ends_s:
        sleep(_WINDOW_S)
        before, used = used, used_s()
        if used - before < _BUSY_SHARE * _WINDOW_S:
            return True
    print(
        f"not at rest after {limit_s:g} s: a system that waits takes time from the one that is measured",
        file=sys.stderr,
    )
    return False
