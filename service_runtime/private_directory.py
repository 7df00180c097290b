"""A directory below the temporary one that belongs to one process, and goes however that process ends.

Invariant: the owner holds a lock on its directory, which the kernel releases however the owner ends. A directory of the
same prefix without an owner is removed by the next process that makes one.

Not responsible for: what lies in it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

log = logging.getLogger(__name__)

FRESH_S = 60.0
"""A younger directory may belong to a process that has not locked it yet."""


def private_directory(stack: AsyncExitStack | ExitStack, parent: Path, prefix: str) -> Path:
    """Make a directory that `stack` removes; remove the directories of processes that were killed."""
    _sweep(parent, prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, lock)
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path


def _sweep(parent: Path, prefix: str) -> None:
    for path in parent.glob(prefix + "*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, not a directory, or another user's
            continue
        try:
            status = os.fstat(lock)
            if status.st_uid != os.getuid() or time.time() < status.st_mtime + FRESH_S:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing %s, left by a killed process", path)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its owner is running
        finally:
            os.close(lock)
