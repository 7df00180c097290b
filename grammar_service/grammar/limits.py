"""The two limits on a grammar's shape, checked before a library reads it: nesting, and the depth of rules.

The libraries walk a grammar by recursion, so a hostile text could end the process. Nesting counts the brackets of JSON,
the groups of a regular expression (also inside a schema), and the brackets of EBNF and Lark; quoted texts and character
classes do not count. The rule depth is the length of the deepest path of one depth-first walk over rules or `$ref`s,
from the start, in the order of the text; a cycle ends a path.
Invariant: the time is linear in the text, nothing recurses, and a text that is no grammar raises no other error.
Not responsible for: the depth of parsed JSON (see value.py), limits on bytes and time (see compile/).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from grammar_service.errors import LimitExceeded
from grammar_service.grammar.value import TAG_KINDS, Kind

# Each pattern matches the parts of a text in which brackets and names have no meaning.
_JSON_QUIET = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_REGEX_QUIET = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]?", re.DOTALL)
_GBNF_QUIET = re.compile(
    r'"(?:[^"\\\n]|\\.)*+"?|/(?![/*\s])(?:[^/\\\n]|\\.)*+/?|\[\^?(?:[^\]\\\n]|\\.)*+\]?|//[^\n]*|#[^\n]*', re.DOTALL
)
_LARK_QUIET = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?![/*\s])(?:[^/\\\n]|\\.)*+/?|//[^\n]*|#[^\n]*', re.DOTALL)

_BRACKETS = re.compile(r"[()\[\]{}]")
_QUANTIFIERS = re.compile(r"(?:[*+?]|\{\d*,?\d*\})+")
_ONE_QUANTIFIER = re.compile(r"[*+?]|\{")
_TEXT_KEYS = frozenset({"pattern", "grammar"})
"""Keys of a JSON text whose value is a regular expression or a grammar."""
_PATTERN_MAPS = frozenset({"patternProperties"})
"""Keys whose value is an object with a regular expression as each name."""

_RULES = {
    Kind.EBNF: re.compile(r"([A-Za-z_][\w-]*)\s*::="),
    Kind.LARK: re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE),
}
_STARTS = {Kind.EBNF: "root", Kind.LARK: "start"}
_NAME = re.compile(r"[A-Za-z_][\w-]*")


_INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def array_index(name: str, length: int) -> int | None:
    """Return the index that a part of a pointer names in an array of `length` items; None: it names none."""
    if not _INDEX.fullmatch(name):
        return None
    index = int(name)
    return index if index < length else None


def check_nesting(kind: Kind, source: str, limit: int) -> None:
    """Raise LimitExceeded, which names `max_grammar_depth`, if `source` is nested deeper than `limit` levels."""
    depth = nesting(kind, source)
    if depth > limit:
        raise LimitExceeded(f"max_grammar_depth: the grammar is nested {depth} levels deep, the limit is {limit}")


def nesting(kind: Kind, source: str) -> int:
    """Return the number of levels that `source` is nested."""
    match kind:
        case Kind.REGEX:
            return _groups(source)
        case Kind.EBNF:
            return max(_brackets(_GBNF_QUIET.sub(" ", source)), _quantifiers(_GBNF_QUIET.sub('"', source)))
        case Kind.LARK:
            quiet = _LARK_QUIET.sub(" ", source)
            quoted = (found[0] for found in _LARK_QUIET.finditer(source))
            patterns = [text for text in quoted if text.startswith("/") and not text.startswith("//")]
            return max(_brackets(quiet), _quantifiers(_LARK_QUIET.sub('"', source)), *map(_groups, patterns), 0)
        case _:
            return max(_brackets(_JSON_QUIET.sub(" ", source)), _groups_in_json(source))


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
    return max(_brackets(re.sub(r"[\[\]{}]", " ", loud)), _quantifiers(loud))


def _quantifiers(text: str) -> int:
    """Return the most quantifiers in a row: `a?+{2}` nests three of them."""
    return max((len(_ONE_QUANTIFIER.findall(found[0])) for found in _QUANTIFIERS.finditer(text)), default=0)


def _groups_in_json(source: str) -> int:
    """Return the depth of the deepest regular expression or grammar inside a JSON text."""
    if not any(f'"{key}"' in source for key in _TEXT_KEYS | _PATTERN_MAPS):
        return 0
    try:
        nodes: list[Any] = [json.loads(source)]
    except (ValueError, RecursionError):
        return 0
    deepest = 0
    # The list grows while it is read.
    for node in nodes:
        if isinstance(node, list):
            nodes.extend(node)
        elif isinstance(node, dict):
            nodes.extend(node.values())
            texts = [node[key] for key in _TEXT_KEYS if isinstance(node.get(key), str)]
            texts += [text for key in _PATTERN_MAPS if isinstance(node.get(key), dict) for text in node[key]]
            deepest = max(deepest, *map(_groups, texts), 0)
    return deepest


def check_rule_depth(kind: Kind, source: str, limit: int) -> None:
    """Raise LimitExceeded, which names `max_rule_depth`, if rules or references form a chain longer than `limit`."""
    depth = rule_depth(kind, source)
    if depth > limit:
        raise LimitExceeded(
            f"max_rule_depth: rules or references of the grammar form a chain of {depth}, the limit is {limit}"
        )


def rule_depth(kind: Kind, source: str) -> int:
    """Return the number of steps in the deepest path. A grammar of one rule, or without references, has 0."""
    if kind in _RULES:
        return _deepest(_STARTS[kind], _rule_edges(kind, source))
    if "$ref" not in source or kind not in (Kind.JSON_SCHEMA, *TAG_KINDS):
        return 0
    try:
        document = json.loads(source)
    except (ValueError, RecursionError):
        return 0
    return max((_deepest("", _reference_edges(root)) for root in _schemas(kind, document)), default=0)


def _deepest(start: str, edges: Callable[[str], Iterable[str]]) -> int:
    seen = {start}
    path = [iter(edges(start))]
    deepest = 0
    while path:
        for name in path[-1]:
            if name not in seen:
                seen.add(name)
                path.append(iter(edges(name)))
                break
        else:
            path.pop()
        deepest = max(deepest, len(path) - 1)
    return deepest


def _rule_edges(kind: Kind, source: str) -> Callable[[str], Iterable[str]]:
    loud = _LARK_QUIET.sub('""', source)
    found = list(_RULES[kind].finditer(loud))
    ends = [*(rule.start() for rule in found[1:]), len(loud)] if found else []
    bodies = {rule[1]: (rule.end(), end) for rule, end in zip(found, ends, strict=True)}

    def edges(name: str) -> Iterable[str]:
        begin, end = bodies.get(name, (0, 0))
        return (match[0] for match in _NAME.finditer(loud, begin, end) if match[0] in bodies)

    return edges


def _schemas(kind: Kind, document: Any) -> Iterable[Any]:
    if kind is Kind.JSON_SCHEMA:
        return [document]
    return [node["json_schema"] for node in _objects(document) if "json_schema" in node] + [
        node["schema"] for node in _objects(document) if isinstance(node.get("schema"), dict)
    ]


def _reference_edges(root: Any) -> Callable[[str], Iterable[str]]:
    # Definitions inside another definition are walked by themselves;
    # otherwise a large schema would take quadratic time.
    cached: dict[str, list[str]] = {}

    def edges(pointer: str) -> Iterable[str]:
        if pointer not in cached:
            target = _resolve(root, pointer)
            cached[pointer] = [] if target is None else [*_references(target, skip_definitions=pointer == "")]
        return cached[pointer]

    return edges


def _references(node: Any, *, skip_definitions: bool) -> Iterable[str]:
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes.extend(reversed(node))
        elif isinstance(node, dict):
            if isinstance(node.get("$ref"), str) and node["$ref"].startswith("#"):
                yield node["$ref"][1:]
            names = [name for name in node if not (skip_definitions and name in ("$defs", "definitions"))]
            nodes.extend(node[name] for name in reversed(names))


def _resolve(root: Any, pointer: str) -> Any:
    node = root
    for part in pointer.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and (index := array_index(name, len(node))) is not None:
            node = node[index]
        else:
            return None
    return node


def _objects(document: Any) -> Iterable[dict[str, Any]]:
    nodes = [document]
    # The list grows while it is read.
    for node in nodes:
        if isinstance(node, dict):
            yield node
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
