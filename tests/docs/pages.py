"""The pages that the tests of the documentation read, and the parts that they look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CHANGELOG.md",
            "CODE_OF_CONDUCT.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "SUPPORT.md",
            "llms.txt",
            "benchmarks/README.md",
            "client/README.md",
            "deploy/triton/README.md",
            "lockstep_grammar/README.md",
            "docs/bench/README.md",
            "specgrammarbench/README.md",
        )
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
"""Every page except the log, whose entries are history."""

_INDENTED = re.compile(r"^    ((?:python -m|make|lockstep) .*)$", re.MULTILINE)
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Snippet:
    """One fenced block of a page."""

    page: Path
    line: int
    """Number of the fence's line, from 1."""
    language: str
    """First word after the fence; empty: a diagram or output."""
    marks: frozenset[str]
    """The other words: what the block needs to run, such as `docker` or `gpu`."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(*languages: str) -> list[Snippet]:
    """Return the blocks of all pages in one of `languages`."""
    return [snippet for page in PAGES for snippet in _snippets(page) if snippet.language in languages]


def _snippets(page: Path) -> Iterator[Snippet]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        language, *marks = found[1].split() or [""]
        yield Snippet(page, text.count("\n", 0, found.start()) + 1, language, frozenset(marks), found[2])
    for found in _INDENTED.finditer(text):  # benchmarks/README.md writes its commands so
        if "```" not in text:
            yield Snippet(page, text.count("\n", 0, found.start()) + 1, "bash", frozenset({"bench"}), found[1])


def prose(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its two header rows."""
    section = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    if len(lines) < 3:
        raise AssertionError(f"{page.name}: no table below {heading!r}")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
