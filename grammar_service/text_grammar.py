"""Grammars that users write by hand: GBNF and Lark, and what they may not say.

Invariant: a grammar that passes describes text only. Token ids, special tokens and references to other grammars are
the server's business: a user who can name them can switch roles in a conversation. Reads literals, patterns and
comments apart from the rest, so that the same characters inside a quoted text stay allowed.
"""

from __future__ import annotations

import json
import re

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
_XGRAMMAR_TOKENS = re.compile(r"\b(Token|ExcludeToken|AnyTokens?|TagDispatch|TokenTagDispatch|TokenDispatch)\s*\(")


def refuse_token_references(lark: str) -> None:
    """Raise InvalidGrammar when a Lark grammar names tokens (`<|x|>`, `<[5]>`) or sets options of the library."""
    loud = _LARK_QUIET.sub(_blank, lark)
    found = _LARK_TOKEN.search(loud)
    if found:
        raise InvalidGrammar(
            f"source: line {_line(loud, found)}: {found[0]!r} names a token; only text may be described"
        )
    options = _LARK_OPTIONS.search(loud)
    if options:
        raise InvalidGrammar(f"source: line {_line(loud, options)}: %llguidance options are not the request's to set")


def refuse_token_functions(gbnf: str) -> None:
    """Raise InvalidGrammar when a GBNF grammar uses xgrammar's token functions, as in `Token(5)`."""
    loud = _QUIET.sub(_blank, gbnf)
    found = _XGRAMMAR_TOKENS.search(loud)
    if found:
        raise InvalidGrammar(
            f"source: line {_line(loud, found)}: {found[1]}() names tokens; only text may be described"
        )


def gbnf_to_lark(gbnf: str) -> str:
    """Return the same language in Lark, with the library's own converter.

    Raises InvalidGrammar with the place.
    """
    refuse_token_functions(gbnf)
    from llguidance.gbnf_to_lark import gbnf_to_lark as convert

    try:
        return convert(gbnf)
    except RecursionError:
        raise InvalidGrammar("EBNF: nested too deeply") from None
    except Exception as error:  # the converter raises bare Exception
        raise InvalidGrammar(f"EBNF: {error}") from None


def lark_literal(text: str) -> str:
    """Return `text` as a quoted Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def gbnf_literal(text: str) -> str:
    """Return `text` as a quoted GBNF literal; control characters are escaped by code point."""
    quoted = "".join("\\" + c if c in '"\\' else c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in text)
    return f'"{quoted}"'


def _blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1
