"""Processes that the kernel kills when their parent dies, by whatever signal (PR_SET_PDEATHSIG of prctl(2)).

Invariant: no moment is uncovered between the start of a child (`dying_with_us`) and its own request to the kernel.

The kernel watches the thread that started the process, so that thread must live as long as the process. Linux only.

A process that a thread of a pool starts cannot use it. It watches its stdin instead (`stop_with_stdin`): the kernel
closes that pipe however the parent ends, SIGKILL included.

Not responsible for: an orderly end, which is the parent's own.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

# Runs in the child: ask for SIGKILL at the parent's death, check that the parent has not died before that, become the
# program. (A preexec_fn would run between fork and exec, where locks of other threads may be held.)
_BECOME = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def dying_with_us(command: Sequence[str]) -> list[str]:
    """Return the command line of a child that becomes `command`, and that the kernel kills when this process dies."""
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. A parent that has died before is not noticed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def stop_with_stdin() -> None:
    """Send this process SIGTERM when stdin is at its end. What arrives on stdin is read and dropped."""

    def watch(stdin: int) -> None:
        while os.read(stdin, 4096):
            pass
        log.info("stdin is closed: the process that started this server is gone, or has ended it")
        os.kill(os.getpid(), signal.SIGTERM)

    # A thread, because the event loop does not run while the model's libraries are imported.
    threading.Thread(target=watch, args=(sys.stdin.fileno(),), name="stdin", daemon=True).start()
