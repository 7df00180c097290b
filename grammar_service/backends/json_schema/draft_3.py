"""Writes the keywords of draft 3 as newer drafts have them.

    extends                              allOf
    disallow                             not
    divisibleBy                          multipleOf
    a schema in type, and the type any   anyOf, and no type
    required: true of a property         its name in the parent's `required`
    a name in dependencies               a list of it
    format ip-address, host-name         ipv4, hostname

Invariant: the schema written means what draft 3 (draft-zyp-json-schema-03, section 5) says of the one read. It is
stricter in one case: a `required` next to a `$ref` counts. A schema of another draft stays as it is; there these words
are no keywords.
Not responsible for: keywords that several drafts share, exclusive bounds among them (see the libraries' backends).
"""

from __future__ import annotations

from typing import Any

from grammar_service.backends.json_schema.walk import Schema, resolve, subschemas
from grammar_service.errors import InvalidGrammar

_DRAFT = "json-schema.org/draft-03/"
_FORMATS = {"ip-address": "ipv4", "host-name": "hostname"}
_ANY = "any"
_ALONE = frozenset({"type", "anyOf", "not", "multipleOf"})
"""Keywords whose meaning does not depend on the ones next to them."""


def is_draft_3(node: Any) -> bool:
    """Return whether a schema says that it follows draft 3."""
    dialect = node.get("$schema") if isinstance(node, dict) else None
    return isinstance(dialect, str) and _DRAFT in dialect


def write_draft_3(root: Any, path: str) -> None:
    """Rewrite the document `root`, whose path is `path`, in place if it follows draft 3.

    To be called before `write_pointers`. Raises InvalidGrammar for a keyword with a value of another type.
    """
    if not is_draft_3(root):
        return
    nodes = []
    for where, node in subschemas(root, path):
        _write_keywords(node, where)  # before the walk goes on to what is inside them
        nodes.append(node)
    names = [_required(node, root) for node in nodes]
    for node, required in zip(nodes, names, strict=True):
        before = node.get("required")
        if isinstance(before, bool):
            del node["required"]
        if required:
            others = before if isinstance(before, list) else []
            node["required"] = [*others, *(name for name in required if name not in others)]


def _write_keywords(node: Schema, where: str) -> None:
    for key, meant in (("extends", _write_extends), ("disallow", _write_disallow), ("divisibleBy", _write_divisor)):
        if key in node:
            meant(node, node.pop(key), f"{where}/{key}")
    _write_type(node)
    dependencies = node.get("dependencies")
    if isinstance(dependencies, dict):
        node["dependencies"] = {name: [each] if isinstance(each, str) else each for name, each in dependencies.items()}
    name = node.get("format")
    if isinstance(name, str):
        node["format"] = _FORMATS.get(name, name)


def _write_extends(node: Schema, value: Any, place: str) -> None:
    schemas = value if isinstance(value, list) else [value]
    if not all(isinstance(each, dict) for each in schemas):
        raise InvalidGrammar(f"JSON Schema: {place}: must be a schema or an array of schemas")
    for each in schemas:
        _require(node, each)


def _write_disallow(node: Schema, value: Any, place: str) -> None:
    kinds = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | dict) for each in kinds):
        raise InvalidGrammar(f"JSON Schema: {place}: must be a type or an array of types and schemas")
    if kinds:
        _require(node, {"not": _of_types(kinds) or {}})


def _write_divisor(node: Schema, value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InvalidGrammar(f"JSON Schema: {place}: must be a number above 0")
    _require(node, {"multipleOf": value})


def _write_type(node: Schema) -> None:
    value = node.get("type")
    kinds = value if isinstance(value, list) else [value]
    if _ANY not in kinds and not any(isinstance(each, dict) for each in kinds):
        return
    del node["type"]
    wanted = _of_types(kinds)
    if wanted is not None:
        _require(node, wanted)


def _of_types(kinds: list[Any]) -> Schema | None:
    """Return a schema of the values that have one of the types, names or schemas; None for all values."""
    if _ANY in kinds:
        return None
    names = [each for each in kinds if not isinstance(each, dict)]
    branches = [each for each in kinds if isinstance(each, dict)]
    if names:
        branches.insert(0, {"type": names[0] if len(names) == 1 else names})
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def _require(node: Schema, other: Schema) -> None:
    """Make a schema also hold for the values of `node`: as its own keyword if it has one, else in its `allOf`."""
    if other.keys() <= _ALONE and node.keys().isdisjoint(other):
        node.update(other)
        return
    parts = node.setdefault("allOf", [])
    if isinstance(parts, list):
        parts.append(other)


def _required(node: Schema, root: Schema) -> list[str]:
    """Return the names of the properties that say of themselves that they are required."""
    properties = node.get("properties")
    if not isinstance(properties, dict):
        return []
    return [name for name, child in properties.items() if _is_required(child, root)]


def _is_required(schema: Any, root: Schema) -> bool:
    """Return whether a schema, what it refers to, or what it extends, says that it is required."""
    waiting, seen = [schema], set[int]()
    for node in waiting:
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        if node.get("required") is True:
            return True
        parts, reference = node.get("allOf"), node.get("$ref")
        waiting += parts if isinstance(parts, list) else []
        place = resolve(root, reference) if isinstance(reference, str) else None
        waiting += [] if place is None else [place[1]]
    return False
