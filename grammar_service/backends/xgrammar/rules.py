r"""Corrects the rules that xgrammar 0.2.8 generates for JSON, before they are compiled.

Four defects are corrected. Any character may be written as \uXXXX, so `{"\u0061": 1}` is an additional property even if
`a` is declared. A string with a bounded length accepts raw control characters, which is not JSON. White space cannot be
turned off everywhere. Objects with propertyNames or patternProperties accept twice the white space.
Invariant: a correction only removes texts from the language. It works on the text of the rules and does not change
quoted texts and classes.
Not responsible for: keywords that the library ignores (see schema.py).
"""

from __future__ import annotations

import re

from grammar_service.grammar.value import MAX_WHITESPACE, Whitespace

_ESCAPE = re.compile(r"^(basic_escape\w* ::= ).*$", re.MULTILINE)
_ESCAPES = r"(([" + r"\"\\bfnrt" + "]))"
"""Without \\uXXXX and \\/: each character has one spelling, so a declared name cannot be spelled another way."""

_LENGTH = re.compile(r'^(\w+_characters(?:_\d+)? ::= \(\()\[\^\\"\\\\\\r\\n\](\)\))$', re.MULTILINE)
_CHARACTER = r"[^\0-\x1f\"\\]"
"""A character of a string with a bounded length, as it is in strings without one."""

_SPACE = rf"whitespace\w*\{{0, {MAX_WHITESPACE}\}} "
_QUOTED_OR_SPACE = re.compile(rf'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|{_SPACE}')
_MEMBER = re.compile(rf"^(\w+) ::= \(\({_SPACE}", re.MULTILINE)
_NEXT_MEMBER = re.compile(rf'^(\w+ ::= \(\((?:{_SPACE})?"," ){_SPACE}(\w+)\)\)$', re.MULTILINE)


def corrected(rules: str, whitespace: Whitespace) -> str:
    """Return `rules`, which were generated with `wanted_count(whitespace)`, without the defects above."""
    rules = _ESCAPE.sub(lambda found: found[1] + _ESCAPES, rules)
    rules = _LENGTH.sub(lambda found: found[1] + _CHARACTER + found[2], rules)
    if whitespace is Whitespace.BOUNDED:
        spaced = set(_MEMBER.findall(rules))
        return _NEXT_MEMBER.sub(lambda found: found[1] + found[2] + "))" if found[2] in spaced else found[0], rules)
    if whitespace is Whitespace.COMPACT:
        return _QUOTED_OR_SPACE.sub(lambda found: "" if found[0].startswith("whitespace") else found[0], rules)
    return rules


def wanted_count(whitespace: Whitespace) -> int | None:
    """Return the library's `max_whitespace_cnt`. It cannot be 0, so compact rules are made from bounded ones."""
    return None if whitespace is Whitespace.ANY else MAX_WHITESPACE
