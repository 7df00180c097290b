"""Finds stop strings in text that arrives in pieces.

The invariant: text that is given out contains no stop string and no beginning of one that the next piece could
complete. Fed one token's text at a time, the place of the match does not depend on how tokens were grouped into steps.
Not here: tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The text to give out before the end, and which string matched."""

    text: str
    stop: str


class StopScanner:
    """Scans for `stops` (non-empty strings). Of two that match in one piece the earlier start wins, then the longer."""

    def __init__(self, stops: tuple[str, ...], *, keep_match: bool) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._keep_match = keep_match
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest_beginning = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """Add text; return what may be given out, or the match."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # min() keeps the first of equals: the longest, by the order of self._stops.
            at, stop = min(found, key=lambda match: match[0])
            self._held = ""
            return StopMatch(text[: at + len(stop)] if self._keep_match else text[:at], stop)
        keep = self._beginning(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return what is held: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        # Where the longest suffix starts that is the beginning of a stop string; len(text) when there is none.
        for at in range(max(0, len(text) - self._longest_beginning), len(text)):
            if text[at] in self._first_chars:
                suffix = text[at:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return at
        return len(text)

    def __repr__(self) -> str:
        return f"<StopScanner stops={len(self._stops)} held={len(self._held)}>"
