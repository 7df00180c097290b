"""Cases for the keywords of arrays, applicators, references, and for combinations known to be weak. Data only."""

from __future__ import annotations

from typing import Any

from tools.enforced.case import Case, case
from tools.enforced.keywords import AB, INT, OBJ, STR, A

ARR: dict[str, Any] = {"type": "array"}
INTS: dict[str, Any] = {"type": "array", "items": INT}
DRAFT_3: dict[str, Any] = {"$schema": "http://json-schema.org/draft-03/schema#"}
REQUIRED: dict[str, Any] = {**INT, "required": True}
NEEDS_A: dict[str, Any] = {"required": ["a"]}
NEEDS_B: dict[str, Any] = {"required": ["b"]}

ARRAYS: tuple[Case, ...] = (
    case("items", "", INTS, [[], [1], [1, 2, 3]], [["a"], [1, "a"], 1]),
    case("items", "false", {**ARR, "items": False}, [[]], [[1]]),
    case("items", "without type", {"items": INT}, [[1], "a"], [["a"]]),
    case("prefixItems", "", {**ARR, "prefixItems": [INT, STR]}, [[1, "a"], [1, "a", None], [1], []], [["a"], [1, 2]]),
    case("prefixItems", "with items", {**INTS, "prefixItems": [STR]}, [["a", 1]], [[1], ["a", "b"]]),
    case("prefixItems", "with items false", {**ARR, "prefixItems": [INT], "items": False}, [[1]], [[1, 2], ["a"]]),
    case("prefixItems", "without type", {"prefixItems": [INT]}, [[1], "a"], [["a"]]),
    case("items", "an array, as in draft 7", {**ARR, "items": [INT]}, [[1]], [["a"]]),
    case("minItems", "", {**INTS, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    case("minItems", "without items", {**ARR, "minItems": 1}, [[1], ["a"]], [[]]),
    case("minItems", "without type", {"minItems": 1}, [[1], 1], [[]]),
    case("minItems", "with prefixItems", {**ARR, "prefixItems": [INT, INT], "minItems": 1}, [[1], [1, 2]], [[]]),
    case("maxItems", "", {**INTS, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    case("maxItems", "0", {**ARR, "maxItems": 0}, [[]], [[1]]),
    case("maxItems", "without type", {"maxItems": 1}, [[1], 1], [[1, 2]]),
    case("maxItems", "with prefixItems", {**ARR, "prefixItems": [INT, STR], "maxItems": 1}, [[1], []], [[1, "a"]]),
    case("uniqueItems", "true", {**INTS, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    case("uniqueItems", "false", {**INTS, "uniqueItems": False}, [[1, 1]], [["a"]]),
    case("contains", "", {**ARR, "contains": INT}, [["a", 1]], [["a"], []]),
    case("minContains", "", {**ARR, "contains": INT, "minContains": 2}, [[1, 2]], [[1, "a"]]),
    case("maxContains", "", {**ARR, "contains": INT, "maxContains": 1}, [[1, "a"]], [[1, 2]]),
    case("unevaluatedItems", "false", {**ARR, "prefixItems": [INT], "unevaluatedItems": False}, [[1]], [[1, 2]]),
)

APPLICATORS: tuple[Case, ...] = (
    case("allOf", "one branch", {"allOf": [{**STR, "minLength": 2}]}, ["ab"], ["a", 1]),
    case("allOf", "several branches", {"allOf": [STR, {"minLength": 2}]}, ["ab"], ["a", 1]),
    case("allOf", "beside other keywords", {**STR, "allOf": [{**STR, "minLength": 2}]}, ["ab"], ["a", 1]),
    case("allOf", "objects", {"allOf": [A, {**OBJ, "required": ["b"]}]}, [{"a": 1, "b": 2}], [{"a": "x", "b": 1}, {}]),
    case("allOf", "required beside properties", {**A, "allOf": [NEEDS_A]}, [{"a": 1}], [{}]),
    case("allOf", "closed branches", {"allOf": [{**A, "additionalProperties": False}, AB]}, [{"a": 1}], [{"b": 1}]),
    case("allOf", "two patterns", {"allOf": [{**STR, "pattern": "^a"}, {"pattern": "b$"}]}, ["ab"], ["a", "b", "ba"]),
    case("anyOf", "", {"anyOf": [INT, {**STR, "maxLength": 1}]}, [1, "a"], ["ab", None]),
    case("anyOf", "beside type", {**STR, "anyOf": [{"minLength": 2}, {"const": "a"}]}, ["a", "bb"], ["b", 1]),
    case("anyOf", "beside other keywords", {"anyOf": [STR, INT], "minLength": 2}, ["ab", 1], ["a"]),
    case("anyOf", "required", {**AB, "anyOf": [NEEDS_A, NEEDS_B]}, [{"a": 1}, {"b": 1}], [{}]),
    case("oneOf", "disjoint by type", {"oneOf": [STR, INT]}, ["a", 1], [None, []]),
    case("oneOf", "disjoint by a constant", {"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    case(
        "oneOf",
        "disjoint by a property",
        {"oneOf": [{**OBJ, "properties": {"k": {"const": k}}, "required": ["k"]} for k in ("a", "b")]},
        [{"k": "a"}, {"k": "b"}],
        [{"k": "c"}, {}],
    ),
    case("oneOf", "overlapping", {"oneOf": [STR, {"const": "a"}]}, ["b"], ["a", 1]),
    case("oneOf", "overlapping numbers", {"oneOf": [{**INT, "minimum": 3}, INT]}, [1], [5]),
    case("oneOf", "required", {**AB, "oneOf": [NEEDS_A, NEEDS_B]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    case("not", "", {"not": STR}, [1], ["a"]),
    case("not", "beside type", {**INT, "not": {"const": 1}}, [2], [1]),
    case("not", "of nothing", {**OBJ, "properties": {"a": {"not": {}}}}, [{}, {"b": 1}], [{"a": 1}]),
    case("if", "", {**AB, "if": NEEDS_A, "then": NEEDS_B}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    case("if", "with else", {"if": STR, "then": {"minLength": 2}, "else": INT}, ["ab", 1], ["a", None]),
    case("$ref", "to $defs", {"$ref": "#/$defs/x", "$defs": {"x": INT}}, [1], ["a"]),
    case("$ref", "recursive", {**OBJ, "properties": {"c": {"$ref": "#"}}}, [{"c": {"c": {}}}], [{"c": {"c": 1}}]),
    case("$ref", "beside other keywords", {"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INT}}, [3], [2, "a"]),
    case("$ref", "to an unusual place", {"$ref": "#/x/y", "x": {"y": {**INTS, "maxItems": 1}}}, [[1]], [[1, 2]]),
    case("$ref", "with escapes", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": INT}}, [1], ["a"]),
    case("$ref", "to an $id", {"$ref": "x", "$id": "http://h/", "$defs": {"q": {**INT, "$id": "x"}}}, [1], ["a"]),
    case("$ref", "to another document", {"$ref": "http://h/x.json"}, [], ["a"]),
    case("$anchor", "", {"$ref": "#x", "$defs": {"q": {"$anchor": "x", **INT}}}, [1], ["a"]),
    case("$dynamicRef", "", {"$dynamicRef": "#x", "$defs": {"q": {"$dynamicAnchor": "x", **INT}}}, [1], ["a"]),
    case("definitions", "", {"$ref": "#/definitions/x", "definitions": {"x": INT}}, [1], ["a"]),
    case(
        "title, description, default, examples",
        "",
        {**INT, "title": "t", "default": "x", "examples": ["x"]},
        [1],
        ["x"],
    ),
    case("extends", "in draft 3", {**DRAFT_3, "extends": {**INT, "maximum": 3}}, [3], [4, "a"]),
    case("disallow", "in draft 3", {**DRAFT_3, "type": ["integer", "string"], "disallow": "integer"}, ["a"], [1]),
    case("divisibleBy", "in draft 3", {**DRAFT_3, **INT, "divisibleBy": 3}, [0, 6], [4]),
    case("required", "true, in draft 3", {**DRAFT_3, **OBJ, "properties": {"a": REQUIRED}}, [{"a": 1}], [{}]),
    case("type", "a schema, in draft 3", {**DRAFT_3, "type": ["null", INTS]}, [None, [1]], [1, ["a"]]),
    case("a keyword that does not exist", "", {**INT, "zork": 1}, [1], ["x"]),
)
