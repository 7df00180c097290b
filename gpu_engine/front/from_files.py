"""A value that is made from files, and made again when they change: certificates and tokens that are renewed in place.

The invariant: what `get` returns is whole and was valid when it was read; files that are gone, half-written or wrong
leave the last good value in force, and are said once per change. Not here: what the files hold.
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
"""Files are looked at no more often than this, however many calls come."""

T = TypeVar("T")
_Signature = tuple[tuple[int, int, int] | None, ...]


class FromFiles(Generic[T]):
    """Used from one thread at a time."""

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], T], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Read for the first time. Raises what `read` raises: ValueError for contents, with what to do about it."""
        self._paths = tuple(paths)
        self._read = read
        self._clock_s = clock_s
        self._checked_s = clock_s()
        self._signature = self._look()
        self._value = read()
        self.reloads = 0
        """How often a changed file was taken over."""

    def get(self) -> T:
        """Return the value of the files as they are now, give or take CHECK_EVERY_S."""
        now_s = self._clock_s()
        if now_s < self._checked_s + CHECK_EVERY_S:
            return self._value
        self._checked_s = now_s
        # Looked at before it is read: a change in between is found by the next look.
        signature = self._look()
        if signature != self._signature:
            self._signature = signature
            try:
                self._value = self._read()
            except ValueError as error:
                log.error("%s; what was read before stays in force", error)
            else:
                self.reloads += 1
                log.info("read again: %s", ", ".join(map(str, self._paths)))
        return self._value

    def _look(self) -> _Signature:
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
    """Return the file that `setting` names. Raises ValueError that names both."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{setting}: cannot read {path}: {error.strerror}") from error
