"""Proofs that at most one branch of a `oneOf` holds for any value, so that it means the same as `anyOf`.

Both libraries enforce `anyOf`. A proof follows from types, from constants, or from a required property that the other
branch excludes or gives a different value.
Invariant: True is a proof. False means that no proof was found.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from grammar_service.backends.json_schema.walk import Schema, resolve

ALL_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_OF_NAME = {"number": frozenset({"integer", "fraction"})}
_DEPTH = 4
"""Levels of references and properties that a proof follows."""


@dataclass(slots=True)
class Facts:
    """Facts that hold for every value of a schema; they may say less than the schema does."""

    types: frozenset[str] = ALL_TYPES
    values: frozenset[str] | None = None
    """The canonical JSON of all possible values, if the schema lists them."""
    required: set[str] = field(default_factory=set)
    closed: frozenset[str] | None = None
    """The names that an object may have, if no others are allowed."""
    properties: dict[str, list[Any]] = field(default_factory=dict)


def exclusive(branches: list[Any], root: Any) -> bool:
    """Return whether no value satisfies two of `branches`, schemas inside `root`."""
    return all(_apart(a, b, root, _DEPTH) for a, b in itertools.combinations(branches, 2))


def _apart(a: Any, b: Any, root: Any, depth: int) -> bool:
    if a is False or b is False:
        return True
    if depth == 0 or not isinstance(a, dict) or not isinstance(b, dict):
        return False
    for one, other in ((a, b), (b, a)):
        for key in ("anyOf", "oneOf"):
            inner = one.get(key)
            if isinstance(inner, list) and inner and all(_apart(each, other, root, depth - 1) for each in inner):
                return True
    left, right = Facts(), Facts()
    _gather(a, root, left, depth)
    _gather(b, root, right, depth)
    if left.values is not None and right.values is not None and not left.values & right.values:
        return True
    shared = left.types & right.types
    if shared - {"object"}:
        return False
    return not shared or _objects_apart(left, right, root, depth) or _objects_apart(right, left, root, depth)


def _objects_apart(left: Facts, right: Facts, root: Any, depth: int) -> bool:
    if right.closed is not None and left.required - right.closed:
        return True
    return any(
        _apart(mine, yours, root, depth - 1)
        for name in left.required & right.required
        for mine in left.properties.get(name, ())
        for yours in right.properties.get(name, ())
    )


def facts_of(schemas: Iterable[Any], root: Any) -> Facts:
    """Return what holds for every value that satisfies all of `schemas`, which are inside `root`."""
    facts = Facts()
    for schema in schemas:
        if isinstance(schema, dict):
            _gather(schema, root, facts, _DEPTH)
    return facts


def _gather(schema: Schema, root: Any, facts: Facts, depth: int) -> None:
    reference = schema.get("$ref")
    place = resolve(root, reference) if isinstance(reference, str) and depth else None
    for each in (place[1] if place else None, *_listed(schema.get("allOf"))):
        if isinstance(each, dict):
            _gather(each, root, facts, depth - 1 if depth else 0)
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        facts.types &= frozenset().union(*(_OF_NAME.get(n, frozenset({n})) for n in names if isinstance(n, str)))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        listed = frozenset(canonical(value) for value in values)
        facts.values = listed if facts.values is None else facts.values & listed
        facts.types &= frozenset(type_of(value) for value in values)
    facts.required.update(name for name in _listed(schema.get("required")) if isinstance(name, str))
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    for name, child in known.items():
        facts.properties.setdefault(name, []).append(child)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        facts.closed = frozenset(known) if facts.closed is None else facts.closed & frozenset(known)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def canonical(value: Any) -> str:
    """Return a text that is equal for values that are equal in JSON Schema, and different for others."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return the value with 1 for 1.0, because the two are equal in JSON Schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def type_of(value: Any) -> str:
    """Return the type of a value as in `Facts.types`: one of JSON's, with "integer" and "fraction" for numbers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
