"""Reads the arguments of one call in the way of Python or of Gemma (see literals.py), as the text of a JSON object.

Invariant: the text of the object depends only on the text of the arguments and never on the pieces in which it arrives.
Strings are passed on as they come; a name or a word is held back until it ends.
Not responsible for: where the arguments begin (see parts.py), which values they may have (see literals.py).
"""

from __future__ import annotations

import enum
import json

from gpu_engine.front.tools.formats import ToolFormat
from gpu_engine.front.tools.literals import PYTHON_WORDS
from gpu_engine.front.tools.markers import SPACE, JsonScan, beginning_of

_WORDS = {word: text for text, word in PYTHON_WORDS.items()}
_ESCAPES = {"'": "'", '"': '"', "\\": "\\", "n": "\n", "r": "\r", "t": "\t"}


class _At(enum.Enum):
    NAME = enum.auto()
    """Before a name, or the end of the call."""
    VALUE = enum.auto()
    JSON = enum.auto()
    STRING = enum.auto()
    """Within a string that is not JSON's."""
    WORD = enum.auto()
    """A number, or a word such as True."""
    AFTER = enum.auto()
    """After a value: a separator, or the end of its list, object or call."""


class LiteralReader:
    """Reads one call. Used by one task at a time."""

    def __init__(self, form: ToolFormat) -> None:
        assert form.literals is not None
        self._end, self._literals = form.end, form.literals
        self._at = _At.NAME
        self._open: list[str] = []
        """The ends of the lists and objects that are open within the value, in Gemma's way."""
        self._scan = JsonScan()
        self._begun = False
        """The object has a member."""
        self._out: list[str] = []

    def read(self, held: str) -> tuple[str, str, bool]:
        """Return the new text of the object, what of `held` may still become a marker, and whether the call is over."""
        over = False
        while held and not over:
            rest, over = self._step(held)
            if rest is None:
                break
            held = rest
        out, self._out = self._out, []
        return "".join(out), held, over

    def finish(self, held: str) -> str:
        """Return the rest of the object's text: no more text comes, and the call is not over."""
        return _escaped(held) if self._at is _At.STRING and not held.startswith("\\") else ""

    def _step(self, held: str) -> tuple[str | None, bool]:
        """Return what follows some of the text that was read, and whether the call is over; None: it needs more."""
        match self._at:
            case _At.NAME:
                return self._name(held)
            case _At.VALUE:
                return self._value(held.lstrip(SPACE)), False
            case _At.JSON:
                end = self._scan.end_of(held)
                self._out.append(held if end is None else held[:end])
                self._at = _At.JSON if end is None else _At.AFTER
                return ("" if end is None else held[end:]), False
            case _At.STRING:
                return (self._single_quoted(held) if self._literals.is_python else self._marked(held)), False
            case _At.WORD:
                return self._word(held), False
            case _At.AFTER:
                return self._after(held)

    def _name(self, held: str) -> tuple[str | None, bool]:
        text = held.lstrip(SPACE)
        if not self._open and self._end.startswith(text[: len(self._end)]):
            return self._over(text)
        if self._open and text.startswith("}"):
            return self._close(text), False
        at = text.find(self._literals.assign)
        if at < 0:
            return None, False
        if not self._open:
            self._out.append(", " if self._begun else "{")
            self._begun = True
        self._out.append(json.dumps(text[:at], ensure_ascii=False) + ": ")
        self._at = _At.VALUE
        return text[at + len(self._literals.assign) :], False

    def _over(self, text: str) -> tuple[str | None, bool]:
        if not text.startswith(self._end):
            return None, False
        self._out.append("}" if self._begun else "{}")
        return text[len(self._end) :], True

    def _value(self, text: str) -> str | None:
        if not text:
            return None
        if self._literals.is_python:
            if text[0] == "'":
                self._out.append('"')
                self._at = _At.STRING
                return text[1:]
            self._scan = JsonScan()
            self._at = _At.JSON if text[0] in '"{[' else _At.WORD
            return text
        quote = self._literals.quote
        if text.startswith(quote):
            self._out.append('"')
            self._at = _At.STRING
            return text[len(quote) :]
        if quote.startswith(text):
            return None
        if text[0] in "{[":
            self._out.append(text[0])
            self._open.append("}" if text[0] == "{" else "]")
            self._at = _At.NAME if text[0] == "{" else _At.VALUE
            return text[1:]
        if text[0] == "]" and self._open:
            return self._close(text)
        self._at = _At.WORD
        return text

    def _close(self, text: str) -> str:
        self._out.append(self._open.pop())
        self._at = _At.AFTER
        return text[1:]

    def _word(self, held: str) -> str | None:
        at = next((i for i, char in enumerate(held) if char in ",)]}" + SPACE), None)
        if at is None:
            return None
        word = held[:at]
        self._out.append(_WORDS.get(word, word) if self._literals.is_python else word)
        self._at = _At.AFTER
        return held[at:]

    def _single_quoted(self, held: str) -> str | None:
        at = next((i for i, char in enumerate(held) if char in "'\\"), len(held))
        self._out.append(_escaped(held[:at]))
        rest = held[at:]
        if rest.startswith("'"):
            self._out.append('"')
            self._at = _At.AFTER
            return rest[1:]
        if len(rest) > 1:
            self._out.append(_escaped(_ESCAPES.get(rest[1], rest[:2])))
            return rest[2:]
        return self._keep(held, rest)

    def _marked(self, held: str) -> str | None:
        quote = self._literals.quote
        at = held.find(quote)
        if at >= 0:
            self._out.append(_escaped(held[:at]) + '"')
            self._at = _At.AFTER
            return held[at + len(quote) :]
        keep = beginning_of(held, (quote,))
        self._out.append(_escaped(held[:keep]))
        return self._keep(held, held[keep:])

    def _keep(self, held: str, rest: str) -> str | None:
        """Return the rest of a string that may still become something else; None: it is all of the text."""
        return None if rest == held else rest

    def _after(self, held: str) -> tuple[str | None, bool]:
        text = held.lstrip(SPACE)
        if not text:
            return None, False
        if self._open:
            if text[0] == self._open[-1]:
                return self._close(text), False
            if text[0] == ",":
                self._out.append(", ")
                self._at = _At.NAME if self._open[-1] == "}" else _At.VALUE
            return text[1:], False
        if text[0] == ",":
            self._at = _At.NAME
            return text[1:], False
        if self._end.startswith(text[: len(self._end)]):
            return self._over(text)
        return text[1:], False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
