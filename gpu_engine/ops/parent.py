"""Ends this process with the one that started it: the other end of stdin is a pipe that the starter holds.

The invariant: the kernel closes that pipe however the starter ends, SIGKILL included. A server that is ready drains; a
server that is still loading ends at once.

Not responsible for: the grammar process, which ends with the engine (see sidecar/supervisor.py).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

log = logging.getLogger(__name__)


def stop_with_stdin() -> None:
    """Send this process SIGTERM when stdin is at its end. What arrives on stdin is read and dropped."""

    def watch(stdin: int) -> None:
        while os.read(stdin, 4096):
            pass
        log.info("stdin is closed: the process that started this server is gone, or has ended it")
        os.kill(os.getpid(), signal.SIGTERM)

    # A thread, because the event loop does not run while the model's libraries are imported.
    threading.Thread(target=watch, args=(sys.stdin.fileno(),), name="stdin", daemon=True).start()
