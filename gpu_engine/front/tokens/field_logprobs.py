"""The log-probability of each leaf of a JSON answer, from the answer's text and the log-probabilities of its tokens.

A leaf is a string, number, `true`, `false`, `null`, or an empty object or array; its text is the answer's, quotes
included. Not responsible for: which tokens count for a leaf (see token_spans.py), whether an answer is JSON (its
grammar is).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from gpu_engine.front.tokens.json_reader import JsonReader
from gpu_engine.front.tokens.token_spans import TokenSpans


@dataclass(frozen=True, slots=True)
class FieldLogprob:
    """One leaf."""

    pointer: str
    """JSON Pointer (RFC 6901)."""
    logprob: float
    """The sum over its tokens, natural logarithm."""
    tokens: int


class FieldScorer:
    """Collects the tokens of one answer. Used by one task at a time."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._spans = TokenSpans()

    def push(self, piece: str, logprob: float, *, holds: bool) -> None:
        """Add a token and the text that is known since it; `holds`: it ends in the middle of the next character."""
        self._pieces.append(piece)
        self._spans.push(piece, logprob, holds=holds)

    def push_text(self, piece: str) -> None:
        """Add text of earlier tokens."""
        self._pieces.append(piece)
        self._spans.push_text(piece)

    def fields(self, content: str, *, complete: bool) -> list[FieldLogprob]:
        """Return the leaves of `content`, the JSON in the text, in its order; without `complete` it was cut off.

        Content that is in several places of the text, around tool calls, is no JSON value and has none.
        """
        offset = "".join(self._pieces).rfind(content)
        if offset < 0:
            return []
        return [
            FieldLogprob(pointer, *self._spans.score(begin + offset, end + offset))
            for pointer, begin, end in leaves(content, complete=complete)
        ]

    def __repr__(self) -> str:
        return f"<FieldScorer {self._spans!r}>"


def leaves(text: str, *, complete: bool = True) -> Iterator[tuple[str, int, int]]:
    """Yield (pointer, begin, end) of each leaf of a JSON text, up to its end or the first place that is no JSON.

    Without `complete` a number at the very end is left out, because it may go on.
    """
    reader = JsonReader(max_pointer=sys.maxsize)
    for event in reader.push(text) + (reader.finish() if complete else []):
        if event.is_leaf:
            yield event.pointer, event.begin, event.end
