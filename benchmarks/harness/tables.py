"""Output for people: tables in Markdown, formatted numbers, and a progress bar on stderr.

Invariant: tables are returned as strings and progress goes to stderr, so redirected output holds only tables.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TextIO


def number(value: float, digits: int = 1, unit: str = "") -> str:
    """Format `value`; NaN becomes "-"."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}{unit}"


def share(value: float) -> str:
    """Format a share in [0, 1] as a percentage; NaN becomes "-". Never rounds up to 100%."""
    if math.isnan(value):
        return "-"
    floored = math.floor(value * 1000) / 10
    return "100%" if value == 1 else f"{floored:.1f}%"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, padded to be readable as text. A row that is shorter than the header gets empty cells.

    Raises:
        ValueError: a row is longer than the header.

    """
    full = []
    for row in rows:
        if len(row) > len(header):
            raise ValueError(f"row of {len(row)} cells under a header of {len(header)}")
        full.append([*row, *[""] * (len(header) - len(row))])
    widths = [max(len(line[i]) for line in [list(header), *full]) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)) + " |"]
    lines.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    lines += ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in full]
    return "\n".join(lines)


class Progress:
    """A progress bar of `total` steps; on a terminal one line that redraws, elsewhere a line every ten percent."""

    def __init__(self, total: int, out: TextIO | None = None) -> None:
        self.total = max(total, 1)
        self.done = 0
        self._out = sys.stderr if out is None else out
        self._started_s = time.monotonic()
        self._shown = -1

    def __repr__(self) -> str:
        return f"<Progress {self.done}/{self.total}>"

    def step(self, label: str, by: int = 1) -> None:
        """Count `by` steps, done just now, and say what they were."""
        self.done += by
        tenth = self.done * 10 // self.total
        if self._out.isatty():
            bar = "#" * (self.done * 30 // self.total)
            self._out.write(f"\r\x1b[K[{bar:<30}] {self.done}/{self.total} {self._elapsed()} {label}")
        elif tenth != self._shown:
            self._shown = tenth
            self._out.write(f"{self.done}/{self.total} {self._elapsed()} {label}\n")
        self._out.flush()

    def close(self) -> None:
        """End the line on a terminal."""
        if self._out.isatty():
            self._out.write("\r\x1b[K")
            self._out.flush()

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started_s:.0f}s"
