"""Checks and rewriting of GBNF and Lark grammars, the kinds that users write by hand.

Invariant: a grammar that passes the checks describes text only. It cannot name token ids or special tokens, because a
user who names those can switch the roles of a conversation. Literals, patterns and comments are told apart from the
rest, so the same characters inside a quoted text are allowed.
Not responsible for: parsing a grammar (the libraries do), its limits (see limits.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from grammar_service.errors import InvalidGrammar

_QUIET = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"i?          # a quoted text
    | /(?:\\.|[^/\\\n])+/[imslux]* # a Lark pattern
    | \[(?:\\.|[^\]\\\n])*\]       # a GBNF character class
    | //[^\n]* | \#[^\n]*          # comments
    """,
    re.VERBOSE,
)
_LARK_QUIET = re.compile(r'"(?:\\.|[^"\\\n])*"i?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/[imslux]*')
_LARK_TOKEN = re.compile(r"<[^<>\n]*>")
_LARK_OPTIONS = re.compile(r"^\s*%llguidance\b", re.MULTILINE)
_LARK_ATTRIBUTES = re.compile(r"^[ \t]*[?!]?(\w+)\s*\[([^\]\n]*)\]\s*:", re.MULTILINE)
_GBNF_RULE = re.compile(r"([\w-]+)\s*::=")
_GBNF_ATTRIBUTES = re.compile(r"([\w-]+)\s*\[[^\]\n]*\]\s*::=")
_GBNF_QUIET_BUT_CLASSES = re.compile(r'"(?:\\.|[^"\\\n])*"|\#[^\n]*')
_GBNF_ESCAPE = re.compile(r"\\x([0-9A-Fa-f]{2})|\\.")
_XGRAMMAR_TOKENS = re.compile(r"\b(Token|ExcludeToken|AnyTokens?|TagDispatch|TokenTagDispatch|TokenDispatch)\s*\(")


def refuse_token_references(lark: str) -> None:
    """Raise InvalidGrammar if a Lark grammar names tokens (`<|x|>`, `<[5]>`) or sets options of the library."""
    loud = _LARK_QUIET.sub(_blank, lark)
    found = _LARK_TOKEN.search(loud)
    if found:
        raise InvalidGrammar(
            f"source: line {_line(loud, found)}: {found[0]!r} names a token; only text may be described"
        )
    options = _LARK_OPTIONS.search(loud)
    if options:
        raise InvalidGrammar(f"source: line {_line(loud, options)}: a request may not set %llguidance options")


def ignored_attributes(lark: str) -> list[tuple[str, str]]:
    """Return (attribute, why) for each rule attribute in a Lark grammar that has no effect, as in `a[capture]: "x"`.

    Raises InvalidGrammar for attributes that end a rule after a number of tokens or at a stop string: a matcher with
    a rule like that cannot roll back.
    """
    loud = _LARK_QUIET.sub(_blank, lark)
    out = []
    for found in _LARK_ATTRIBUTES.finditer(loud):
        for name in re.findall(r"[a-z_]+", re.sub(r"=[^,]*", "", found[2])):
            where = f"line {_line(loud, found)}: rule {found[1]!r}"
            if name in ("max_tokens", "stop", "stop_capture"):
                raise InvalidGrammar(
                    f"source: {where}: {name} is not possible, because drafts could not be rolled back"
                )
            if name in ("temperature", "capture"):
                out.append((name, f"{where}: has no effect here"))
    return out


def embedded_schemas(lark: str) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Yield (path, schema, (begin, end)) of each `%json` in a Lark grammar. Invalid JSON is left to the library."""
    loud = _LARK_QUIET.sub(_blank, lark)
    end = 0
    for i, found in enumerate(re.finditer(r"%json\s*", loud)):
        if found.start() < end:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue
        if isinstance(schema, dict):
            yield f"/%json/{i}", schema, (found.end(), end)


def with_schemas(lark: str, schema_text: Callable[[Any, str], str]) -> str:
    """Return a Lark grammar in which `schema_text(schema, path)` replaces each schema."""
    out, at = [], 0
    for path, schema, (begin, end) in embedded_schemas(lark):
        out += [lark[at:begin], schema_text(schema, path)]
        at = end
    return "".join([*out, lark[at:]])


def check_gbnf(gbnf: str) -> None:
    """Raise InvalidGrammar, with the line, for parts of a GBNF grammar that a library would misread.

    These are xgrammar's token functions, as in `Token(5)`; rule attributes, which xgrammar ignores; and a rule that is
    defined twice, for which llguidance's converter takes the last definition.
    """
    loud = _QUIET.sub(_blank, gbnf)
    found = _XGRAMMAR_TOKENS.search(loud)
    if found:
        raise InvalidGrammar(
            f"source: line {_line(loud, found)}: {found[1]}() names tokens; only text may be described"
        )
    # Searched with the classes left in, because an attribute looks like a class.
    found = _GBNF_ATTRIBUTES.search(_GBNF_QUIET_BUT_CLASSES.sub(_blank, gbnf))
    if found:
        raise InvalidGrammar(f"source: line {_line(gbnf, found)}: rule {found[1]!r}: attributes have no effect here")
    seen: set[str] = set()
    for found in _GBNF_RULE.finditer(loud):
        if found[1] in seen:
            raise InvalidGrammar(f"source: line {_line(loud, found)}: rule {found[1]!r} is defined twice")
        seen.add(found[1])


def with_fixed_escapes(gbnf: str) -> str:
    r"""Return a GBNF grammar with `\u00HH` for each `\xHH`, because xgrammar reads more than two digits after `\x`."""
    return _QUIET.sub(lambda part: part[0] if part[0][0] in "/#" else _GBNF_ESCAPE.sub(_four_digits, part[0]), gbnf)


def _four_digits(escape: re.Match[str]) -> str:
    return f"\\u00{escape[1]}" if escape[1] else escape[0]


def count_alternatives(grammar: str) -> int:
    """Return how many alternatives a GBNF or Lark grammar has, not counting the first of each rule."""
    return _QUIET.sub(_blank, grammar).count("|")


def lark_literal(text: str) -> str:
    """Return `text` as a quoted Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def gbnf_literal(text: str) -> str:
    """Return `text` as a quoted GBNF literal, with control characters as escapes."""
    quoted = "".join("\\" + c if c in '"\\' else c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in text)
    return f'"{quoted}"'


def _blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1
