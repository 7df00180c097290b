"""Random schemas of every keyword in three dialects of JSON Schema, with two independent validators for each.

Invariant: equal random states give equal schemas. Each schema is written in its own dialect, which it names unless that
is draft 2020-12, so that every validator reads it alike.
Not responsible for: whether a schema has an instance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import jsonschema_rs

NAMES = ("a", "b", "c")
VALUES: tuple[Any, ...] = (1, 2, "x", "yy", None, True, [], {}, [1], 7.5)
FORMATS = ("date", "time", "ipv4", "ipv6", "uuid", "json-pointer")
"""Formats that both validators know without other packages."""
BASE = "https://lockstep.example/root.json"


@dataclass(frozen=True, slots=True)
class Dialect:
    """A draft, by the keywords in which drafts differ."""

    url: str
    """What `$schema` says; "": nothing."""
    id_keyword: str
    definitions: str
    python: Any
    """The class of `jsonschema`."""
    rust: Any
    """The class of `jsonschema_rs`."""
    is_modern: bool = False
    """Draft 2019-09 and later: `$ref` has siblings, `prefixItems`, `unevaluated...`, `dependent...`, `$anchor`."""
    has_conditions: bool = True
    """Draft 6 and later: `if`, `contains`, `const`, `propertyNames`, numbers in `exclusiveMinimum`."""

    def is_valid(self, schema: Any, value: Any) -> tuple[bool, bool]:
        """Return what both validators say of a value; known formats are asserted."""
        checker = self.python.FORMAT_CHECKER
        return (
            self.python(schema, format_checker=checker).is_valid(value),
            self.rust(schema, validate_formats=True).is_valid(value),
        )


DIALECTS = (
    Dialect("", "$id", "$defs", jsonschema.Draft202012Validator, jsonschema_rs.Draft202012Validator, is_modern=True),
    Dialect(
        "http://json-schema.org/draft-07/schema#",
        "$id",
        "definitions",
        jsonschema.Draft7Validator,
        jsonschema_rs.Draft7Validator,
    ),
    Dialect(
        "http://json-schema.org/draft-04/schema#",
        "id",
        "definitions",
        jsonschema.Draft4Validator,
        jsonschema_rs.Draft4Validator,
        has_conditions=False,
    ),
)
MODERN = DIALECTS[0]


class SchemaDraw:
    """Draws schemas of one dialect."""

    def __init__(self, draw: random.Random, dialect: Dialect = MODERN) -> None:
        self._draw, self._dialect = draw, dialect

    def schema(self) -> dict[str, Any]:
        """Return the root of a document."""
        draw, dialect = self._draw, self._dialect
        schema = self._any(draw.randrange(1, 3))
        nested = {"type": "array", "items": {"$ref": f"#/{dialect.definitions}/nested"}, "maxItems": 2}
        definitions: dict[str, Any] = {
            "d": _first_leaf(random.Random(1), dialect),
            "nested": {"anyOf": [{"type": "null"}, nested]},
            "e": {dialect.id_keyword: "#named", "type": "boolean"},
            "other": {dialect.id_keyword: "other.json", "type": "integer", "minimum": 0, "maximum": 9},
        }
        head: dict[str, Any] = {dialect.id_keyword: BASE}
        if dialect.url:
            head["$schema"] = dialect.url
        if dialect.is_modern:
            definitions["e"] = {"$anchor": "named", "type": "boolean"}
            definitions["node"] = {"$dynamicAnchor": "node", "type": "integer", "minimum": 3, "maximum": 8}
            if draw.random() < 0.2:
                head["definitions"] = {"old": {"enum": ["old", 0]}}
                schema = {"anyOf": [schema, {"$ref": "#/definitions/old"}]}
        return {**head, **schema, dialect.definitions: definitions}

    def _any(self, depth: int) -> dict[str, Any]:
        """Return a schema of any keywords; of objects and arrays more often than of scalars."""
        if depth == 0:
            return self._leaf()
        draw = self._draw
        schema, more = self._object(depth) if draw.random() < 0.5 else self._array(depth)
        for extra in draw.sample(more, draw.randrange(1, 3)):
            schema |= extra()
        applied: list[Callable[[], dict[str, Any]]] = [
            dict,
            lambda: {"not": self._any(depth - 1)},
            lambda: {"anyOf": [self._any(depth - 1), schema.copy()]},
            lambda: {"oneOf": [self._any(depth - 1), schema.copy()]},
            lambda: {"allOf": [{"not": self._leaf()}]},
        ]
        if self._dialect.has_conditions:
            applied += [
                lambda: {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 1}},
                lambda: {"if": {"minItems": 2}, "then": {"uniqueItems": True}},
                lambda: {"if": self._leaf(), "then": self._any(depth - 1), "else": self._any(depth - 1)},
            ]
        return schema | draw.choice(applied)()

    def _leaf(self) -> dict[str, Any]:
        return _first_leaf(self._draw, self._dialect) if self._draw.random() < 0.8 else self._reference()

    def _reference(self) -> dict[str, Any]:
        definitions = self._dialect.definitions
        targets = [f"#/{definitions}/d", f"#/{definitions}/nested", "#named", "other.json", f"{BASE}#/{definitions}/d"]
        reference: dict[str, Any] = {"$ref": self._draw.choice(targets)}
        if self._dialect.is_modern:
            reference = self._draw.choice(
                [reference, {**reference, "not": {"const": self._draw.choice(VALUES)}}, {"$dynamicRef": "#node"}]
            )
        return reference

    def _object(self, depth: int) -> tuple[dict[str, Any], list[Callable[[], dict[str, Any]]]]:
        """Return a schema of objects, and what it may have besides."""
        draw, dialect = self._draw, self._dialect
        members = {name: self._any(depth - 1) for name in NAMES if draw.random() < 0.7}
        schema: dict[str, Any] = {"type": "object", "properties": members}
        if members:
            schema["required"] = [*members][:1]
        more: list[Callable[[], dict[str, Any]]] = [
            lambda: {"additionalProperties": False},
            lambda: {"additionalProperties": self._any(depth - 1)},
            lambda: {"patternProperties": {"^[bz]": self._any(depth - 1)}},
            lambda: {"minProperties": 2},
            lambda: {"maxProperties": 2},
            lambda: {"dependencies": {"a": ["c"]}},
            lambda: {"dependencies": {"c": {"maxProperties": 2}}},
        ]
        if dialect.has_conditions:
            more += [
                lambda: {"propertyNames": {"maxLength": 1}},
                lambda: {"propertyNames": {"anyOf": [{"pattern": "^[ab]"}, {"minLength": 3}]}},
            ]
        if dialect.is_modern:
            del more[5:7]  # draft 2020-12 has other words for them, and its validators pass over these
            more += [
                lambda: {"dependentRequired": {"a": ["b"]}},
                lambda: {"dependentSchemas": {"b": {"required": ["a"]}}},
                lambda: {"unevaluatedProperties": False},
            ]
        return schema, more

    def _array(self, depth: int) -> tuple[dict[str, Any], list[Callable[[], dict[str, Any]]]]:
        """Return a schema of arrays, and what it may have besides."""
        draw, dialect = self._draw, self._dialect
        more: list[Callable[[], dict[str, Any]]] = [
            lambda: {"items": self._any(depth - 1)},
            lambda: {"items": self._any(depth - 1), "uniqueItems": True},
            lambda: {"items": self._any(depth - 1), "minItems": 1},
        ]
        if dialect.has_conditions:
            more.append(lambda: {"items": self._leaf(), "contains": self._leaf()})
        if dialect.is_modern:
            more += [
                lambda: {"prefixItems": [self._any(depth - 1)], "items": self._any(depth - 1)},
                lambda: {"prefixItems": [self._any(depth - 1), self._any(depth - 1)], "unevaluatedItems": False},
                lambda: {"items": self._leaf(), "contains": self._leaf(), "minContains": 2, "maxContains": 3},
            ]
        else:
            more += [
                lambda: {"items": [self._any(depth - 1)], "additionalItems": self._any(depth - 1)},
                lambda: {"items": [self._any(depth - 1), self._any(depth - 1)], "additionalItems": False},
            ]
        return {"type": "array", "maxItems": draw.randrange(1, 5)}, more


def _first_leaf(draw: random.Random, dialect: Dialect) -> dict[str, Any]:
    """Return a schema of one type, or none, with one keyword of scalars."""
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": draw.randrange(1, 4)},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "string", "pattern": draw.choice(["^[ab]*$", "a", "^x|y$", "^(?!x)[xyz]{1,2}$"])},
        {"type": "integer", "minimum": draw.randrange(-3, 3), "maximum": 30},
        {"type": "integer", "multipleOf": draw.randrange(2, 5)},
        {"enum": draw.sample(VALUES, 3)},
        {"type": draw.choice(["boolean", "null", ["boolean", "null"]])},
        {"type": "string", "format": draw.choice(FORMATS)},
    ]
    if dialect.has_conditions:
        leaves += [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 9}, {"const": draw.choice(VALUES)}]
    else:
        bounds: dict[str, Any] = {"minimum": 0, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": True}
        leaves.append({"type": "number", **bounds})
    return draw.choice(leaves)


def keywords(schema: Any) -> Iterator[str]:
    """Yield every name in a schema."""
    waiting = [schema]
    for node in waiting:
        if isinstance(node, dict):
            yield from node
        if isinstance(node, dict | list):
            waiting.extend(node.values() if isinstance(node, dict) else node)
