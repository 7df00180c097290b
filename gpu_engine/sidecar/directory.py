"""The directory that holds the sockets of the grammar process: the engine's own, or the one that `grammar_dir` names.

The invariant: one engine uses a directory. It holds a lock on it, which the kernel releases however the engine ends.
A directory that cannot be used is refused before the model is loaded, and the error names the setting.

Not responsible for: the sockets in it (see link.py), the grammar process (see supervisor.py).
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from gpu_engine.api.config import ServerConfig
from service_runtime.private_directory import private_directory
from shared_mem.handover import RPC_SOCKET_NAME

DIRECTORY_PREFIX = "lockstep-engine-"


class DirectoryRefused(RuntimeError):
    """`grammar_dir` is not there, or belongs to another engine or grammar process."""


def grammar_directory(config: ServerConfig, stack: AsyncExitStack) -> Path:
    """Return the directory, which is this engine's until `stack` closes. Raises DirectoryRefused."""
    if not config.grammar_dir:
        return private_directory(stack, Path(tempfile.gettempdir()), DIRECTORY_PREFIX)
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
