"""The log-probability of each leaf of a JSON answer, from the answer's text and the log-probabilities of its tokens.

A leaf is a string, number, `true`, `false`, `null`, or an empty object or array; its text is the answer's, quotes
included. Invariant: a token counts for every leaf of whose text it holds a character, or a part of one. Not responsible
for: the tokens' text (see text_output.py), whether an answer is JSON (its grammar is).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"[ \t\n\r]*(?:(?P<open>[{\[])|(?P<close>[}\]])|(?P<comma>,)|(?P<colon>:)"
    r'|(?P<string>"[^"\\]*(?:\\.[^"\\]*)*")|(?P<word>[-+.\w]+))',
    re.DOTALL | re.ASCII,
)


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
        self._length = 0
        self._begins: list[int] = []
        self._ends: list[int] = []
        """Characters [begin, end) of the text that each token holds; both rise."""
        self._logprobs: list[float] = []

    def push(self, piece: str, logprob: float, *, holds: bool) -> None:
        """Add a token and the text that is known since it; `holds`: it ends in the middle of the next character."""
        self._begins.append(self._length)
        self.push_text(piece)
        self._ends.append(self._length + holds)
        self._logprobs.append(logprob)

    def push_text(self, piece: str) -> None:
        """Add text of earlier tokens."""
        self._pieces.append(piece)
        self._length += len(piece)

    def fields(self, content: str, *, complete: bool) -> list[FieldLogprob]:
        """Return the leaves of `content`, the JSON in the text, in its order; without `complete` it was cut off.

        Content that is in several places of the text, around tool calls, is no JSON value and has none.
        """
        offset = "".join(self._pieces).rfind(content)
        if offset < 0:
            return []
        return [self._field(*leaf, offset) for leaf in leaves(content, complete=complete)]

    def _field(self, pointer: str, begin: int, end: int, offset: int) -> FieldLogprob:
        first = bisect_right(self._ends, begin + offset)
        last = bisect_left(self._begins, end + offset)
        return FieldLogprob(pointer, sum(self._logprobs[first:last]), last - first)

    def __repr__(self) -> str:
        return f"<FieldScorer {len(self._logprobs)} tokens>"


@dataclass(slots=True)
class _Container:
    pointer: str
    begin: int
    is_object: bool
    key: str | None = None
    """The key of the next value of an object; None: a key comes first."""
    index: int = 0
    empty: bool = True

    def child(self) -> str:
        return f"{self.pointer}/{self.key if self.is_object else self.index}"


def leaves(text: str, *, complete: bool = True) -> Iterator[tuple[str, int, int]]:
    """Yield (pointer, begin, end) of each leaf of a JSON text, up to its end or the first place that is no JSON.

    Without `complete` a number at the very end is left out, because it may go on.
    """
    stack: list[_Container] = []
    at = 0
    while found := _TOKEN.match(text, at):
        kind, at = found.lastgroup, found.end()
        begin = found.start(kind or 0)
        top = stack[-1] if stack else None
        match kind:
            case "close":
                if top is None:
                    return
                if top.empty:
                    yield top.pointer, top.begin, at
                stack.pop()
            case "comma":
                if top is None:
                    return
                top.key, top.index = None, top.index + 1
            case "string" if top is not None and top.is_object and top.key is None:
                top.key, top.empty = _escaped(text[begin:at]), False
            case "colon":
                pass
            case _:
                pointer = top.child() if top is not None else ""
                if top is not None:
                    top.empty = False
                if kind == "open":
                    stack.append(_Container(pointer, begin, text[begin] == "{"))
                elif kind == "string" or complete or at < len(text):
                    yield pointer, begin, at
        if not stack:
            return


def _escaped(key: str) -> str:
    """Return a key in quotes as a part of a JSON Pointer. A surrogate without its pair becomes `?`."""
    name = json.loads(key, strict=False).encode("utf-8", "replace").decode()
    return str(name).replace("~", "~0").replace("/", "~1")
