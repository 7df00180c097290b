"""Who may interrupt whom on a core: threads that a step waits for, and all others.

A thread that wakes up interrupts the one that runs on its core, as a rule of Linux's scheduler, even when another core
is about to be idle; a step is slowed by every such turn. One that gives way (SCHED_BATCH, sched(7)) waits for its turn
instead, some milliseconds at most, and gets its share as before. Invariant: threads and processes begin with their
creator's policy; so a process gives way once, at its beginning, and the threads that a step waits for take it back. No
privilege is needed for either. Not here: niceness, which is about shares.
"""

from __future__ import annotations

import contextlib
import os


def give_way() -> None:
    """Interrupt nobody: this thread, and what it starts from now on."""
    _take(os.SCHED_BATCH)


def be_prompt() -> None:
    """Interrupt who gives way and whoever had his share: this thread, and what it starts from now on."""
    _take(os.SCHED_OTHER)


def _take(policy: int) -> None:
    # Refused in some sandboxes: then everybody is as prompt as everybody else.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
