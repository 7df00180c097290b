r"""A pattern of JSON Schema, which is ECMA-262, in the part of the notation that every library reads alike.

Invariant: what `portable` returns matches a subset of what the pattern matches, in ECMA-262 with the flag `u`, for any
library. Without it `.` lets by a carriage return, `\s` a character that is no space, `[]a]` and `[a&&b]` mean something
else, and llguidance 1.9 takes a quote for every class that holds an unwritable control character. So classes are
computed here as ranges of code points and written out. It decides nothing about anchors; the libraries know those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_Ranges = list[tuple[int, int]]

_LAST = 0x10FFFF
_DIGIT: _Ranges = [(48, 57)]
_WORD: _Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_LINE_ENDS: _Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SPACE: _Ranges = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACE += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
UNWRITABLE: _Ranges = [(0, 7), (11, 11), (14, 31)]
r"""Control characters that a string can only hold as \uXXXX, which no grammar of ours lets by."""

_CONTROLS = {"f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_CATEGORY = re.compile(r"\\[pP]\{(?:(?:General_Category|gc)=)?[A-Z][A-Za-z]?\}")
_HEX = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\u\{([0-9A-Fa-f]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")
_GROUP = re.compile(r"\(\?<[A-Za-z_$][\w$]*>")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ ")


class NotPortable(ValueError):
    """The pattern is not ECMA-262, or holds what no backend has. The message names the construct."""


def portable(pattern: str, unwritable: _Ranges = UNWRITABLE) -> str:
    """Return the pattern in portable notation, without the code points that a library cannot write.

    Raises NotPortable.
    """
    return _Reader(pattern, unwritable).read()


class _Reader:
    def __init__(self, pattern: str, unwritable: _Ranges) -> None:
        self._text = pattern
        self._unwritable = unwritable
        self._at = 0

    def read(self) -> str:
        out: list[str] = []
        if self._text.startswith("(?i)"):
            out.append(self._take(4))
        while self._at < len(self._text):
            out.append(self._term())
        return "".join(out)

    def _term(self) -> str:
        text, at = self._text, self._at
        char = text[at]
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char in "*+?" or _COUNT.match(text, at):
            return self._quantifier()
        if char in ")|^$":
            return self._take(1)
        if char == ".":
            self._at += 1
            return self._written(_without(_LINE_ENDS))
        if char != "\\":
            self._at += 1
            return self._literal(ord(char))
        if text[at : at + 2] in ("\\b", "\\B"):
            raise NotPortable("a word boundary")
        found = self._escape()
        if isinstance(found, str):
            return self._minus_unwritable(found)
        return self._literal(found) if isinstance(found, int) else self._written(found)

    def _take(self, count: int) -> str:
        self._at += count
        return self._text[self._at - count : self._at]

    def _group(self) -> str:
        rest = self._text[self._at :]
        named = _GROUP.match(rest)
        if rest.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            raise NotPortable(f"look-around {rest[:4]!r}")
        if rest.startswith("(?") and not rest.startswith("(?:") and not named:
            raise NotPortable(f"the group {rest[:4]!r} is not ECMA-262")
        self._at += len(named[0]) if named else 3 if rest.startswith("(?:") else 1
        return "(?:"

    def _quantifier(self) -> str:
        count = _COUNT.match(self._text, self._at)
        out = self._take(len(count[0]) if count else 1)
        # Lazy or greedy is the same language.
        if self._text[self._at : self._at + 1] == "?":
            self._at += 1
        after = self._text[self._at : self._at + 1]
        if after in ("*", "+", "?") or _COUNT.match(self._text, self._at):
            raise NotPortable(f"{after!r} after a quantifier is not ECMA-262")
        return out

    def _class(self) -> str:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: _Ranges = []
        categories: list[str] = []
        while not self._text.startswith("]", self._at):
            first = self._member()
            if isinstance(first, int) and self._is_range():
                self._at += 1
                last = self._member()
                if not isinstance(last, int) or last < first:
                    raise NotPortable("a range in a class that is not ECMA-262")
                ranges.append((first, last))
            elif isinstance(first, int):
                ranges.append((first, first))
            elif isinstance(first, str):
                categories.append(first)
            else:
                ranges += first
        self._at += 1
        if categories:
            sign = "^" if negated else ""
            return self._minus_unwritable("".join((sign, *categories, *_pairs(_merged(ranges)))))
        return self._written(_without(ranges) if negated else _merged(ranges))

    def _is_range(self) -> bool:
        return self._text.startswith("-", self._at) and not self._text.startswith("]", self._at + 1)

    def _member(self) -> int | str | _Ranges:
        if self._at >= len(self._text):
            raise NotPortable("a class without its end")
        if self._text[self._at] != "\\":
            return ord(self._take(1))
        if self._text.startswith("\\b", self._at):
            self._at += 2
            return 8
        return self._escape()

    def _escape(self) -> int | str | _Ranges:
        """Return a code point, a set of them, or a category in the notation of all."""
        text, at = self._text, self._at
        category = _CATEGORY.match(text, at)
        if category:
            self._at = category.end()
            return re.sub(r"\{.*=", "{", category[0])
        number = _HEX.match(text, at)
        if number:
            self._at = number.end()
            return self._code_point(int(next(filter(None, number.groups())), 16))
        name = text[at + 1 : at + 2]
        self._at += 2
        if name.lower() in ("d", "w", "s") and name:
            ranges = {"d": _DIGIT, "w": _WORD, "s": _SPACE}[name.lower()]
            return ranges if name.islower() else _without(ranges)
        if name in _CONTROLS:
            return _CONTROLS[name]
        following = text[self._at : self._at + 1]
        if name == "0" and not following.isdigit():
            return 0
        if name == "c" and following.isascii() and following.isalpha():
            self._at += 1
            return ord(following) % 32
        if not name or (name.isascii() and name.isalnum()):
            raise NotPortable(f"the escape {text[at : at + 2]!r}")
        return ord(name)

    def _code_point(self, value: int) -> int:
        low = _LOW_SURROGATE.match(self._text, self._at)
        if 0xD800 <= value < 0xDC00 and low:
            self._at = low.end()
            return 0x10000 + ((value - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        if 0xD800 <= value < 0xE000 or value > _LAST:
            raise NotPortable("a lone surrogate or a number beyond Unicode")
        return value

    def _literal(self, value: int) -> str:
        if any(first <= value <= last for first, last in self._unwritable):
            raise NotPortable(f"the character U+{value:04X}, which this backend does not write in such a string")
        return _char(value)

    def _written(self, ranges: _Ranges) -> str:
        """Return a class of the ranges, less what no string can hold."""
        kept = _without([*_without(ranges), *self._unwritable])
        if not kept:
            raise NotPortable("a class that matches no character")
        if kept[-1][1] == _LAST:
            return "[^" + "".join(_pairs(_without(kept))) + "]"
        return "[" + "".join(_pairs(kept)) + "]"

    def _minus_unwritable(self, inner: str) -> str:
        return f"[[{inner}]&&[^{''.join(_pairs(self._unwritable))}]]"


def _merged(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    out: _Ranges = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return out


def _without(ranges: _Ranges) -> _Ranges:
    """Return the complement."""
    out, at = [], 0
    for first, last in _merged(ranges):
        if first > at:
            out.append((at, first - 1))
        at = last + 1
    return [*out, (at, _LAST)] if at <= _LAST else out


def _pairs(ranges: _Ranges) -> list[str]:
    return [_char(first) if first == last else f"{_char(first)}-{_char(last)}" for first, last in ranges]


def _char(value: int) -> str:
    if chr(value) in _PLAIN or value > 0x7F:
        return chr(value)
    return f"\\x{value:02x}"
