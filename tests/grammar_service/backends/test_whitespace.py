"""The white space policy of a request has the same bounds in every JSON kind and in both backends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammar_service.grammar.value import Kind, Whitespace
from tests.grammar_service.conftest import Library

SPACES = " \n\t  \r  " * 5
"""All four characters, longer than any bound."""

LONGEST = [(Whitespace.COMPACT, 0), (Whitespace.BOUNDED, 8), (Whitespace.ANY, 40)]

INT: dict[str, Any] = {"type": "integer"}
OBJ: dict[str, Any] = {"type": "object"}
ARR: dict[str, Any] = {"type": "array"}
AB = "{ 'a' : 1 , 'b' : 2 }"

SHAPES: list[tuple[str, Any, str]] = [
    ("properties", {**OBJ, "properties": {"a": INT, "b": INT, "c": INT}, "required": ["a", "b"]}, AB),
    ("optional properties", {**OBJ, "properties": {"x": INT, "a": INT, "y": INT, "b": INT}}, AB),
    ("closed", {**OBJ, "properties": {"a": INT, "b": INT}, "additionalProperties": False}, AB),
    ("additional", {**OBJ, "properties": {"a": INT}}, AB),
    ("free object", OBJ, "{ 'a' : [ 1 , { 'q' : null } , [ ] , { } ] , 'b' : 'x' }"),
    ("additionalProperties", {**OBJ, "additionalProperties": INT}, AB),
    ("patternProperties", {**OBJ, "patternProperties": {"^[ab]$": INT}}, AB),
    ("nested patternProperties", {**ARR, "items": {**OBJ, "patternProperties": {"^[ab]$": INT}}}, f"[ {AB} , {AB} ]"),
    ("propertyNames", {**OBJ, "propertyNames": {"enum": ["a", "b"]}}, AB),
    ("minProperties", {**OBJ, "minProperties": 1}, AB),
    ("maxProperties", {**OBJ, "maxProperties": 2}, AB),
    ("items", {**ARR, "items": INT}, "[ 1 , 2 , 3 ]"),
    ("minItems, maxItems", {**ARR, "items": INT, "minItems": 2, "maxItems": 4}, "[ 1 , 2 , 3 ]"),
    ("prefixItems", {**ARR, "prefixItems": [INT, INT]}, "[ 1 , 2 , 'x' ]"),
    ("free array", ARR, "[ 1 , [ 'x' , true ] , { } ]"),
    ("empty object", {**OBJ, "properties": {}, "additionalProperties": False}, "{ }"),
    ("empty array", {**ARR, "maxItems": 0}, "[ ]"),
    ("anyOf", {"anyOf": [{**ARR, "items": INT}, OBJ]}, AB),
    ("recursion", {**ARR, "items": {"$ref": "#"}}, "[ [ ] , [ [ ] ] ]"),
    ("any value", {}, "[ { 'a' : [ ] } , 1 ]"),
]


def _spaced(spaced: str) -> list[tuple[str, str]]:
    """Return the parts before and after each place where white space is allowed."""
    parts = spaced.replace("'", '"').split(" ")
    return [("".join(parts[:i]), "".join(parts[i:])) for i in range(1, len(parts))]


@pytest.mark.parametrize(("whitespace", "longest"), LONGEST)
@pytest.mark.parametrize(("schema", "text"), [shape[1:] for shape in SHAPES], ids=[shape[0] for shape in SHAPES])
def test_the_bound_holds_everywhere(
    library: Library, whitespace: Whitespace, longest: int, schema: Any, text: str
) -> None:
    if "propertyNames" in schema and library.name == "llguidance":
        pytest.skip("llguidance does not enforce propertyNames")
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(schema), whitespace)
    for before, after in _spaced(text):
        for count in (0, 1, 8, 9, 16, 17):
            assert library.accepts(compiled, before + SPACES[:count] + after) is (count <= longest), (before, count)


@pytest.mark.parametrize(("whitespace", "longest"), LONGEST)
def test_the_bound_holds_inside_structural_tags(library: Library, whitespace: Whitespace, longest: int) -> None:
    schema = {**OBJ, "properties": {"a": INT, "b": {**ARR}}, "additionalProperties": False}
    tag = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag]}
    source = json.dumps({"type": "structural_tag", "format": form})
    compiled = library.compiled(Kind.STRUCTURAL_TAG, source, whitespace)
    for before, after in _spaced("{ 'a' : 1 , 'b' : [ 1 , { } ] }"):
        for count in (0, 1, 8, 9):
            text = f"free {SPACES} text <f=a>{before}{SPACES[:count]}{after}</f>{SPACES}"
            assert library.accepts(compiled, text) is (count <= longest), (before, count)


@pytest.mark.parametrize(("whitespace", "longest"), LONGEST)
def test_the_bound_holds_in_a_json_object(library: Library, whitespace: Whitespace, longest: int) -> None:
    compiled = library.compiled(Kind.JSON_OBJECT, "", whitespace)
    for before, after in _spaced(AB):
        for count in (0, 1, 8, 9):
            assert library.accepts(compiled, before + SPACES[:count] + after) is (count <= longest)


def test_the_bound_holds_for_schemas_inside_lark(library: Library) -> None:
    if library.name == "xgrammar":
        pytest.skip("xgrammar has no Lark")
    compiled = library.compiled(Kind.LARK, 'start: "x" %json {"type": "array"}', Whitespace.COMPACT)
    assert [count for count in (0, 1, 8, 9) if library.accepts(compiled, f"x[1,{SPACES[:count]}2]")] == [0, 1, 8]


def test_white_space_inside_strings_is_not_limited(library: Library) -> None:
    compiled = library.compiled(Kind.JSON_SCHEMA, '{"enum": ["a  b", "whitespace{0, 8}"]}', Whitespace.COMPACT)
    assert library.accepts(compiled, '"a  b"')
    assert library.accepts(compiled, '"whitespace{0, 8}"')
