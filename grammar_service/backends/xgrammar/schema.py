"""The parts of a JSON Schema that xgrammar 0.2.8 does not enforce and does not warn about.

They were found by giving the library each keyword with values that violate it; the tests repeat that.
Invariant: xgrammar accepts, for a schema without problems, only texts that JSON Schema accepts; it may accept fewer.
Not responsible for: parts that the library itself warns about, such as overlapping oneOf branches (see backend.py).
"""

from __future__ import annotations

import json
import math
from typing import Any

from grammar_service.backends.json_schema.draft_3 import write_draft_3
from grammar_service.backends.json_schema.references import take_out_dialects, write_pointers
from grammar_service.backends.json_schema.rewrite import rewrite
from grammar_service.backends.json_schema.shapes import check_shapes, refuse_no_schema
from grammar_service.backends.json_schema.strings.ecma_pattern import Dialect, portable
from grammar_service.backends.json_schema.strings.string_formats import KNOWN, exact_pattern, take_out_annotations
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.json_schema.walk import Schema, subschemas
from grammar_service.grammar.value import Bounds

_IGNORED = {
    "not": "is not enforced",
    "if": "is not enforced, nor are then and else",
    "contains": "is not enforced",
    "dependentRequired": "is not enforced",
    "dependentSchemas": "is not enforced",
    "dependencies": "is not enforced",
    "unevaluatedProperties": "is not enforced; additionalProperties is",
    "unevaluatedItems": "is not enforced; items is",
    "$dynamicRef": "is not followed",
    "$recursiveRef": "is not followed",
}
"""Keywords that never have an effect."""

STRING_DIALECT = Dialect(unwritable=((0, 31), (34, 34), (92, 92)), categories=False)
"""Patterns of JSON strings. The library matches them against the JSON text,
which writes these characters as escapes."""

REGEX_DIALECT = Dialect(categories=False, ignore_case=False)
"""Regular expressions of whole answers."""

_RANGE_DIGITS = 6
"""Digits after the point of a number with a minimum or a maximum."""

_ANYTHING = portable("[^]*", STRING_DIALECT)

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

_OF_TYPE = {
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
    "minLength": "string",
    "maxLength": "string",
    "pattern": "string",
    "format": "string",
    "minItems": "array",
    "maxItems": "array",
    "minProperties": "object",
    "maxProperties": "object",
}
"""Keyword -> the type without which it has no effect."""

_IMPLY_OBJECT = ("properties", "required", "patternProperties", "additionalProperties", "propertyNames")
_IMPLY_ARRAY = ("items", "prefixItems")
"""Keywords from which the library infers a type, so that the schema becomes stricter."""

_ASSERTIONS = frozenset(
    {
        "type",
        "enum",
        "const",
        "$ref",
        "anyOf",
        "oneOf",
        "allOf",
        "uniqueItems",
        *_IGNORED,
        *_OF_TYPE,
        *_IMPLY_OBJECT,
        *_IMPLY_ARRAY,
    }
)


def problems(schema: Any, path: str = "", *, strict_formats: bool = False) -> list[Unenforced]:
    """Return the parts of the schema at `path` that xgrammar would not enforce.
    Rewrites references, patterns and formats in place. `strict_formats`: whether an unknown format is one of them."""
    if isinstance(schema, bool):
        return []
    refuse_no_schema(schema, path)
    write_draft_3(schema, path)
    write_pointers(schema)
    found = take_out_dialects(schema, path)
    check_shapes(schema, path)
    found += take_out_annotations(schema, path, strict=strict_formats)
    found += rewrite(schema, path, _anchored)
    for where, node in subschemas(schema, path):
        problem = _problem(node)
        if problem:
            found.append(Unenforced(where, *problem))
        found += _write_exact_format(node, where)
    return found


def _write_exact_format(node: Schema, where: str) -> list[Unenforced]:
    """Replace a known format with an exact pattern: the library's own check is too lenient, or missing.

    The new pattern overwrites a pattern of the node, which `_strings` has already reported. Limits of length are
    dropped, and returned as not enforced.
    """
    types = node["type"] if isinstance(node.get("type"), list) else [node.get("type")]
    name = node.get("format")
    if not isinstance(name, str) or name not in KNOWN or "string" not in types:
        return []
    node["pattern"] = portable(exact_pattern(name, lower_case=False), STRING_DIALECT)
    del node["format"]
    lost = [keyword for keyword in ("minLength", "maxLength") if node.pop(keyword, None) is not None]
    return [Unenforced(where, keyword, "is not enforced next to format") for keyword in lost]


def own_bounds(schema: Any, bounds: Bounds) -> list[Unenforced]:
    """Write the bounds into the keywords of each node, in place; values without keywords are bounded by the rules.

    Return what of the bounds is not enforced. To be called after `problems`.
    """
    found: list[Unenforced] = []
    for where, node in subschemas(schema):
        types = node["type"] if isinstance(node.get("type"), list) else [node.get("type")]
        if bounds.max_string_length and "pattern" in node:
            found.append(Unenforced(where, "pattern", "is not bounded by max_string_length"))
        if bounds.max_string_length and not {"minLength", "maxLength"}.isdisjoint(node):
            node["maxLength"] = min(node.get("maxLength", math.inf), bounds.max_string_length)
        is_array = "array" in types or (types == [None] and not set(_IMPLY_ARRAY).isdisjoint(node))
        if bounds.max_array_items and is_array:
            node["maxItems"] = min(node.get("maxItems", math.inf), bounds.max_array_items)
        if bounds.max_number_digits and not {"number", "integer"}.isdisjoint(types):
            found += _bounded_number(node, where, bounds.max_number_digits, whole="number" not in types)
    return found


def _bounded_number(node: Schema, where: str, digits: int, *, whole: bool) -> list[Unenforced]:
    if "multipleOf" in node:
        return [Unenforced(where, "multipleOf", "is not bounded by max_number_digits")]
    own = [key for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum") if key in node]
    if not own:
        return []
    if not whole and digits < _RANGE_DIGITS:
        why = f"has numbers with {_RANGE_DIGITS} digits after the point, which max_number_digits does not bound"
        return [Unenforced(where, own[0], why)]
    largest = 10**digits - 1
    for plain, strict, sign in (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1)):
        values = [sign * node[key] for key in (plain, strict) if key in node]
        if not values or min(values) > largest:
            node.pop(strict, None)
            node[plain] = sign * largest
    return []


def _anchored(pattern: str) -> str:
    """Return the pattern in portable notation as a pattern of the whole string, as which the library reads it."""
    text = portable(pattern, STRING_DIALECT)
    flag = text[:4] if text.startswith("(?i)") else ""
    body = text.removeprefix(flag)
    if "|" in body or body.strip("^$") == "":
        return text
    head = "" if body.startswith("^") else f"^{_ANYTHING}"
    tail = "" if body.endswith("$") else f"{_ANYTHING}$"
    return flag + head + body + tail


def tag_problems(form: Schema, path: str) -> list[Unenforced]:
    """Return the parts of a structural tag's JSON region at `path` that are not fully enforced."""
    found = []
    if form.get("any_order"):
        found.append(Unenforced(path, "any_order", "is enforced without required and repeated names"))
    if form.get("style", "json") != "json":
        found.append(Unenforced(path, "style", "is checked only for 'json'"))
    return found


def _problem(node: dict[str, Any]) -> tuple[str, str] | None:
    for keyword, reason in _IGNORED.items():
        if keyword in node:
            return keyword, reason
    if node.get("uniqueItems"):
        return "uniqueItems", "is not enforced"
    for keyword in _COUNTS:
        value = node.get(keyword)
        if isinstance(value, int | float) and value < 0:
            return keyword, f"is {value}, which is read as no bound"
    for rule in (_replacing, _values, _typed, _strings, _objects):
        problem = rule(node)
        if problem:
            return problem
    return None


def _replacing(node: dict[str, Any]) -> tuple[str, str] | None:
    """Find keywords that the library reads instead of the rest of the schema."""
    for keyword in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf"):
        if keyword not in node:
            continue
        others = sorted((_ASSERTIONS & node.keys()) - {keyword})
        if keyword in ("const", "enum"):
            others = [other for other in others if other != "type"]
        if keyword in ("anyOf", "oneOf") and others == ["type"]:
            branches = node[keyword]
            same = isinstance(branches, list) and all(
                isinstance(b, dict) and b.get("type") == node["type"] for b in branches
            )
            others = [] if same else others
        if others:
            return others[0], f"is not enforced next to {keyword}"
        return None
    return None


def _values(node: dict[str, Any]) -> tuple[str, str] | None:
    """Find values of enum and const that `type` excludes; the library accepts them."""
    if "type" not in node:
        return None
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    for keyword in ("enum", "const"):
        values = node.get(keyword, []) if keyword == "enum" else [node[keyword]] if keyword in node else []
        for value in values if isinstance(values, list) else ():
            if not any(_has_type(value, name) for name in types):
                return "type", f"is not enforced on the values of {keyword}, and {value!r} is of another type"
    return None


def _has_type(value: Any, name: Any) -> bool:
    if name in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (whole if name == "integer" else isinstance(value, int | float))
    kinds = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    return isinstance(name, str) and name in kinds and isinstance(value, kinds[name])


def _typed(node: dict[str, Any]) -> tuple[str, str] | None:
    """Find bounds without a type and empty lists of types; the library ignores both."""
    if "type" in node:
        return ("type", "is an empty list, which is not enforced") if node["type"] == [] else None
    implied = {"array" for k in _IMPLY_ARRAY if k in node} | {"object" for k in _IMPLY_OBJECT if k in node}
    if len(implied) > 1:
        return "type", "is missing next to keywords for arrays and for objects"
    for keyword, kind in _OF_TYPE.items():
        if keyword in node and kind not in implied:
            return keyword, 'is not enforced without "type"'
    return None


def _strings(node: dict[str, Any]) -> tuple[str, str] | None:
    types = node["type"] if isinstance(node.get("type"), list) else [node.get("type")]
    # A format applies to strings. On a number, as in `"format": "float"` of OpenAPI, it has no effect.
    if "format" in node and (types == [None] or "string" in types):
        if not isinstance(node["format"], str) or node["format"] not in KNOWN:
            return "format", f"{node['format']!r} is not enforced"
        if "pattern" in node:
            return "pattern", "is not enforced next to format"
    return None


def _objects(node: dict[str, Any]) -> tuple[str, str] | None:
    properties = node.get("properties")
    known = properties if isinstance(properties, dict) else {}
    if "type" not in node:
        for keyword in ("patternProperties", "propertyNames"):
            if keyword in node:
                return keyword, 'is not enforced without "type"'
    plain = all(json.dumps(name) == f'"{name}"' for name in known)
    if not plain and node.get("additionalProperties") is not False:
        return "properties", "has a name beyond plain ASCII, which is not told apart from additional ones"
    for i, name in enumerate(node["required"] if isinstance(node.get("required"), list) else ()):
        if not isinstance(name, str) or name not in known:
            return f"required/{i}", f"{name!r} is not enforced, since it is not in properties"
    for keyword in ("patternProperties", "propertyNames"):
        if keyword in node and known:
            return keyword, "is not enforced next to properties"
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > 1:
        return "patternProperties", "is not enforced on a name that several of its patterns match"
    if "additionalProperties" in node and "propertyNames" in node:
        return "additionalProperties", "is not enforced next to propertyNames"
    if "patternProperties" in node and "propertyNames" in node:
        return "propertyNames", "is not enforced next to patternProperties"
    return None
