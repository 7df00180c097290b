"""What a receipt says of the model: digests of its files and of its tokenizer.

Invariant: a digest is of the whole files as they were when the model had been loaded. A file that changes while it is
read, or that changed since, has no digest. Digests are kept by path, size, inode and time of change, so that the next
start reads nothing again.

Not responsible for: when they are computed (see extension.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpu_engine.api.ports import Tokenizer
from gpu_engine.model.names import part_names

log = logging.getLogger(__name__)

KEPT = "file_digests.json"
_MAX_KEPT = 256
_PIECE = 1 << 20


class FilesChanged(Exception):
    """A file of the model is another one than the model was loaded from. The message names it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model as they were at one moment."""

    stamps: tuple[tuple[Path, str], ...]
    """Each file with its size, inode and time of change."""

    @classmethod
    def of(cls, path: Path | None) -> ModelFiles:
        """Return the files of a model in a directory, or in a GGUF file and its further parts. Raises OSError."""
        if path is None:
            return cls(())
        if path.is_dir():
            paths = [path / "config.json", *sorted(path.glob("*.safetensors"))]
        else:
            paths = [path.with_name(name) for name in part_names(path.name)]
        return cls(tuple((each, _stamp(each)) for each in paths))

    def digest(self, kept: Path | None) -> str:
        """Return the SHA-256 of the SHA-256s of all files, in order; "" without files. Reads them all, unless the file
        `kept` has theirs. Raises FilesChanged or OSError."""
        if not self.stamps:
            return ""
        known, found = _read(kept), dict[str, str]()
        for path, stamp in self.stamps:
            key = f"{path.resolve()} {stamp}"
            found[key] = known.get(key) or _file_digest(path)
            if _stamp(path) != stamp:
                raise FilesChanged(f"{path} has changed since the model was loaded")
        if kept is not None and not found.keys() <= known.keys():
            _write(kept, dict([*{**known, **found}.items()][-_MAX_KEPT:]))
        return hashlib.sha256("\n".join(found.values()).encode()).hexdigest()


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the tokenizer and its chat template."""
    text = json.dumps([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _stamp(path: Path) -> str:
    about = path.stat()
    return f"{about.st_size} {about.st_ino} {about.st_mtime_ns} {about.st_ctime_ns}"


def _file_digest(path: Path) -> str:
    digest, piece = hashlib.sha256(), bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.hexdigest()


def _read(kept: Path | None) -> dict[str, str]:
    if kept is None:
        return {}
    try:
        values = json.loads(kept.read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in values.items()} if isinstance(values, dict) else {}


def _write(kept: Path, values: dict[str, str]) -> None:
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, prefix=kept.name, delete=False) as file:
            json.dump(values, file)
        os.replace(file.name, kept)
    except OSError as error:
        log.info("the digests of the model's files are not kept: %s", error)
