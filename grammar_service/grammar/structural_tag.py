"""Structural tags as JSON: a tree of formats, such as free text in which a trigger begins a constrained region.

A tag has two notations: a tree in `format`, and the older `structures` with `triggers`. xgrammar reads the tree itself;
for llguidance it becomes Lark (backends/llguidance/tags.py). Formats that are named by tokens are refused everywhere,
and so is a tag with a part that is missing or not known.
Not responsible for: what a backend supports, the schemas inside (see backends/).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from grammar_service.errors import InvalidGrammar

TOKEN_FORMATS = frozenset({"token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"})
"""Types of format that name tokens."""
_TAG_KEYS = frozenset({"type", "begin", "content", "end"})


def modern(document: Any) -> dict[str, Any]:
    """Return the document in the newer notation. Raises InvalidGrammar, also for formats that name tokens."""
    if "structures" in document and "format" not in document:
        structures = document["structures"]
        if not isinstance(structures, list) or not all(isinstance(s, dict) for s in structures):
            raise InvalidGrammar("structural tag: /structures: must be an array of objects")
        tags = [
            {
                "type": "tag",
                "begin": s.get("begin"),
                "content": {"type": "json_schema", "json_schema": s.get("schema")},
                "end": s.get("end", ""),
            }
            for s in structures
        ]
        document = {"format": {"type": "triggered_tags", "triggers": document.get("triggers"), "tags": tags}}
    if not isinstance(document.get("format"), dict):
        raise InvalidGrammar("structural tag: /format: must be an object")
    for path, node in formats(document["format"], "/format"):
        if not isinstance(node.get("type", ""), str):
            raise InvalidGrammar(f"structural tag: {path}/type: must be a string")
        if node.get("type") in TOKEN_FORMATS or any(isinstance(node.get(k), dict) for k in ("begin", "end")):
            raise InvalidGrammar(f"structural tag: {path}: names tokens; a grammar may describe text only")
        if node.get("type") == "tag":
            _check_tag(node, path)
    return {"type": "structural_tag", "format": _with_endless_text(document["format"])}


def _check_tag(node: dict[str, Any], path: str) -> None:
    unknown = node.keys() - _TAG_KEYS
    if unknown:
        name = min(unknown)
        near = difflib.get_close_matches(name, _TAG_KEYS, 1)
        known = f"did you mean {near[0]!r}?" if near else f"a tag has {', '.join(sorted(_TAG_KEYS))}"
        raise InvalidGrammar(f"structural tag: {path}/{name}: is not known; {known}")
    if not isinstance(node.get("begin"), str):
        raise InvalidGrammar(f"structural tag: {path}/begin: must be a string")
    end = node.get("end")
    ends = end if isinstance(end, list) and end else [end]
    if not all(isinstance(one, str) for one in ends):
        raise InvalidGrammar(f"structural tag: {path}/end: must be a string or a non-empty array of strings")
    if not isinstance(node.get("content"), dict):
        raise InvalidGrammar(f"structural tag: {path}/content: must be an object")


def _with_endless_text(form: dict[str, Any]) -> dict[str, Any]:
    """Return the format; a tag whose free text has no end becomes a sequence, which xgrammar takes in its place."""
    if form.get("type") != "tag" or form["content"].get("type") != "any_text" or form["end"] not in ("", [""]):
        return form
    content = form["content"]
    if not form["begin"]:
        return dict(content)
    return {"type": "sequence", "elements": [{"type": "const_string", "value": form["begin"]}, content]}


def formats(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) for every format object at and below `node`, but not inside schemas."""
    waiting = [(path, node)]
    while waiting:
        where, one = waiting.pop()
        if isinstance(one, dict):
            yield where, one
            names = [name for name, child in one.items() if name != "json_schema" and isinstance(child, dict | list)]
            waiting += [(f"{where}/{name}", one[name]) for name in reversed(names)]
        elif isinstance(one, list):
            last = len(one) - 1
            waiting += [(f"{where}/{last - i}", child) for i, child in enumerate(reversed(one))]


def schema_place(node: dict[str, Any], path: str) -> str:
    """Return the name of a format's schema in messages: the request's field in `at`, else its JSON path."""
    at = node.get("at")
    return at if isinstance(at, str) else f"{path}/json_schema"


def schemas(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (place, schema) for every JSON Schema of a structural tag in the newer notation."""
    for path, node in formats(document["format"], "/format"):
        if "json_schema" in node:
            yield schema_place(node, path), node["json_schema"]
