"""The types of a JSON Schema's keywords: one with a value of another type is an error that names its place.

Invariant: after this check the keywords below have values of their types in every schema that a backend compiles, so
the other modules of this room read them without looking again. The schema is not changed.
Not responsible for: whether a value makes sense (the libraries judge that).
"""

from __future__ import annotations

from typing import Any

from grammar_service.backends.json_schema.walk import DEFINITIONS, LISTS, MAPS, ONE, Schema, child_schemas, subschemas
from grammar_service.errors import InvalidGrammar

_NUMBERS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"),
    *("minimum", "maximum", "multipleOf"),
)
_PLACES = frozenset({*ONE, *LISTS, *MAPS, *DEFINITIONS})
_VALUES = frozenset(
    {"type", *_NUMBERS, "exclusiveMinimum", "exclusiveMaximum", "required", "dependentRequired", "dependencies"}
)
_OTHERS = frozenset({"items", "dependencies"})
"""Keywords that may hold lists instead: of schemas, or of names. A dependency may be one name."""


def refuse_no_schema(schema: Any, path: str) -> None:
    """Raise InvalidGrammar unless `schema`, whose path is `path`, is an object."""
    if not isinstance(schema, dict):
        raise InvalidGrammar(f"JSON Schema: {path or '/'}: must be an object or a boolean")


def check_shapes(schema: Any, path: str) -> None:
    """Raise InvalidGrammar, with the place, for a keyword with a value of another type.

    A definition may be anything: one that no reference names has no effect.
    """
    for where, node in subschemas(schema, path):
        _check_values(node, where)
        if _PLACES.isdisjoint(node):
            continue
        for key in LISTS:
            if key in node and key != "items" and not isinstance(node[key], list):
                raise _wrong(f"{where}/{key}", "an array of schemas")
        for key in (*MAPS, *DEFINITIONS):
            if key in node and not isinstance(node[key], dict):
                raise _wrong(f"{where}/{key}", "an object")
        for keys, child in child_schemas(node):
            if not isinstance(child, dict | bool) and not (isinstance(child, list | str) and keys[0] in _OTHERS):
                raise _wrong(f"{where}/{'/'.join(map(str, keys))}", "an object or a boolean")


def _check_values(node: Schema, where: str) -> None:
    if _VALUES.isdisjoint(node):
        return
    types = node.get("type", [])
    if not isinstance(types, str) and not (isinstance(types, list) and all(isinstance(name, str) for name in types)):
        raise _wrong(f"{where}/type", "the name of a type, or an array of names")
    for key in _NUMBERS:
        if key in node and (isinstance(node[key], bool) or not isinstance(node[key], int | float)):
            raise _wrong(f"{where}/{key}", "a number")
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if key in node and not isinstance(node[key], int | float):  # true and false in draft 4
            raise _wrong(f"{where}/{key}", "a number")
    _check_names(node, where)


def _check_names(node: Schema, where: str) -> None:
    """Raise InvalidGrammar for names of properties that are not strings. In draft 3, `required` is a boolean."""
    required, dependent = node.get("required", []), node.get("dependentRequired", {})
    if not _are_names(required) and not isinstance(required, bool):
        raise _wrong(f"{where}/required", "an array of names")
    if not isinstance(dependent, dict) or not all(map(_are_names, dependent.values())):
        raise _wrong(f"{where}/dependentRequired", "an object of arrays of names")
    others = node.get("dependencies")
    for name, each in others.items() if isinstance(others, dict) else ():
        if isinstance(each, list) and not _are_names(each):
            raise _wrong(f"{where}/dependencies/{name}", "a schema, a name, or an array of names")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _wrong(place: str, wanted: str) -> InvalidGrammar:
    return InvalidGrammar(f"JSON Schema: {place}: must be {wanted}")
