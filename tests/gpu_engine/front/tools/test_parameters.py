"""Which values a parameter that is written between markers may have, and which schemas are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_engine.api.conversation import Tool
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.front.tools.parameters import Form, Parameter, parameters_of

FIELD = "tools.tools[0].parameters"
CITY = {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}
OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}


def parameters(schema: Any, *, strict: bool = True) -> tuple[Parameter, ...]:
    return parameters_of(Tool("f", source=json.dumps(schema)), FIELD, "\n</parameter>\n", strict=strict)


def parameter(schema: Any, **root: Any) -> Parameter:
    (found,) = parameters({"properties": {"p": schema}, **root})
    return found


@pytest.mark.parametrize(
    ("schema", "form", "texts"),
    [
        ({"type": "string"}, Form.TEXT, {"12": "12", 'a "b"\n': 'a "b"\n', "null": "null"}),
        ({"type": "string", "pattern": "^a", "description": "x"}, Form.TEXT, {"ab": "ab"}),
        ({"type": "integer"}, Form.JSON, {" 12\n": 12}),
        ({"type": "array", "items": {"type": "string"}}, Form.JSON, {'["a"]': ["a"]}),
        ({"enum": ["a", 1, None, 1.5, "true"]}, Form.VALUES, {"a": "a", "1": 1, "null": None, "true": "true"}),
        ({"type": "string", "enum": ["a", 1]}, Form.VALUES, {"a": "a", "1": "1"}),
        ({"enum": ["a", "abc"], "minLength": 2, "x-order": 1, "nullable": True}, Form.VALUES, {"abc": "abc"}),
        ({"type": ["string"], "minLength": 2, "contentEncoding": "x"}, Form.TEXT, {"ab": "ab"}),
        ({"oneOf": [{"type": t} for t in ("string", "number", "integer")]}, Form.TEXT, {"5": "5"}),
        ({"type": "boolean"}, Form.VALUES, {"true": True, "false": False}),
        ({"anyOf": [{"const": "a"}, {"type": "null"}]}, Form.VALUES, {"a": "a", "null": None}),
        ({"type": ["string", "null"], "minLength": 1}, Form.VALUES, {"null": None, "": "", "7": "7"}),
        ({"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, Form.VALUES, {"null": None, "7": "7"}),
        (OPTIONAL_TEXT, Form.EITHER, {"a": "a", "null": None, "true": "true", "NaN": "NaN"}),
        ({"type": ["string", "number"]}, Form.EITHER, {"7": 7, "1.5": 1.5, "7a": "7a", "[1]": "[1]"}),
        ({}, Form.EITHER, {"7": 7, '{"a": [1]}': {"a": [1]}, "a": "a", '{"a"': '{"a"'}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, Form.JSON, {"null": None, "3": 3}),
    ],
)
def test_the_value_of_a_text(schema: Any, form: Form, texts: dict[str, Any]) -> None:
    found = parameter(schema)
    assert found.form is form
    assert {text: json.loads(found.value(text)) for text in texts} == texts


def test_references_are_followed_and_kept() -> None:
    defs = {"city": {"$ref": "#/$defs/place"}, "place": {"enum": ["Oslo"]}, "trip": {"items": {"$ref": "#/$defs/city"}}}
    assert parameter({"$ref": "#/$defs/city"}, **{"$defs": defs}).values == ("Oslo",)
    found = parameter({"type": "array", **defs["trip"]}, **{"$defs": {**defs, "other": {}}})
    assert found.schema == {"type": "array", **defs["trip"], "$defs": {"city": defs["city"], "place": defs["place"]}}
    found = parameter({"type": "array", "items": {"$ref": "#/properties/p"}})
    assert found.schema["items"] == {"$ref": "#/$defs/parameters/properties/p"}
    assert found.schema["$defs"]["parameters"]["properties"]["p"]["items"] == found.schema["items"]
    assert parameter({"allOf": [{"$ref": "#/$defs/place"}], "title": "x"}, **{"$defs": defs}).values == ("Oslo",)


def test_parameters_come_in_the_order_of_the_schema() -> None:
    found = parameters({"properties": {"b": {}, "a": {}, **CITY}, "required": ["a"], "additionalProperties": False})
    assert [(one.name, one.required) for one in found] == [("b", False), ("a", True), ("city", False)]
    assert parameters({}) == ()


DOUBLED = {f"d{i}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(30)} | {"d30": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {"$defs": DOUBLED, "properties": {"p": {"$ref": "#/$defs/d0"}}},
            "/properties/p: the function has too many alternatives",
        ),
        (
            {"$defs": {"e": {"enum": [*range(900)]}}, "properties": {"p": {"anyOf": 9 * [{"$ref": "#/$defs/e"}]}}},
            "/properties/p: the function has too",
        ),
        ({"properties": {"p": {"enum": [""]}}}, "/properties/p: allows no value that has a text"),
        ({"properties": {"p": {"enum": [1e400]}}}, "/properties/p: has a number that is too large"),
        ({"properties": {"p": {"$ref": "#p"}}}, "/properties/p: refers to '#p'"),
        ({"properties": {"p": {"type": [{}]}}}, '/properties/p: has "type"'),
        ({"properties": {}, "required": [[]]}, r": requires \[\]"),
        ({"anyOf": [{"properties": {}}]}, ": has 'anyOf' at its root"),
        ({"properties": {}, "required": ["x"]}, ": requires 'x'"),
        ({"properties": {"a b=c": {}}}, "/properties/a b=c: the model's format cannot write this name"),
        ({"properties": {"p": {"enum": ["x </parameter> y"]}}}, "/properties/p: has a value with '</parameter>'"),
        ({"properties": {"p": {"type": "string", "enum": [1]}}}, "/properties/p: allows no value that has a text"),
        ({"properties": {"p": {"type": "strin"}}}, '/properties/p: has "type": "strin"'),
        ({"properties": {"p": False}}, "/properties/p: must be a JSON Schema that is an object"),
        (
            {"properties": {"p": {"$ref": "#/$defs/x"}}},
            "/properties/p: refers to '#/[$]defs/x', which is not in the schema",
        ),
        ({"properties": {"p": {"$ref": "#/properties/p"}}}, "/properties/p: refers to itself"),
        ({"properties": {"p": {"$ref": "#", "minLength": 1}}}, r"/properties/p: has keywords next to \$ref"),
        (
            {"properties": {"p": {"type": ["string", "object"], "minLength": 1}}},
            "/properties/p: may be a string with a condition",
        ),
        (
            {"properties": {"p": {"oneOf": [{"type": "string"}, {"enum": ["a"]}]}}},
            "/properties/p: may be a string with a cond",
        ),
    ],
)
def test_what_the_text_cannot_say_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^tools\.tools\[0\]\.parameters{problem}"):
        parameters(schema)


def test_a_function_that_is_not_strict_takes_any_text_there() -> None:
    schema = {"not": {}, "properties": {"p": {"type": ["string", "object"], "minLength": 1}}}
    (found,) = parameters(schema, strict=False)
    assert (found.form, json.loads(found.value("{}"))) == (Form.TEXT, "{}")
