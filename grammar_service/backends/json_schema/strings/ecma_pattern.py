r"""Regular expressions of ECMA-262, rewritten in the part of the notation that every library reads alike.

The libraries differ: to one of them `\d` contains every Unicode digit and `.` a carriage return, another takes
`[\x2db]` for U+02DB, and `[]a]` or `[a&&b]` have several meanings. So the reader computes each class as ranges of code
points and writes every character that could have a meaning as `\uXXXX`. A negative look-ahead at the start of a
pattern, over a finite list of words, is written out: see `_Reader._without_words`.
Invariant: the result of `portable` matches a subset of what the pattern matches in ECMA-262 with the flag `u`, in every
library. What the dialect of a library cannot express raises NotPortable, which names the construct and its place.
Not responsible for: anchors of a pattern that is searched for inside a string (each backend reads those).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from grammar_service.errors import InvalidGrammar

Ranges = list[tuple[int, int]]
"""Code points as (first, last) pairs."""

_LAST = 0x10FFFF
_DIGIT: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SPACE: Ranges = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACE += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_CARET = ord("^")
_SURROGATES = (0xD800, 0xDFFF)
"""Surrogates, which no text has unpaired."""

_CONTROLS = {"f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_CATEGORY = re.compile(r"\\[pP]\{(?:(?:General_Category|gc)=)?[A-Z][A-Za-z]?\}")
_HEX = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\u\{([0-9A-Fa-f]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_COUNT = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")
_GROUP = re.compile(r"\(\?<[A-Za-z_$][\w$]*>")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ ")

_MAX_COUNT_DIGITS = 9
_MAX_WORDS = 256
"""Words of one look-ahead that is written out."""
_ALL: Ranges = [(0, _LAST)]


class NotPortable(ValueError):
    """The pattern is not ECMA-262, or a library cannot express it. The message names the place and the construct."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a library can express where the pattern is used."""

    unwritable: tuple[tuple[int, int], ...] = ()
    """Code points that cannot be written there. Classes lose them; as a literal they are not portable."""
    categories: bool = True
    r"""Whether `\p{L}` can be expressed."""
    ignore_case: bool = True
    """Whether the flag `(?i)` at the start can be expressed."""
    whole: bool = False
    """Whether the pattern describes the whole text. Then anchors at its ends are dropped, and others are refused."""


def portable(pattern: str, dialect: Dialect) -> str:
    """Return the pattern in portable notation for a dialect. Raises NotPortable."""
    return _Reader(pattern, dialect).read()


def portable_regex(regex: str, dialect: Dialect) -> str:
    """Return a regular expression of a whole answer in portable notation. Raises InvalidGrammar with the place."""
    try:
        return portable(regex, replace(dialect, whole=True)) or "(?:)"
    except NotPortable as problem:
        raise InvalidGrammar(f"regex: {problem}") from None


@dataclass(slots=True)
class _Group:
    """An open group, or the whole pattern."""

    begin: int
    at_start: bool
    """Nothing can come before the group's text."""
    empty: bool = True
    """The current alternative has no term yet."""
    starts: list[int] = field(default_factory=list)
    """Places of `^` inside."""
    ends: list[int] = field(default_factory=list)
    """Places of `$` at the end of an alternative inside, which must also end what surrounds the group."""


@dataclass(slots=True)
class _Words:
    """The words that begin with one text; the texts of one look-ahead are a tree."""

    after: dict[int, _Words] = field(default_factory=dict)
    """By the next character."""
    is_word: bool = False
    """No text is this one."""
    is_start: bool = False
    """No text begins with this one."""

    def add(self, word: Iterable[int], *, whole: bool) -> None:
        """Add a word: a whole text, or the start of one."""
        node = self
        for char in word:
            node = node.after.setdefault(char, _Words())
        node.is_word, node.is_start = node.is_word or whole, node.is_start or not whole


class _Reader:
    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self._text = pattern
        self._dialect = dialect
        self._at = 0
        self._groups = [_Group(0, at_start=True)]

    def read(self) -> str:
        out: list[str] = []
        if self._text.startswith("(?i)"):
            if not self._dialect.ignore_case:
                raise self._error("the flag (?i) is not ECMA-262")
            out.append(self._take(4))
        elif (written := self._without_words()) is not None:
            return written
        while self._at < len(self._text):
            out.append(self._term())
        if len(self._groups) > 1:
            raise self._error("a group without its end", self._groups[-1].begin)
        return "".join(out)

    def _error(self, problem: str, at: int | None = None) -> NotPortable:
        return NotPortable(f"character {(self._at if at is None else at) + 1}: {problem}")

    def _take(self, count: int) -> str:
        self._at += count
        return self._text[self._at - count : self._at]

    def _term(self) -> str:
        text, at, group = self._text, self._at, self._groups[-1]
        char = text[at]
        if char == "(":
            return self._open_group()
        if char == ")":
            return self._close_group()
        if char == "|":
            group.empty = True
            return self._take(1)
        if char in "^$":
            return self._anchor()
        if self._is_quantifier():
            return self._quantifier()
        group.empty = False
        if char == "[":
            return self._class()
        if char == ".":
            self._at += 1
            return self._written(_without(_LINE_ENDS), at)
        if char != "\\":
            self._at += 1
            return self._literal(ord(char), at)
        if text[at : at + 2] in ("\\b", "\\B"):
            raise self._error("a word boundary")
        found = self._escape()
        if isinstance(found, str):
            return self._written_category(found)
        return self._literal(found, at) if isinstance(found, int) else self._written(found, at)

    def _without_words(self) -> str | None:
        """Return `^(?!WORDS)C*$` without its look-ahead. None, and nothing is read: the pattern has another form.

        WORDS are literals, groups of literals and alternatives, each with or without `$`. C is a class, `.` or an
        escape; `C+$`, `.*` and nothing at all may also follow. The result branches where a word does, by the next
        character: `^(?!ab$).*$` is `^(?:[^a].*|a(?:[^b].*|b.+)?)?$`, with the line ends left out.
        """
        whole, tree = self._dialect.whole, _Words()
        self._at = int(self._text.startswith("^"))
        if not (self._at or whole) or not self._text.startswith("(?!", self._at):
            self._at = 0
            return None
        try:
            while self._text.startswith("(?!", self._at):
                self._at += 3
                for word, at_end in self._words(within=False):
                    tree.add(word, whole=at_end)
            chars, least = self._repeated()
        except NotPortable:
            self._at = 0
            return None
        written = self._branches(tree, chars, least)
        if written is None:
            raise self._error("nothing matches the look-ahead", 0)
        return written if whole else f"^{written}$"

    def _words(self, *, within: bool) -> list[tuple[tuple[int, ...], bool]]:
        """Read alternatives up to the end of their group. Return (word, whether it is a whole text) for each.

        Raises NotPortable for anything but literals, groups, and a `$` at the end of an alternative; a group `within`
        another has no `$`.
        """
        found: list[tuple[tuple[int, ...], bool]] = []
        words: list[tuple[int, ...]] = [()]
        while True:
            char = self._text[self._at : self._at + 1]
            if len(words) + len(found) > _MAX_WORDS or not char or char in "[]{}*+?.^":
                raise self._error("no list of words")
            if char == "(":
                self._at += 3 if self._text.startswith("(?:", self._at) else 1
                inner = self._words(within=True)
                words = [first + last for first in words for last, _ in inner]
                continue
            at_end = char == "$" and not within
            if at_end:
                self._at += 1
                char = self._text[self._at : self._at + 1]
            if char in ("|", ")"):
                self._at += 1
                found += [(word, at_end) for word in words]
                words = [()]
                if char == ")":
                    return found
                continue
            code = self._escape() if char == "\\" else ord(self._take(1))
            if at_end or char == "$" or not isinstance(code, int):
                raise self._error("no list of words")
            words = [(*word, code) for word in words]

    def _repeated(self) -> tuple[Ranges, int]:
        """Read what follows a look-ahead. Return the characters of the text, and how many it has at least."""
        if self._at == len(self._text):
            return _ALL, 0
        begin = self._at
        if self._text[begin] == ".":
            self._at += 1
            chars = _without(_LINE_ENDS)
        elif self._text[begin] == "[":
            members, categories, negated = self._members()
            if categories:
                raise self._error("no repeated class")
            chars = _without(members) if negated else members
        else:
            escape = self._escape() if self._text[begin] == "\\" else None
            if not isinstance(escape, list):
                raise self._error("no repeated class")
            chars = escape
        quantifier, end = self._text[self._at : self._at + 1], self._text[self._at + 1 :]
        if quantifier not in ("*", "+") or (end != "$" and not (self._dialect.whole and not end)):
            if quantifier == "*" and not end:
                return _ALL, 0
            raise self._error("no repeated class up to the end")
        return _merged(chars), int(quantifier == "+")

    def _branches(self, tree: _Words, chars: Ranges, least: int) -> str | None:
        """Return an expression of the texts of at least `least` of `chars` that no word of `tree` excludes.

        None: there is none.
        """
        if tree.is_start:
            return None
        any_more = f"{self._written(chars, 0)}*"
        parts = []
        others = _without([*_without(chars), *((char, char) for char in tree.after), *self._dialect.unwritable])
        if _of_characters(others):
            parts.append(f"{self._written(others, 0)}{any_more}")
        for char, below in tree.after.items():
            is_written = not any(first <= char <= last for first, last in (*self._dialect.unwritable, _SURROGATES))
            if is_written and any(first <= char <= last for first, last in chars):
                rest = self._branches(below, chars, 0)
                if rest is not None:
                    parts.append(f"{_char(char)}{rest}")
        may_end = not tree.is_word and not least
        if not parts:
            return "" if may_end else None
        return f"(?:{'|'.join(parts)})" + "?" * may_end

    def _open_group(self) -> str:
        rest, parent = self._text[self._at :], self._groups[-1]
        named = _GROUP.match(rest)
        if rest.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            raise self._error(f"look-around {rest[:4]!r}")
        if rest.startswith("(?") and not rest.startswith("(?:") and not named:
            raise self._error(f"the group {rest[:4]!r} is not ECMA-262")
        self._groups.append(_Group(self._at, at_start=parent.at_start and parent.empty))
        parent.empty = False
        self._at += len(named[0]) if named else 3 if rest.startswith("(?:") else 1
        return "(?:"

    def _close_group(self) -> str:
        if len(self._groups) == 1:
            raise self._error("a ')' without its group")
        group, parent = self._groups.pop(), self._groups[-1]
        self._at += 1
        if group.starts and self._is_quantifier():
            raise self._error("an anchor inside the expression", group.starts[0])
        if group.ends and not self._ends_alternative():
            raise self._error("an anchor inside the expression", group.ends[0])
        parent.starts += group.starts
        parent.ends += group.ends
        return ")"

    def _anchor(self) -> str:
        if not self._dialect.whole:
            self._groups[-1].empty = False
            return self._take(1)
        group, at = self._groups[-1], self._at
        self._at += 1
        if self._text[at] == "^":
            allowed = group.at_start and group.empty
            group.starts.append(at)
        else:
            allowed = self._ends_alternative()
            group.ends.append(at)
        if not allowed or self._is_quantifier():
            raise self._error("an anchor inside the expression", at)
        return ""

    def _ends_alternative(self) -> bool:
        return self._at == len(self._text) or self._text[self._at] in "|)"

    def _is_quantifier(self) -> bool:
        # A `{` that begins no count is a literal: ECMA-262 allows it without the flag `u`, and schemas rely on it.
        return self._text[self._at : self._at + 1] in ("*", "+", "?") or bool(_COUNT.match(self._text, self._at))

    def _quantifier(self) -> str:
        count = _COUNT.match(self._text, self._at)
        if self._groups[-1].empty:
            raise self._error("a quantifier with nothing to repeat")
        if count and any(len(number or "") > _MAX_COUNT_DIGITS for number in count.groups()):
            raise self._error(f"a count of more than {_MAX_COUNT_DIGITS} digits")
        if count and count[2] and int(count[2]) < int(count[1]):
            raise self._error(f"the bounds of {count[0]} are out of order")
        out = self._take(len(count[0]) if count else 1)
        # A lazy quantifier has the same language as a greedy one.
        if self._text[self._at : self._at + 1] == "?":
            self._at += 1
        if self._is_quantifier():
            raise self._error(f"{self._text[self._at]!r} after a quantifier is not ECMA-262")
        return out

    def _class(self) -> str:
        begin = self._at
        ranges, categories, negated = self._members()
        if categories:
            return self._written_category("".join(("^" * negated, *categories, *_pairs(_merged(ranges)))))
        return self._written(_without(ranges) if negated else _merged(ranges), begin)

    def _members(self) -> tuple[Ranges, list[str], bool]:
        """Read a class. Return the ranges and the categories that it lists, and whether it is negated."""
        begin = self._at
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: Ranges = []
        categories: list[str] = []
        while not self._text.startswith("]", self._at):
            first = self._class_member(begin)
            if isinstance(first, int) and self._is_range():
                self._at += 1
                last = self._class_member(begin)
                if not isinstance(last, int) or last < first:
                    raise self._error("a range in this class is not ECMA-262", begin)
                ranges.append((first, last))
            elif isinstance(first, int):
                ranges.append((first, first))
            elif isinstance(first, str):
                categories.append(first)
            else:
                ranges += first
        self._at += 1
        return ranges, categories, negated

    def _is_range(self) -> bool:
        return self._text.startswith("-", self._at) and not self._text.startswith("]", self._at + 1)

    def _class_member(self, begin: int) -> int | str | Ranges:
        if self._at >= len(self._text):
            raise self._error("a class without its end", begin)
        if self._text[self._at] != "\\":
            return ord(self._take(1))
        if self._text.startswith("\\b", self._at):
            self._at += 2
            return 8
        return self._escape()

    def _escape(self) -> int | str | Ranges:
        """Read an escape. Return a code point, a set of them, or a category in the notation of all libraries."""
        text, at = self._text, self._at
        category = _CATEGORY.match(text, at)
        if category:
            if not self._dialect.categories:
                raise self._error(f"the category {category[0]!r}")
            self._at = category.end()
            return re.sub(r"\{.*=", "{", category[0])
        number = _HEX.match(text, at)
        if number:
            self._at = number.end()
            return self._code_point(int(next(filter(None, number.groups())), 16), at)
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
            raise self._error(f"the escape {text[at : at + 2]!r}", at)
        return ord(name)

    def _code_point(self, value: int, begin: int) -> int:
        low = _LOW_SURROGATE.match(self._text, self._at)
        if 0xD800 <= value < 0xDC00 and low:
            self._at = low.end()
            return 0x10000 + ((value - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        if 0xD800 <= value < 0xE000 or value > _LAST:
            raise self._error("a lone surrogate or a number beyond Unicode", begin)
        return value

    def _literal(self, value: int, begin: int) -> str:
        if _SURROGATES[0] <= value <= _SURROGATES[1]:
            raise self._error("a lone surrogate", begin)
        if any(first <= value <= last for first, last in self._dialect.unwritable):
            raise self._error(f"the character U+{value:04X}, which this backend does not write in such a string", begin)
        return _char(value)

    def _written(self, ranges: Ranges, begin: int) -> str:
        """Return a class of the ranges without the code points that cannot be written."""
        written = _of_characters(_without([*_without(ranges), *self._dialect.unwritable]))
        if not written:
            raise self._error("a class that matches no character", begin)
        if written[-1][1] != _LAST:
            return _class_of(written)
        excluded = _of_characters(_without(written))
        # The class of all characters: `[^]` has another meaning in one library.
        return "[^" + "".join(_pairs(excluded)) + "]" if excluded else f"[\\u0000-{chr(_LAST)}]"

    def _written_category(self, inner: str) -> str:
        if not self._dialect.unwritable:
            return f"[{inner}]"
        return f"[[{inner}]&&[^{''.join(_pairs(list(self._dialect.unwritable)))}]]"


def _class_of(ranges: Ranges) -> str:
    """Return a class. A leading `^` would negate it in xgrammar, even as an escape, so it moves to the end."""
    if ranges == [(_CARET, _CARET)]:
        return _char(_CARET)
    first, last = ranges[0]
    if first == _CARET:
        rest = [(first + 1, last)] if last > first else []
        return "[" + "".join(_pairs([*rest, *ranges[1:], (_CARET, _CARET)])) + "]"
    return "[" + "".join(_pairs(ranges)) + "]"


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    out: Ranges = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return out


def _without(ranges: Ranges) -> Ranges:
    """Return the complement."""
    out, at = [], 0
    for first, last in _merged(ranges):
        if first > at:
            out.append((at, first - 1))
        at = last + 1
    return [*out, (at, _LAST)] if at <= _LAST else out


def _of_characters(ranges: Ranges) -> Ranges:
    """Return ranges with the same characters, none of which begins or ends with a surrogate."""
    low, high = _SURROGATES
    clipped = [(high + 1 if low <= a <= high else a, low - 1 if low <= b <= high else b) for a, b in ranges]
    return [(first, last) for first, last in clipped if first <= last]


def _pairs(ranges: Ranges) -> list[str]:
    return [_char(first) if first == last else f"{_char(first)}-{_char(last)}" for first, last in ranges]


def _char(value: int) -> str:
    # Four digits always: xgrammar reads as many hexadecimal digits after \x as there are.
    if chr(value) in _PLAIN or value > 0x7F:
        return chr(value)
    return f"\\u{value:04x}"
