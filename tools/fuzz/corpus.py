"""The inputs that the repository has for each target: examples to begin from, and inputs that once showed a defect.

Invariant: a file's name says what it is; an input of a defect is `found-...`. Files are small.
Not responsible for: running them (see child.py and tests/tools/fuzz).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")
FOUND = "found-"


def folder_of(name: str) -> Path:
    """Return the folder with the inputs of a target."""
    return FOLDER / name


def inputs(name: str) -> dict[str, bytes]:
    """Return the inputs of a target by their names, in order."""
    return {path.name: path.read_bytes() for path in sorted(folder_of(name).iterdir()) if path.is_file()}


def keep(name: str, data: bytes) -> Path:
    """Put the input of a defect into the corpus, and return its place."""
    folder = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{FOUND}{hashlib.sha256(data).hexdigest()[:12]}"
    kept.write_bytes(data)
    return kept
