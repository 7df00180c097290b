"""A value that is read from files, and read again when they change: certificates and tokens that are renewed in place.

Invariant: `get` returns a complete value that was valid when it was read. When files are missing, incomplete or wrong,
the last good value stays in force, and each change is logged once.

Not responsible for: the contents of the files (see tokens.py, and the TLS of each server).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
"""Files are checked at most this often, however many calls arrive."""

T = TypeVar("T")
_Signature = tuple[tuple[int, int, int] | None, ...]


class FromFiles(Generic[T]):
    """Used from one thread at a time."""

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], T], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Read for the first time. Raises what `read` raises: ValueError for wrong contents, with the remedy."""
        self._paths = tuple(paths)
        self._read = read
        self._clock_s = clock_s
        self._checked_s = clock_s()
        self._signature = self._signatures()
        self._value = read()
        self.reloads = 0
        """Number of times that changed files were read."""

    def get(self) -> T:
        """Return the value of the current files; a change is seen within CHECK_EVERY_S."""
        now_s = self._clock_s()
        if now_s < self._checked_s + CHECK_EVERY_S:
            return self._value
        self._checked_s = now_s
        # The signature is taken before the files are read: the next check finds a change in between.
        signature = self._signatures()
        if signature != self._signature:
            self._signature = signature
            try:
                self._value = self._read()
            except ValueError as error:
                log.error("%s; the values that were read before stay in force", error)
            else:
                self.reloads += 1
                log.info("read again: %s", ", ".join(map(str, self._paths)))
        return self._value

    def _signatures(self) -> _Signature:
        return tuple(map(_signature, self._paths))

    def __repr__(self) -> str:
        return f"<FromFiles {', '.join(map(str, self._paths))} reloads={self.reloads}>"


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_bytes(setting: str, path: Path) -> bytes:
    """Return the contents of the file that `setting` names. Raises ValueError with the setting and the path."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{setting}: cannot read {path}: {error.strerror}") from error
