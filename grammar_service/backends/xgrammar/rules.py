r"""Corrects the rules that xgrammar 0.2.8 generates for JSON, before they are compiled.

Four defects are corrected. Any character may be written as \uXXXX, so `{"\u0061": 1}` is an additional property even if
`a` is declared. A string with a bounded length accepts raw control characters, which is not JSON. White space cannot be
turned off everywhere, nor fixed. Objects with propertyNames or patternProperties accept twice the white space.
Invariant: a correction only removes texts from the language. It works on the text of the rules and does not change
quoted texts and classes.
Not responsible for: keywords that the library ignores (see schema.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from grammar_service.errors import InternalError
from grammar_service.grammar.value import Bounds, Grammar

_ESCAPE = re.compile(r"^(basic_escape\w* ::= ).*$", re.MULTILINE)
_ESCAPES = r"(([" + r"\"\\bfnrt" + "]))"
"""Without \\uXXXX and \\/: each character has one spelling, so a declared name cannot be spelled another way."""

_LENGTH = re.compile(r'^(\w+_characters(?:_\d+)? ::= \(\()\[\^\\"\\\\\\r\\n\](\)\))$', re.MULTILINE)
_CHARACTER = r"[^\0-\x1f\"\\]"
"""A character of a string with a bounded length, as it is in strings without one."""

_SPACE = r"whitespace\w*\{0, \d+\} "
_QUOTED_OR_SPACE = re.compile(
    rf'{_SPACE}"(?P<separator>[,:])" {_SPACE}|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|(?P<space>{_SPACE})'
)
_MEMBER = re.compile(rf"^(\w+) ::= \(\({_SPACE}", re.MULTILINE)
_NEXT_MEMBER = re.compile(rf'^(\w+ ::= \(\((?:{_SPACE})?"," ){_SPACE}(\w+)\)\)$', re.MULTILINE)


def corrected(rules: str, grammar: Grammar) -> str:
    """Return `rules`, which were generated with the `most_whitespace` of `grammar`, without the defects above."""
    rules = _ESCAPE.sub(lambda found: found[1] + _ESCAPES, rules)
    rules = _LENGTH.sub(lambda found: found[1] + _CHARACTER + found[2], rules)
    if grammar.separators is not None:
        return _with_separators(rules, *grammar.separators)
    if grammar.most_whitespace:
        spaced = set(_MEMBER.findall(rules))
        return _NEXT_MEMBER.sub(lambda found: found[1] + found[2] + "))" if found[2] in spaced else found[0], rules)
    return rules


def _with_separators(rules: str, item: str, key: str) -> str:
    """Return rules whose free white space is gone, with these texts in place of each comma and colon next to it."""
    texts = {",": f'"{item}" ', ":": f'"{key}" '}

    def fixed(found: re.Match[str]) -> str:
        if found["separator"]:
            return texts[found["separator"]]
        return "" if found["space"] else found[0]

    return _QUOTED_OR_SPACE.sub(fixed, rules)


_STRING = re.compile(
    r'^basic_string_sub ::= \(\("\\""\) \| \((\[.*?\]) basic_string_sub\) '
    r'\| \("\\\\" basic_escape basic_string_sub\)\)',
    re.MULTILINE,
)
_ITEMS = re.compile(r"^(basic_array ::= .* basic_array_items)\{0, -1\}", re.MULTILINE)
_INTEGER = re.compile(r'^(\w+ ::= \(\("0"\) \| \((?:\w+ )?\[1-9\] )\[0-9\]\*\)\)$', re.MULTILINE)
_FRACTION = re.compile(r'^(\w+ ::= \("" \| \("\." \w+_digits)\{1, -1\}\)\)$', re.MULTILINE)
_EXPONENT = re.compile(r'^(\w+ ::= \("") \| \(\[eE\] \w+ \w+_digits\{1, -1\}\)\)$', re.MULTILINE)


def bounded(rules: str, bounds: Bounds) -> str:
    """Return `rules` of one JSON Schema with the bounds in the rules of values without keywords of their own.

    Raises InternalError if the library generates rules that this module does not know.
    """
    length, items, digits = bounds.max_string_length, bounds.max_array_items, bounds.max_number_digits
    if length:
        short = rf'basic_string_sub ::= ((basic_character{{0, {length}}} "\""))'
        rules = _bounded(
            _STRING, lambda found: f'basic_character ::= (({found[1]}) | ("\\\\" basic_escape))\n{short}', rules
        )
    if items:
        rules = _bounded(_ITEMS, lambda found: f"{found[1]}{{0, {items - 1}}}", rules)
    if digits:
        rules = _bounded(_INTEGER, lambda found: f"{found[1]}[0-9]{{0, {digits - 1}}}))", rules)
        rules = _bounded(_FRACTION, lambda found: f"{found[1]}{{1, {digits}}}))", rules)
        rules = _bounded(_EXPONENT, lambda found: f"{found[1]})", rules)
    return rules


def _bounded(rule: re.Pattern[str], short: Callable[[re.Match[str]], str], rules: str) -> str:
    rules, count = rule.subn(short, rules)
    if not count:
        raise InternalError(f"xgrammar generates no rule {rule.pattern!r} any more, so bounds cannot be written")
    return rules
