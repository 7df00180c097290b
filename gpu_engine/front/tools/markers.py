"""Looks for the markers of an answer in text that arrives in pieces.

Invariant: nothing is decided that more text could change.
Not responsible for: what the markers mean (see parts.py and argument_reader.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

SPACE = " \t\n\r"


def squeezed(text: str) -> str:
    """Return a text without the white space outside quotation marks."""
    return "".join(char for _, char in _without_space(text))


def match_squeezed(text: str, wanted: Collection[str]) -> tuple[str | None, int, bool]:
    """Compare the beginning of `text` with squeezed texts, ignoring white space outside quotation marks.

    Returns the squeezed text that `text` begins with, or None; where it ends in `text`; and whether `text` begins with
    one, or could do so with more text.
    """
    seen = ""
    possible = list(wanted)
    for at, char in _without_space(text):
        seen += char
        possible = [one for one in possible if one.startswith(seen)]
        if seen in possible:
            return seen, at + 1, True
        if not possible:
            return None, 0, False
    return None, 0, bool(possible)


def match_exactly(text: str, wanted: Collection[str]) -> tuple[str | None, int, bool]:
    """Compare the beginning of `text`, after white space, with texts; return as `match_squeezed` does.

    Of several texts the longest counts, and none does while a longer one is still possible."""
    begin = len(text) - len(text.lstrip(SPACE))
    rest = text[begin:]
    if any(len(one) > len(rest) and one.startswith(rest) for one in wanted):
        return None, 0, True
    found = max((one for one in wanted if rest.startswith(one)), key=len, default=None)
    return (found, begin + len(found), True) if found is not None else (None, 0, False)


def _without_space(text: str) -> Iterator[tuple[int, str]]:
    quoted = False
    for at, char in enumerate(text):
        quoted ^= char == '"'
        if quoted or char not in SPACE:
            yield at, char


def beginning_of(text: str, markers: Sequence[str]) -> int:
    """Return where the longest suffix of `text` begins with which a marker may begin; len(text) where there is none."""
    longest = max(len(marker) for marker in markers) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)


class JsonScan:
    """Finds the end of one JSON value in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self._plain = False

    def end_of(self, text: str) -> int | None:
        """Return where the value ends in `text`, which continues the text of earlier calls; None: not in it."""
        for at, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
                    if not self._depth:
                        return at + 1
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return at + 1
            elif not self._depth:
                if char in "}],;<" + SPACE:
                    return at
                self._plain = True
        return None
