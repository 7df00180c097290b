"""The complement of a JSON Schema as a JSON Schema without `not`, where it has one.

    type, const, enum        the other types, values and intervals; strings by a pattern of all other strings
    required, properties     a property that is absent, or present with another value
    bounds and lengths       the bound on the other side
    allOf, anyOf, oneOf      De Morgan; `oneOf` where its branches exclude each other
    if, then, else, not, $ref, contains, dependentRequired

Invariant: for every value that satisfies the context, the result holds exactly when the schema does not. The context is
schemas that hold next to it, such as the one that contains the `not`; it decides types and values. What has no
complement raises NoComplement. Pure; the results may share parts with the schema.
Not responsible for: where a complement is needed (see alternatives.py).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from grammar_service.backends.json_schema.exclusive import Facts, canonical, exclusive, facts_of, type_of
from grammar_service.backends.json_schema.walk import Schema, resolve

MAX_DEPTH = 12
"""Levels of schemas and references that a complement follows."""
_ANY = r"[\s\S]"
MAX_CHARACTERS = 4096
"""The most characters of all strings whose complement is one pattern."""

ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "$vocabulary", "contentEncoding"),
        *("contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description", "discriminator"),
        *("example", "examples", "externalDocs", "id", "readOnly", "title", "writeOnly", "xml"),
    }
)
"""Keywords without an effect on validity."""

_REVERSED = {
    "minimum": ("number", lambda n: {"exclusiveMaximum": n}),
    "maximum": ("number", lambda n: {"exclusiveMinimum": n}),
    "exclusiveMinimum": ("number", lambda n: {"maximum": n}),
    "exclusiveMaximum": ("number", lambda n: {"minimum": n}),
    "minLength": ("string", lambda n: {"maxLength": n - 1} if n > 0 else None),
    "maxLength": ("string", lambda n: {"minLength": n + 1}),
    "minItems": ("array", lambda n: {"maxItems": n - 1} if n > 0 else None),
    "maxItems": ("array", lambda n: {"minItems": n + 1}),
    "minProperties": ("object", lambda n: {"maxProperties": n - 1} if n > 0 else None),
    "maxProperties": ("object", lambda n: {"minProperties": n + 1}),
}
"""Keyword -> its type, and from its value to the bound on the other side; None: all values of the type satisfy it."""

_PARTS = frozenset({"if", "then", "else", "minContains", "maxContains", "items", "prefixItems", "additionalItems"})
"""Keywords that are read together with another one."""


class NoComplement(Exception):
    """No schema is known that is the complement. The message names the keyword."""


def complement(schema: Any, context: Sequence[Any], root: Any, depth: int = MAX_DEPTH) -> Any:
    """Return the complement of `schema`, a part of `root`, for values that satisfy all of `context`.

    Raises NoComplement.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        raise NoComplement("a schema that is neither an object nor a boolean")
    if depth == 0:
        raise NoComplement("a schema that is nested too deeply")
    return any_of(list(_alternatives(schema, context, root, depth - 1)))


def any_of(schemas: Iterable[Any]) -> Any:
    """Return the union of schemas."""
    kept: dict[str, Any] = {}
    for schema in schemas:
        if schema is True or schema == {}:
            return True
        if schema is not False:
            kept |= {canonical(each): each for each in (schema["anyOf"] if list(schema) == ["anyOf"] else [schema])}
    return False if not kept else next(iter(kept.values())) if len(kept) == 1 else {"anyOf": list(kept.values())}


def all_of(schemas: Iterable[Any]) -> Any:
    """Return the intersection of schemas."""
    # Python's own comparison takes 1 for True.
    kept: dict[str, Any] = {}
    for schema in schemas:
        if schema is False:
            return False
        if schema is not True and schema != {}:
            kept |= {canonical(each): each for each in (schema["allOf"] if list(schema) == ["allOf"] else [schema])}
    return True if not kept else next(iter(kept.values())) if len(kept) == 1 else {"allOf": list(kept.values())}


def absent(name: str) -> Schema:
    """Return a schema of the values without a property `name`; values that are no objects satisfy it."""
    return {"properties": {name: False}}


def type_names(types: Iterable[str]) -> list[str]:
    """Return the names of types of `Facts` for the keyword `type`. Raises NoComplement for numbers but integers."""
    names = set(types)
    if "fraction" in names:
        if "integer" not in names:
            raise NoComplement("type: numbers that are not integers")
        names -= {"integer", "fraction"}
        names.add("number")
    return sorted(names)


def other_strings(values: Iterable[str], longest: int | None = None) -> str:
    """Return a pattern of all strings of 1 to `longest` characters except `values`.

    It means the same in ECMA-262 and in portable notation. Raises NoComplement for too many characters.
    """
    texts = sorted(text for text in set(values) if longest is None or len(text) <= longest)
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise NoComplement(f"enum: more than {MAX_CHARACTERS} characters")
    return f"^{_other_endings(texts, 0, longest)}$"


def _other_endings(texts: list[str], at: int, longest: int | None) -> str:
    """Return a pattern of what may follow the first `at` characters, which all of `texts` share."""
    left = None if longest is None else longest - at
    ends = [text for text in texts if len(text) == at]
    going_on = [text for text in texts if len(text) > at]
    if not going_on:
        return _any(1 if ends else 0, left)
    heads = [(head, list(group)) for head, group in itertools.groupby(going_on, key=lambda text: text[at])]
    rest = _any(0, None if left is None else left - 1)
    ways = [f"[^{''.join(_escaped(head) for head, _ in heads)}]{rest}"]
    ways += [_escaped(head) + _other_endings(group, at + 1, longest) for head, group in heads]
    return f"(?:{'|'.join(ways)}){'' if ends else '?'}"


def _any(least: int, most: int | None) -> str:
    """Return a pattern of any characters; where there must be more than there can be, of nothing."""
    if most is None:
        return f"{_ANY}+" if least else f"{_ANY}*"
    return f"{_ANY}{{{least},{most}}}" if least <= most else r"[^\s\S]"


def _escaped(char: str) -> str:
    return char if char.isalnum() or ord(char) > 0x7F else f"\\x{ord(char):02x}"


def _alternatives(schema: Schema, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    """Yield schemas whose union is the complement of `schema`."""
    facts = facts_of(context, root)
    types = facts.types
    if "type" in schema:
        mine = facts_of([{"type": schema["type"]}], root).types
        if types - mine:
            yield {"type": type_names(types - mine)}
        types &= mine
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS or keyword in ("type", *_PARTS):
            continue
        if keyword in _REVERSED:
            kind, reverse = _REVERSED[keyword]
            yield from _bound(keyword, value, kind, reverse, types)
        elif keyword in ("const", "enum"):
            yield other_values([value] if keyword == "const" else value, types, facts)
        elif keyword in _RULES:
            yield from _RULES[keyword](schema, value, context, root, depth)
        elif keyword in _TYPED_WITHOUT_RULE:
            without_effect = value is False if keyword == "uniqueItems" else value == {}
            if _TYPED_WITHOUT_RULE[keyword] & types and not without_effect:
                raise NoComplement(keyword)
        elif keyword in _UNKNOWN_EFFECT:
            raise NoComplement(keyword)
    yield from _arrays(schema, types)
    if "if" in schema:
        yield from _conditional(schema, context, root, depth)


def _bound(keyword: str, value: Any, kind: str, reverse: Any, types: frozenset[str]) -> Iterator[Any]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoComplement(keyword)
    if kind != "number" and value != int(value):
        raise NoComplement(keyword)
    wanted = types & ({"integer", "fraction"} if kind == "number" else {kind})
    bound = reverse(value if kind == "number" else int(value))
    if wanted and bound is not None:
        yield {"type": kind if kind != "number" or "fraction" in wanted else "integer", **bound}


def other_values(values: Any, types: frozenset[str], facts: Facts) -> Any:
    """Return a schema of the values of `types` that are not among `values`. Raises NoComplement."""
    if not isinstance(values, list):
        raise NoComplement("enum")
    listed = {canonical(value) for value in values}
    if facts.values is not None:
        left = [json.loads(text) for text in sorted(facts.values - listed)]
        return {"enum": left} if left else False
    of_type: dict[str, list[Any]] = {}
    for value in values:
        of_type.setdefault(type_of(value), []).append(value)
    free = types - of_type.keys()
    ways: list[Any] = []
    numbers = [*of_type.get("integer", ()), *of_type.get("fraction", ())]
    if numbers and types & {"integer", "fraction"}:
        free -= {"integer", "fraction"}
        ways += _between(sorted(numbers), integers="fraction" not in types)
    if "boolean" in types and "boolean" in of_type:
        ways += [{"const": flag} for flag in (False, True) if flag not in of_type["boolean"]]
    if "string" in types and "string" in of_type:
        ways.append({"type": "string", "pattern": other_strings(of_type["string"])})
    for name, empty, bound in (("array", [], "minItems"), ("object", {}, "minProperties")):
        if name in types and name in of_type:
            if any(value != empty for value in of_type[name]):
                raise NoComplement(f"enum: the {name}s that are not listed")
            ways.append({"type": name, bound: 1})
    if free:
        ways.append({"type": type_names(free)})
    return any_of(ways)


def _between(numbers: list[Any], *, integers: bool) -> Iterator[Schema]:
    """Yield the open intervals that `numbers`, in order, leave."""
    kind = {"type": "integer" if integers else "number"}
    yield {**kind, "exclusiveMaximum": numbers[0]}
    for low, high in itertools.pairwise(numbers):
        if low < high and not (integers and high - low <= 1 and low == int(low)):
            yield {**kind, "exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {**kind, "exclusiveMinimum": numbers[-1]}


def _required(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    if not isinstance(value, list):
        raise NoComplement("required")
    if "object" not in facts_of(context, root).types:
        return
    yield from ({"type": "object", **absent(name)} for name in value if isinstance(name, str))


def _properties(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    if not isinstance(value, dict):
        raise NoComplement("properties")
    facts = facts_of(context, root)
    if "object" not in facts.types:
        return
    for name, child in value.items():
        other = complement(child, facts.properties.get(name, ()), root, depth)
        if other is not False:
            yield {"type": "object", "properties": {name: other}, "required": [name]}


def _closed(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    facts = facts_of(context, root)
    known = schema.get("properties")
    if value in (True, {}) or "object" not in facts.types:
        return
    if facts.closed is None or not isinstance(known, dict) or facts.closed - known.keys():
        raise NoComplement("additionalProperties")
    # In this context an object has only the names in `properties`.
    yield from ()


def _reference(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    place = resolve(root, value) if isinstance(value, str) else None
    if place is None:
        raise NoComplement("$ref")
    yield complement(place[1], context, root, depth)


def _branches(value: Any, keyword: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise NoComplement(keyword)
    return value


def _any_of_all_of(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    yield from (complement(each, context, root, depth) for each in _branches(value, "allOf"))


def _all_of_any_of(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    yield all_of(complement(each, context, root, depth) for each in _branches(value, "anyOf"))


def _none_of_one_of(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    if not exclusive(_branches(value, "oneOf"), root):
        raise NoComplement("oneOf")
    yield all_of(complement(each, context, root, depth) for each in value)


def _not(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    yield value


def _contains(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    if "array" not in facts_of(context, root).types:
        return
    if schema.get("minContains", 1) != 1 or "maxContains" in schema:
        raise NoComplement("contains")
    yield {"type": "array", "items": complement(value, (), root, depth)}


def _dependent_required(schema: Schema, value: Any, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    if not isinstance(value, dict) or not all(isinstance(names, list) for names in value.values()):
        raise NoComplement("dependentRequired")
    for name, names in value.items():
        yield from ({"type": "object", "required": [name], **absent(other)} for other in names)


def _conditional(schema: Schema, context: Sequence[Any], root: Any, depth: int) -> Iterator[Any]:
    condition, also = schema["if"], [*context, schema["if"]]
    then, otherwise = schema.get("then", True), schema.get("else", True)
    if then is not True:
        yield all_of([condition, complement(then, also, root, depth)])
    if otherwise is not True:
        yield all_of([complement(condition, context, root, depth), complement(otherwise, context, root, depth)])


def _arrays(schema: Schema, types: frozenset[str]) -> Iterator[Any]:
    """Yield nothing: the complement, one item of another kind, needs `contains`."""
    parts = [key for key in ("items", "prefixItems", "additionalItems") if schema.get(key, True) not in (True, {}, [])]
    if parts and "array" in types:
        raise NoComplement(parts[0])
    yield from ()


_RULES = {
    "required": _required,
    "properties": _properties,
    "additionalProperties": _closed,
    "$ref": _reference,
    "allOf": _any_of_all_of,
    "anyOf": _all_of_any_of,
    "oneOf": _none_of_one_of,
    "not": _not,
    "contains": _contains,
    "dependentRequired": _dependent_required,
}
_TYPED_WITHOUT_RULE = {
    "pattern": frozenset({"string"}),
    "format": frozenset({"string"}),
    "multipleOf": frozenset({"integer", "fraction"}),
    "uniqueItems": frozenset({"array"}),
    "unevaluatedItems": frozenset({"array"}),
    "patternProperties": frozenset({"object"}),
    "propertyNames": frozenset({"object"}),
    "unevaluatedProperties": frozenset({"object"}),
    "dependentSchemas": frozenset({"object"}),
    "dependencies": frozenset({"object"}),
}
"""Keyword without a complement -> the types on which it has an effect."""
_UNKNOWN_EFFECT = frozenset({"$dynamicRef", "$recursiveRef", "disallow", "divisibleBy", "extends"})
