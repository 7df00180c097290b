"""Artifacts on disk, so that a restarted process need not compile known grammars again.

Invariant: `get` returns exactly the bytes that `put` stored under the same key, or None. A file that is truncated,
changed, foreign or of another version is removed and never returned. A key is a digest over everything that an artifact
depends on (`artifact_key`), so another version of a library or of this package finds no old file. Files appear
complete, by rename. No pickle: an artifact is checked by its digest and by its library. Several processes may share a
directory.

Not responsible for: the contents of an artifact (see artifact.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grammar_service.backends.registry import installed_version
from grammar_service.grammar.value import Grammar

logger = logging.getLogger(__name__)

FORMAT = "lockstep-artifact-5"
"""Version of the file format."""

SUFFIX = ".artifact"
SCAN_INTERVAL = 64
"""Files written between two scans of the directory, while this process's own count leaves room."""

_DIGEST_BYTES = 32
_MAGIC = (FORMAT + "\n").encode()


def artifact_key(
    grammar: Grammar, backend: str, vocabulary_digest: str, *, allow_unenforced: bool, owner: str = ""
) -> str:
    """Return the key of an artifact: a digest of everything that it depends on, and of its owner.

    Owners share no files. Otherwise an owner could learn what another one compiles, from the duration of a compilation
    or from `cache_hit`.
    """
    parts = (FORMAT, _own_version(), backend, installed_version(backend), vocabulary_digest, str(allow_unenforced))
    head = "\0".join((*parts, grammar.kind.name, grammar.whitespace.name, str(grammar.reading), ""))
    text = head + grammar.text
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES, key=owner.encode()).hexdigest()


@functools.cache
def _own_version() -> str:
    """Return this package's version. It is read once, since to parse the metadata takes 0.5 ms."""
    try:
        return version("lockstep-engine")
    except PackageNotFoundError:
        return "source"


class DiskCache:
    """A directory of artifacts, bounded in bytes. Methods block on the disk: call them off the event loop.

    Args:
        directory: created with mode 0700 if it is missing.
        max_bytes: the most bytes of all files; the least recently used are removed first.
        new_file: makes a temporary file, as `tempfile.NamedTemporaryFile` does.

    Raises OSError when the directory cannot be created, or when any user may write into it, and so could change the
    masks of guided answers.
    """

    def __init__(
        self, directory: Path, max_bytes: int, new_file: Callable[..., Any] = tempfile.NamedTemporaryFile
    ) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & stat.S_IWOTH:
            raise PermissionError(f"cache_dir: {directory} is writable for every user")
        self._directory = directory
        self._max_bytes, self._new_file = max_bytes, new_file
        self._written = self._total = 0
        """Files written since the last scan; bytes of all files, as of that scan and the files since."""
        self.hits = 0
        self.damaged = 0

    def get(self, key: str) -> bytes | None:
        """Return the artifact, or None."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cache_dir: %s: %s", path, error)
            return None
        data = _checked(key, content)
        if data is None:
            self.damaged += 1
            logger.warning("cache_dir: %s is damaged or foreign and is removed", path)
            self.remove(key)
            return None
        # The time of last use orders the files when room is made.
        with contextlib.suppress(OSError):
            os.utime(path)
        self.hits += 1
        return data

    def put(self, key: str, data: bytes) -> None:
        """Store an artifact and make room for it. Errors of the disk are logged and otherwise ignored."""
        content = _MAGIC + _digest(key, data) + data
        if len(content) > self._max_bytes:
            return
        try:
            with self._new_file(dir=self._directory, prefix=".", suffix=SUFFIX, delete=False) as file:
                try:
                    file.write(content)
                    file.flush()
                    os.replace(file.name, self._path(key))
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._total += len(content)
            if self._written % SCAN_INTERVAL == 0 or self._total > self._max_bytes:
                self._written, self._total = 0, self._make_room()
            self._written += 1
        except OSError as error:
            logger.warning("cache_dir: %s: %s", self._directory, error)

    def remove(self, key: str) -> None:
        """Remove an artifact that could not be loaded."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def clear(self) -> tuple[int, int]:
        """Remove every artifact; return how many files and bytes that were."""
        files = freed = 0
        for entry in os.scandir(self._directory):
            # A name with a dot in front is being written; another process may remove files at the same time.
            if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                with contextlib.suppress(OSError):
                    size = entry.stat(follow_symlinks=False).st_size
                    os.unlink(entry.path)
                    files, freed = files + 1, freed + size
        self._written = self._total = 0
        return files, freed

    def _make_room(self) -> int:
        """Remove files until the others fit; return the bytes of those."""
        files = []
        for entry in os.scandir(self._directory):
            # Another process may remove files at the same time.
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(SUFFIX):
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
        return total

    def _path(self, key: str) -> Path:
        return self._directory / (key + SUFFIX)

    def __repr__(self) -> str:
        return f"<DiskCache {self._directory} hits={self.hits} damaged={self.damaged}>"


def _digest(key: str, data: bytes) -> bytes:
    # The digest covers the key, so a renamed file counts as foreign.
    digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES)
    digest.update(data)
    return digest.digest()


def _checked(key: str, content: bytes) -> bytes | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    data = content[start:]
    if not content.startswith(_MAGIC) or content[len(_MAGIC) : start] != _digest(key, data):
        return None
    return data
