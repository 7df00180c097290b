"""How deeply a grammar's text is nested, told before any library recurses into it.

Invariant: linear in the text, without recursion, and never an error of its own: a text that is no grammar has some
depth too. What counts: brackets of JSON; groups of a regular expression, also of those that stand in a schema; brackets
of EBNF and Lark. Quoted texts and character classes do not count. Not here: chains of rules and references, which the
libraries walk in a process that may die of it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from grammar_service.errors import LimitExceeded
from grammar_service.grammar.value import Kind

_JSON_QUIET = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_REGEX_QUIET = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]?", re.DOTALL)
_RULES_QUIET = re.compile(
    r'"(?:[^"\\\n]|\\.)*+"?|/(?![/*\s])(?:[^/\\\n]|\\.)*+/?|\[\^?(?:[^\]\\\n]|\\.)*+\]?|//[^\n]*|#[^\n]*', re.DOTALL
)
_LARK_QUIET = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?![/*\s])(?:[^/\\\n]|\\.)*+/?|//[^\n]*|#[^\n]*', re.DOTALL)
_BRACKETS = re.compile(r"[()\[\]{}]")
_SUFFIXES = re.compile(r"(?:[*+?]|\{\d*,?\d*\})+")
_ONE_SUFFIX = re.compile(r"[*+?]|\{")
_RULE_KEYS = frozenset({"pattern", "grammar"})
_PATTERN_MAPS = frozenset({"patternProperties"})


def check_nesting(kind: Kind, source: str, limit: int) -> None:
    """Raise LimitExceeded, naming `max_grammar_depth`, when `source` is nested deeper than `limit` levels."""
    depth = nesting(kind, source)
    if depth > limit:
        raise LimitExceeded(f"max_grammar_depth: the grammar is nested {depth} levels deep, the limit is {limit}")


def nesting(kind: Kind, source: str) -> int:
    """Return the levels of nesting."""
    match kind:
        case Kind.REGEX:
            return _groups(source)
        case Kind.EBNF:
            return max(_brackets(_RULES_QUIET.sub(" ", source)), _suffixes(_RULES_QUIET.sub('"', source)))
        case Kind.LARK:
            quiet = _LARK_QUIET.sub(" ", source)
            quoted = (found[0] for found in _LARK_QUIET.finditer(source))
            patterns = [text for text in quoted if text.startswith("/") and not text.startswith("//")]
            return max(_brackets(quiet), _suffixes(_LARK_QUIET.sub('"', source)), *map(_groups, patterns), 0)
        case _:
            return max(_brackets(_JSON_QUIET.sub(" ", source)), _patterns(source))


def _brackets(text: str) -> int:
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif depth:
            depth -= 1
    return deepest


def _groups(regex: str) -> int:
    loud = _REGEX_QUIET.sub("x", regex)
    return max(_brackets(re.sub(r"[\[\]{}]", " ", loud)), _suffixes(loud))


def _suffixes(text: str) -> int:
    """Return the most repetitions that follow each other: `a?+{2}` nests three of them."""
    return max((len(_ONE_SUFFIX.findall(found[0])) for found in _SUFFIXES.finditer(text)), default=0)


def _patterns(source: str) -> int:
    """Return the depth of the deepest regular expression or grammar that stands in a JSON text."""
    if not any(f'"{key}"' in source for key in _RULE_KEYS | _PATTERN_MAPS):
        return 0
    try:
        waiting: list[Any] = [json.loads(source)]
    except (ValueError, RecursionError):
        return 0
    deepest = 0
    for node in waiting:
        if isinstance(node, list):
            waiting.extend(node)
        elif isinstance(node, dict):
            waiting.extend(node.values())
            texts = [node[key] for key in _RULE_KEYS if isinstance(node.get(key), str)]
            texts += [text for key in _PATTERN_MAPS if isinstance(node.get(key), dict) for text in node[key]]
            deepest = max(deepest, *map(_groups, texts), 0)
    return deepest
