"""Artifacts on disk, so that a restart does not compile again what was compiled before.

Invariant: `get` returns exactly what `put` was given under the same key, or None; a file that is cut, changed, foreign
or of another version is never returned, and is removed. A key is a digest over everything that an artifact depends on
(`artifact_key`), so a new version of a library or of this package finds nothing old. Files appear by rename, whole.
No pickle: an artifact is the library's own serialised text, checked by digest and by the library. Several processes may
share a directory. Not here: what is stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grammar_service.backends.registry import installed_version
from grammar_service.grammar.value import Grammar

logger = logging.getLogger(__name__)

FORMAT = "lockstep-artifact-3"
"""Of the files. Another layout of their bytes is another number."""

SUFFIX = ".artifact"
LOOK_EVERY = 64
"""So many files are written between two looks at all of them, while by our own count there is room."""

_DIGEST_BYTES = 32
_MAGIC = (FORMAT + "\n").encode()


def artifact_key(grammar: Grammar, backend: str, vocabulary_digest: str, *, allow_unenforced: bool) -> str:
    """Return the name of an artifact: a digest over all that it depends on."""
    try:
        ours = version("lockstep-engine")
    except PackageNotFoundError:
        ours = "source"
    parts = (FORMAT, ours, backend, installed_version(backend), vocabulary_digest, str(allow_unenforced))
    head = "\0".join((*parts, grammar.kind.name, grammar.whitespace.name, ""))
    return hashlib.blake2b((head + grammar.text).encode(), digest_size=_DIGEST_BYTES).hexdigest()


class DiskCache:
    """A directory of artifacts, bounded in bytes. Methods block on the disk: call them off the event loop.

    Args:
        directory: made, with mode 0700, when missing.
        max_bytes: of all files together; the least recently used leave first.

    Raises OSError when the directory cannot be made, or when everybody may write into it: who can place files there
    decides what guided answers look like.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & stat.S_IWOTH:
            raise PermissionError(f"cache_dir: {directory} is writable for everybody")
        self._directory = directory
        self._max_bytes = max_bytes
        self._written = self._total = 0
        """Files since the last look; bytes of all files by then, and of those."""
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
            logger.warning("cache_dir: %s is damaged or foreign; it is removed", path)
            self.remove(key)
            return None
        # The time of last use orders the files when room is made.
        with contextlib.suppress(OSError):
            os.utime(path)
        self.hits += 1
        return data

    def put(self, key: str, data: bytes) -> None:
        """Store an artifact and make room for it; a full or read-only disk is logged and otherwise ignored."""
        content = _MAGIC + _digest(key, data) + data
        if len(content) > self._max_bytes:
            return
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".", suffix=SUFFIX, delete=False) as file:
                try:
                    file.write(content)
                    file.flush()
                    os.replace(file.name, self._path(key))
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._total += len(content)
            if self._written % LOOK_EVERY == 0 or self._total > self._max_bytes:
                self._written, self._total = 0, self._make_room()
            self._written += 1
        except OSError as error:
            logger.warning("cache_dir: %s: %s", self._directory, error)

    def remove(self, key: str) -> None:
        """Forget an artifact that turned out to be of no use."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _make_room(self) -> int:
        """Remove files until the rest fits; return its bytes."""
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
    # Over the key too: a file that was renamed is a foreign one.
    digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES)
    digest.update(data)
    return digest.digest()


def _checked(key: str, content: bytes) -> bytes | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    data = content[start:]
    if not content.startswith(_MAGIC) or content[len(_MAGIC) : start] != _digest(key, data):
        return None
    return data
