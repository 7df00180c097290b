"""Where a JSON text has got to: open brackets, strings, and the ends of values, byte by byte.

Invariant: a place is a function of only the text's bytes. It is meant for text that a grammar of JSON has allowed, and
says nothing about other text.
Not responsible for: whether a text is JSON, or valid (see validator.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

QUOTE, BACKSLASH, COMMA = b'"\\,'
OPEN, CLOSE = b"{[", b"}]"
SPACE = b" \t\r\n"
ENDS = frozenset(b'"},]')
"""Bytes after which, or before which, a value may be complete."""
_STRUCTURE = frozenset(b'{}[],:"')


class Place(NamedTuple):
    """The place in a JSON text after some of its bytes."""

    brackets: bytes = b""
    """Closing brackets of what is open, the outermost first."""
    in_string: bool = False
    escaped: bool = False
    is_name: bool = False
    """The string that is open, or was last, is a member's name."""
    previous: int = 0
    """The last byte outside strings that is not white space."""


def behind(place: Place, byte: int) -> Place:
    """Return the place after one more byte."""
    brackets, in_string, escaped, _, previous = place
    if in_string:
        if escaped:
            return place._replace(escaped=False)
        if byte == BACKSLASH:
            return place._replace(escaped=True)
        return place._replace(in_string=False, previous=byte) if byte == QUOTE else place
    if byte == QUOTE:
        name = brackets[-1:] == b"}" and previous in b"{,"
        return Place(brackets, in_string=True, is_name=name, previous=byte)
    if byte in OPEN:
        return Place(brackets + (b"}" if byte == OPEN[0] else b"]"), previous=byte)
    if byte in CLOSE:
        return Place(brackets[:-1], previous=byte)
    return place if byte in SPACE else place._replace(previous=byte)


def ends(place: Place, text: bytes) -> Iterator[tuple[int, Place]]:
    """Yield (length, place) for each part of `text`, which follows at `place`, after which a value is complete."""
    for at, byte in enumerate(text):
        before, place = place, behind(place, byte)
        if byte not in ENDS or before.escaped:
            continue
        if byte == QUOTE:
            if before.in_string and not place.is_name:
                yield at + 1, place
        elif not before.in_string:
            # Before a comma or a bracket a number or a word ends.
            if byte == COMMA:
                yield at, before
            else:
                yield at + 1, place


def compacted(place: Place, text: bytes) -> tuple[bytes, Place]:
    """Return `text`, which follows at `place`, without the white space between values, and the place after it."""
    kept = bytearray()
    for byte in text:
        if place.in_string or byte not in SPACE:
            kept.append(byte)
        place = behind(place, byte)
    return bytes(kept), place


def string_start(text: bytes | bytearray) -> int:
    """Return where the string begins that is open at the end of `text`: its last quote that is not escaped."""
    at = text.rindex(QUOTE)
    while _num_backslashes(text, at) % 2:
        at = text.rindex(QUOTE, 0, at)
    return at


def _num_backslashes(text: bytes | bytearray, end: int) -> int:
    at = end
    while at and text[at - 1] == BACKSLASH:
        at -= 1
    return end - at


def goes_on(place: Place, compact: bytes, text: bytes) -> bool:
    """Return whether all bytes of `text` belong to one scalar that began in the text `compact` before it.

    `compact` ends at `place` and has no white space between values. The quote that ends a string belongs to it.
    """
    if place.in_string:
        if compact[-1:] == b'"' and compact[-2:-1] != b"\\":
            return False  # the string has only begun
        for at, byte in enumerate(text):
            place = behind(place, byte)
            if not place.in_string:
                return not text[at + 1 :].strip(SPACE)
        return True
    begun = bool(compact) and compact[-1] not in _STRUCTURE
    return begun and bool(text.strip(SPACE)) and _STRUCTURE.isdisjoint(text)
