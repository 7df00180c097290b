"""Recognises schemas in which nothing has to be rewritten: most parameters of functions, and most small schemas.

A compilation walks a dozen times over each schema, each time for a few keywords. A plain schema has none of them:

    type                                        one of the seven names
    properties, required, additionalProperties  schemas that are plain, names of `properties`, a boolean
    items                                       a schema that is plain
    enum                                        different strings of ASCII, without another type
    title, description, default                 text, and any value

Invariant: every pass over a plain schema would leave it as it is, except for closing its objects.
Not responsible for: the passes (see the other modules here and the backends).
"""

from __future__ import annotations

from typing import Any

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_SIMPLE = frozenset({"type", "title", "description", "default"})
_KEYS = _SIMPLE | {"properties", "required", "additionalProperties", "items", "enum"}


def is_plain(schema: Any) -> bool:
    """Return whether a schema, the root of a document, is plain."""
    waiting = [schema]
    for node in waiting:
        if not isinstance(node, dict) or not node.keys() <= _KEYS:
            return False
        kind = node.get("type", "string")
        if not isinstance(kind, str) or kind not in _TYPES:
            return False
        if node.keys() <= _SIMPLE:
            continue
        properties = node.get("properties", {})
        if not isinstance(properties, dict):
            return False
        waiting += properties.values()
        if "required" in node and not _are_names(node["required"], properties):
            return False
        if not isinstance(node.get("additionalProperties", False), bool):
            return False
        if "items" in node:
            waiting.append(node["items"])
        if "enum" in node and (kind != "string" or not _are_words(node["enum"])):
            return False
    return True


def close_plain(schema: Any) -> None:
    """Close the objects of a plain schema that list their properties, in place (see closed_objects.py)."""
    waiting = [schema]
    for node in waiting:
        properties = node.get("properties")
        if properties is not None:
            node.setdefault("additionalProperties", False)
            waiting += properties.values()
        if "items" in node:
            waiting.append(node["items"])


def _are_names(required: Any, properties: Any) -> bool:
    return (
        isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and len(set(required)) == len(required)
    )


def _are_words(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(value, str) and value.isascii() and value.isprintable() for value in values)
        and len(set(values)) == len(values)
    )
