"""The directory that holds the sockets of the grammar process: the engine's own, or the one that `grammar_dir` names.

The invariant: one engine uses a directory. It holds a lock on it, which the kernel releases however the engine ends.
A directory that cannot be used is refused before the model is loaded, and the error names the setting.

Not responsible for: the sockets in it (see link.py), the grammar process (see supervisor.py).
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from gpu_engine.api.config import ServerConfig
from shared_mem.handover import RPC_SOCKET_NAME

log = logging.getLogger(__name__)

DIRECTORY_PREFIX = "lockstep-engine-"
FRESH_S = 60.0
"""A younger directory may belong to an engine that has not locked it yet."""


class DirectoryRefused(RuntimeError):
    """`grammar_dir` is not there, or belongs to another engine or grammar process."""


def grammar_directory(config: ServerConfig, stack: AsyncExitStack) -> Path:
    """Return the directory, which is this engine's until `stack` closes. Raises DirectoryRefused."""
    if not config.grammar_dir:
        return private_directory(stack, Path(tempfile.gettempdir()))
    path = Path(config.grammar_dir)
    if config.grammar == "connect":
        if not path.is_dir():
            raise DirectoryRefused(
                f"grammar_dir: {path} is no directory; a grammar process is started with --dir {path}"
            )
    else:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DirectoryRefused(f"grammar_dir: cannot make {path}: {error.strerror}") from error
    _claim(path, stack)
    if config.grammar == "spawn" and _has_listener(path / RPC_SOCKET_NAME):
        raise DirectoryRefused(f"grammar_dir: another grammar process serves in {path}; use it with grammar=connect")
    return path


def _claim(path: Path, stack: AsyncExitStack) -> None:
    """Lock a directory. Raises DirectoryRefused where another engine holds it."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DirectoryRefused(f"grammar_dir: cannot open {path}: {error.strerror}") from error
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DirectoryRefused(
            f"grammar_dir: another engine uses {path}; each engine needs another directory"
        ) from None


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def private_directory(stack: AsyncExitStack, parent: Path) -> Path:
    """Make a directory that `stack` removes; remove the directories of engines that were killed.

    The owner holds a lock on its directory, which the kernel releases however the owner ends.
    """
    _sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=parent))
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, lock)
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path


def _sweep(parent: Path) -> None:
    for path in parent.glob(DIRECTORY_PREFIX + "*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, not a directory, or another user's
            continue
        try:
            status = os.fstat(lock)
            if status.st_uid != os.getuid() or time.time() < status.st_mtime + FRESH_S:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing %s, left by a killed engine", path)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its owner is running
        finally:
            os.close(lock)
