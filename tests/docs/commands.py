"""Command lines of the pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without assignments before it."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words
