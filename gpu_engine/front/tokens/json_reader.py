"""Reads a JSON text that arrives in pieces, and says where its values begin and end.

Invariant: the events of a text do not depend on how it is split into pieces, and no later piece changes one. A
character is looked at once, and only text that a later event may still need is kept: of an open string, number or
word, of an open item of the array that was asked for, and of an open container that is reported whole.

The reader is written here because no library has all three of: pieces that are pushed in, the place of each value
in the text (the log-probability of a value is a sum over the tokens at its place), and work that is linear in the
text. ijson takes pieces and has neither places nor JSON Pointers; json-stream pulls its text from a file; jiter's
partial mode parses the whole text again for each piece.

Not responsible for: whether the text is JSON (its grammar is). The reader stops at the first place that is none.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_POINTER = 1024
"""Characters of a JSON Pointer. A container with a longer one is reported whole, without events of its parts, which
bounds the size of an event next to its value."""

_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'[^"\\]*')
_IN_WORD = re.compile(r"[-+.\w]*", re.ASCII)
_WORDS = ("true", "false", "null")
_WORD_LENGTH = {word[0]: len(word) for word in _WORDS}


class EventKind(enum.Enum):
    """What an event says of a value; the values equal the proto enum's."""

    STARTED = 1
    FINISHED = 2
    ITEM = 3


class ValueType(enum.Enum):
    """The type of a JSON value; the values equal the proto enum's."""

    OBJECT = 1
    ARRAY = 2
    STRING = 3
    NUMBER = 4
    BOOLEAN = 5
    NULL = 6


_TYPES = {
    "{": ValueType.OBJECT,
    "[": ValueType.ARRAY,
    '"': ValueType.STRING,
    "t": ValueType.BOOLEAN,
    "f": ValueType.BOOLEAN,
    "n": ValueType.NULL,
} | dict.fromkeys("-0123456789", ValueType.NUMBER)


@dataclass(frozen=True, slots=True)
class ValueEvent:
    """A value began, ended, or ended as an item of the array that was asked for."""

    kind: EventKind
    pointer: str
    """JSON Pointer (RFC 6901)."""
    type: ValueType
    begin: int
    """The value's first character in the text."""
    end: int = 0
    """The character after its last one; 0 while it is not known."""
    text: str | None = None
    """The value's JSON text; None for a value that began, and for a container that ended after events of its parts."""
    is_leaf: bool = False
    """The value ended, and has no parts with events."""


@dataclass(slots=True)
class _Kept:
    """Text from `begin` on, as it arrives."""

    begin: int
    pieces: list[str] = field(default_factory=list)

    def add(self, text: str, offset: int, end: int) -> None:
        """Add what the piece at `offset` has of it before the piece's character `end`."""
        self.pieces.append(text[max(self.begin - offset, 0) : end])

    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class _Container:
    pointer: str
    begin: int
    is_object: bool
    key: str | None = None
    """The key of the next value of an object; None: a key comes first."""
    index: int = 0
    empty: bool = True
    kept: _Kept | None = None
    """The text of an item."""
    whole: bool = False
    """Its parts have no events."""

    def child(self) -> str:
        return f"{self.pointer}/{self.key if self.is_object else self.index}"


@dataclass(slots=True)
class _Scalar:
    """An open string, key, number or word."""

    pointer: str
    type: ValueType
    kept: _Kept
    is_key: bool = False
    silent: bool = False
    """It is within a container that is reported whole."""
    escaped: bool = False
    """The last character of a string is a backslash whose meaning the next one decides."""
    length: int = 0
    """Characters of `true`, `false` or `null`; 0 for others."""


class JsonReader:
    """Reads one text. Used by one task at a time."""

    def __init__(self, items_of: str | None = None, *, max_pointer: int = MAX_POINTER) -> None:
        """Args: see below.

        items_of: JSON Pointer of the array whose items have events; None: no items are asked for.
        max_pointer: characters of a container's pointer, above which it is reported whole.
        """
        self._items_of = items_of
        self._max_pointer = max_pointer
        self._stack: list[_Container] = []
        self._scalar: _Scalar | None = None
        self._offset = 0
        """Characters before the current piece."""
        self._ended = False
        self._whole: _Container | None = None
        """The outermost container that is reported whole, while it is open."""

    def push(self, text: str) -> list[ValueEvent]:
        """Add a piece of text; return the events that it decides."""
        events: list[ValueEvent] = []
        at, size = 0, len(text)
        while at < size and not self._ended:
            at = self._between(text, at, events) if self._scalar is None else self._within(text, at, events)
        for kept in self._kept():
            kept.add(text, self._offset, size)
        self._offset += size
        return events

    def finish(self) -> list[ValueEvent]:
        """Return the events of a number at the very end of a complete text, which no later character ended."""
        events: list[ValueEvent] = []
        if self._scalar is not None and self._scalar.type is ValueType.NUMBER and not self._stack:
            self._end_scalar("", 0, events)
        return events

    def _kept(self) -> Iterator[_Kept]:
        if self._ended:
            return
        if self._scalar is not None:
            yield self._scalar.kept
        for container in self._stack:
            if container.kept is not None:
                yield container.kept

    def _between(self, text: str, at: int, events: list[ValueEvent]) -> int:
        """Read white space and the character after it; return where to go on."""
        space = _SPACE.match(text, at)
        at = space.end() if space else at
        if at == len(text):
            return at
        char = text[at]
        top = self._stack[-1] if self._stack else None
        if top is not None and char in "]}":
            self._close(text, at + 1, events)
        elif top is not None and char == ",":
            top.key, top.index = None, top.index + 1
        elif top is not None and char == ":":
            pass
        elif top is not None and char == '"' and top.is_object and top.key is None:
            begin = self._offset + at
            self._scalar = _Scalar("", ValueType.STRING, _Kept(begin), is_key=True, silent=self._whole is not None)
        elif char in _TYPES:
            self._begin(char, self._offset + at, events)
        else:
            self._ended = True
        return at + 1 if self._scalar is None or char == '"' else at

    def _begin(self, char: str, begin: int, events: list[ValueEvent]) -> None:
        """Begin the value whose first character is `char`."""
        top = self._stack[-1] if self._stack else None
        silent, kind = self._whole is not None, _TYPES[char]
        pointer = "" if silent or top is None else top.child()
        if top is not None:
            top.empty = False
        if not silent:
            events.append(ValueEvent(EventKind.STARTED, pointer, kind, begin))
        if kind in (ValueType.OBJECT, ValueType.ARRAY):
            container = _Container(pointer, begin, char == "{")
            if not silent and len(pointer) > self._max_pointer:
                container.whole, self._whole = True, container
            if container.whole or (not silent and self._is_item(top)):
                container.kept = _Kept(begin)
            self._stack.append(container)
        else:
            self._scalar = _Scalar(pointer, kind, _Kept(begin), silent=silent, length=_WORD_LENGTH.get(char, 0))

    def _within(self, text: str, at: int, events: list[ValueEvent]) -> int:
        """Read on in the open scalar; return where to go on."""
        scalar = self._scalar
        assert scalar is not None
        if scalar.type is ValueType.STRING:
            return self._within_string(scalar, text, at, events)
        found = _IN_WORD.match(text, at)
        end = found.end() if found else at
        if scalar.length:
            last = scalar.kept.begin + scalar.length - self._offset
            if end >= last or end < len(text):
                return self._end_scalar(text, min(end, last), events)
        return self._end_scalar(text, end, events) if end < len(text) else end

    def _within_string(self, scalar: _Scalar, text: str, at: int, events: list[ValueEvent]) -> int:
        if scalar.escaped:
            scalar.escaped = False
            return at + 1
        found = _IN_STRING.match(text, at)
        end = found.end() if found else at
        if end == len(text):
            return end
        if text[end] == "\\":
            scalar.escaped = True
            return end + 1
        return self._end_scalar(text, end + 1, events)

    def _end_scalar(self, text: str, end: int, events: list[ValueEvent]) -> int:
        scalar, self._scalar = self._scalar, None
        assert scalar is not None
        top = self._stack[-1] if self._stack else None
        if scalar.silent:
            if scalar.is_key and top is not None:
                top.key = ""
            return end
        scalar.kept.add(text, self._offset, end)
        value = scalar.kept.text()
        if scalar.is_key and top is not None:
            top.key = _escaped(value)
            return end
        if scalar.length and value not in _WORDS:
            self._ended = True
            return end
        begin, after = scalar.kept.begin, self._offset + end
        events.append(ValueEvent(EventKind.FINISHED, scalar.pointer, scalar.type, begin, after, value, is_leaf=True))
        if self._is_item(top):
            events.append(ValueEvent(EventKind.ITEM, scalar.pointer, scalar.type, begin, after, value))
        self._ended = top is None
        return end

    def _close(self, text: str, end: int, events: list[ValueEvent]) -> None:
        container = self._stack.pop()
        parent = self._stack[-1] if self._stack else None
        self._ended = parent is None
        if self._whole is not None and not container.whole:
            return
        value = None
        if container.kept is not None:
            container.kept.add(text, self._offset, end)
            value = container.kept.text()
        if container.whole:
            self._whole = None
        kind = ValueType.OBJECT if container.is_object else ValueType.ARRAY
        is_leaf = container.empty or container.whole
        own = ("{}" if container.is_object else "[]") if container.empty else value if container.whole else None
        begin, after, pointer = container.begin, self._offset + end, container.pointer
        events.append(ValueEvent(EventKind.FINISHED, pointer, kind, begin, after, own, is_leaf=is_leaf))
        if self._is_item(parent):
            events.append(ValueEvent(EventKind.ITEM, pointer, kind, begin, after, value))

    def _is_item(self, parent: _Container | None) -> bool:
        """Return whether the parts of `parent` are the items that were asked for."""
        return parent is not None and not parent.is_object and parent.pointer == self._items_of

    def __repr__(self) -> str:
        return f"<JsonReader depth={len(self._stack)} at={self._offset} ended={self._ended}>"


def _escaped(key: str) -> str:
    """Return a key in quotes as a part of a JSON Pointer. A surrogate without its pair becomes `?`."""
    name = json.loads(key, strict=False).encode("utf-8", "replace").decode()
    return str(name).replace("~", "~0").replace("/", "~1")
