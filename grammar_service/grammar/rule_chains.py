"""How long the chains of rules and references of a grammar are: a library walks them by recursion.

Invariant: linear in the text, without recursion, and never an error of its own. The length is that of the deepest path
of one depth-first walk from the start, in the order of the text; a cycle ends a path. Not here: brackets
(`nesting.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from grammar_service.errors import LimitExceeded
from grammar_service.grammar.value import Kind

_QUIET = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?![/*\s])(?:[^/\\\n]|\\.)*+/?|//[^\n]*|#[^\n]*')
_RULES = {
    Kind.EBNF: re.compile(r"([A-Za-z_][\w-]*)\s*::="),
    Kind.LARK: re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE),
}
_STARTS = {Kind.EBNF: "root", Kind.LARK: "start"}
_NAME = re.compile(r"[A-Za-z_][\w-]*")


def check_chains(kind: Kind, source: str, limit: int) -> None:
    """Raise LimitExceeded, naming `max_rule_depth`, when rules or references lead more than `limit` steps on."""
    length = chain_length(kind, source)
    if length > limit:
        raise LimitExceeded(
            f"max_rule_depth: rules or references of the grammar form a chain of {length}, the limit is {limit}"
        )


def chain_length(kind: Kind, source: str) -> int:
    """Return the steps of the deepest path: a grammar of one rule, or without references, has none."""
    if kind in _RULES:
        return _deepest(_STARTS[kind], _rule_edges(kind, source))
    if "$ref" not in source or kind not in (Kind.JSON_SCHEMA, Kind.STRUCTURAL_TAG):
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
    loud = _QUIET.sub('""', source)
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
    return [node["json_schema"] for node in _nodes(document) if "json_schema" in node] + [
        node["schema"] for node in _nodes(document) if isinstance(node.get("schema"), dict)
    ]


def _reference_edges(root: Any) -> Callable[[str], Iterable[str]]:
    # A definition that stands inside another is walked on its own, and would make a large schema quadratic here.
    own: dict[str, list[str]] = {}

    def edges(pointer: str) -> Iterable[str]:
        if pointer not in own:
            target = _resolve(root, pointer)
            own[pointer] = [] if target is None else [*_references(target, skip_definitions=pointer == "")]
        return own[pointer]

    return edges


def _references(node: Any, *, skip_definitions: bool) -> Iterable[str]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(reversed(node))
        elif isinstance(node, dict):
            if isinstance(node.get("$ref"), str) and node["$ref"].startswith("#"):
                yield node["$ref"][1:]
            names = [name for name in node if not (skip_definitions and name in ("$defs", "definitions"))]
            waiting.extend(node[name] for name in reversed(names))


def _resolve(root: Any, pointer: str) -> Any:
    node = root
    for part in pointer.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _nodes(document: Any) -> Iterable[dict[str, Any]]:
    waiting = [document]
    for node in waiting:
        if isinstance(node, dict):
            yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
