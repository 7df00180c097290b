r"""The rules that xgrammar 0.2.8 makes of JSON, corrected before they are compiled.

Invariant: a correction takes texts away and never adds one that is not JSON. Four defects: any character may be
written as \uXXXX, so `{"\u0061": 1}` is an additional property even where `a` is declared with another schema; a string
whose length is bounded takes control characters as they are, which is no JSON; white space cannot be turned off
everywhere; and objects with propertyNames or patternProperties take twice the white space they should. It works on the
text of the rules, and leaves what stands in quotes or brackets alone. What a schema may say is `xgrammar_schema`.
"""

from __future__ import annotations

import re

from grammar_service.grammar.value import MAX_WHITESPACE, Whitespace

_ESCAPE = re.compile(r"^(basic_escape\w* ::= ).*$", re.MULTILINE)
_ESCAPES = r"(([" + r"\"\\bfnrt" + "]))"
"""Without \\uXXXX and \\/: every character has one spelling, so a declared name cannot be spelled another way."""

_LENGTH = re.compile(r'^(\w+_characters(?:_\d+)? ::= \(\()\[\^\\"\\\\\\r\\n\](\)\))$', re.MULTILINE)
_CHARACTER = r"[^\0-\x1f\"\\]"
"""One of a string whose length is counted, as in a string without a length."""

_SPACE = rf"whitespace\w*\{{0, {MAX_WHITESPACE}\}} "
_QUOTED_OR_SPACE = re.compile(rf'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|{_SPACE}')
_MEMBER = re.compile(rf"^(\w+) ::= \(\({_SPACE}", re.MULTILINE)
_NEXT_MEMBER = re.compile(rf'^(\w+ ::= \(\((?:{_SPACE})?"," ){_SPACE}(\w+)\)\)$', re.MULTILINE)


def corrected(rules: str, whitespace: Whitespace) -> str:
    """Return rules that were made with `wanted_count(whitespace)`, with the defects above taken out."""
    rules = _ESCAPE.sub(lambda found: found[1] + _ESCAPES, rules)
    rules = _LENGTH.sub(lambda found: found[1] + _CHARACTER + found[2], rules)
    if whitespace is Whitespace.BOUNDED:
        spaced = set(_MEMBER.findall(rules))
        return _NEXT_MEMBER.sub(lambda found: found[1] + found[2] + "))" if found[2] in spaced else found[0], rules)
    if whitespace is Whitespace.COMPACT:
        return _QUOTED_OR_SPACE.sub(lambda found: "" if found[0].startswith("whitespace") else found[0], rules)
    return rules


def wanted_count(whitespace: Whitespace) -> int | None:
    """Return the library's `max_whitespace_cnt`; compact is made from bounded, because it takes no 0."""
    return None if whitespace is Whitespace.ANY else MAX_WHITESPACE
