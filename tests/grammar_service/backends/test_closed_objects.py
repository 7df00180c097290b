"""Which objects of a schema are closed, and which grammars have their schemas closed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammar_service.backends.json_schema.closed_objects import close, with_closed_objects
from grammar_service.grammar.value import Kind, Whitespace, parse

SHUT = {"additionalProperties": False}
A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


CLOSED: list[tuple[str, Any, Any]] = [
    ("plain", A, A | SHUT),
    ("within", {"properties": {"a": A}, "items": B}, {"properties": {"a": A | SHUT}, "items": B | SHUT, **SHUT}),
    ("a choice", {"anyOf": [A, {"oneOf": [B]}]}, {"anyOf": [A | SHUT, {"oneOf": [B | SHUT]}]}),
    ("a reference", {**ref("n"), "$defs": {"n": A}}, {**ref("n"), "$defs": {"n": A | SHUT}}),
    (
        "a circle",
        {"properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, **SHUT},
    ),
    ("allOf of one", {"properties": {"a": {"allOf": [B]}}}, {"properties": {"a": {"allOf": [B | SHUT]}}, **SHUT}),
    (
        "a condition on listed names",
        A | {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["a"]}},
        A | {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["a"]}} | SHUT,
    ),
]
OPEN: list[tuple[str, Any]] = [
    ("without properties", {"type": "object"}),
    ("said", A | {"additionalProperties": True}),
    ("said by patterns", A | {"patternProperties": {"^b": {}}}),
    ("a requirement that is not listed", A | {"required": ["b"]}),
    ("more members than are listed", A | {"minProperties": 2}),
    ("allOf", {"allOf": [A, B]}),
    ("allOf and its own", A | {"allOf": [B]}),
    ("a branch next to a requirement", {"anyOf": [A, B], "required": ["c"]}),
    ("then", A | {"if": {"required": ["a"]}, "then": B}),
    ("a reference with properties next to it", A | ref("n") | {"$defs": {"n": B}}),
    ("the same member twice", {"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]}),
    ("not", {"not": A}),
    ("an item that is counted", {"contains": A}),
    ("draft 3", A | {"extends": B}),
    ("data", {"const": A}),
]


@pytest.mark.parametrize(("schema", "wanted"), [row[1:] for row in CLOSED], ids=[row[0] for row in CLOSED])
def test_an_object_is_closed_where_nothing_is_lost(schema: Any, wanted: Any) -> None:
    made = json.loads(json.dumps(schema))
    close(made)
    assert made == wanted


@pytest.mark.parametrize("schema", [row[1] for row in OPEN], ids=[row[0] for row in OPEN])
def test_an_object_stays_open_where_it_says_so_or_another_schema_names_more(schema: Any) -> None:
    made = json.loads(json.dumps(schema))
    close(made)
    assert made == schema


def tag(at: str | None = None) -> str:
    schema = {"type": "json_schema", "json_schema": A, **({"at": at} if at else {})}
    return json.dumps({"format": {"type": "tag", "begin": "<", "content": schema, "end": ">"}})


class Counted(dict[str, Any]):
    """A schema that counts the times that it is read."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.reads += 1
        return super().get(key, default)


def test_many_references_to_one_schema_read_it_once() -> None:
    count = 300
    named = [Counted(properties={"a": {}}) for _ in range(count)]
    places = {f"p{at}": A | ref("n") for at in range(count)}
    schema = {"$defs": {"n": {"allOf": named}}, "properties": places}
    close(schema)
    assert all(place["additionalProperties"] is False for place in places.values())
    assert Counted.reads < 20 * count


def test_a_long_chain_and_two_circles_of_references_are_followed() -> None:
    chain = {f"d{at}": A | ref(f"d{at + 1}") for at in range(3000)}
    circles = {
        "x": A | {"allOf": [ref("y")]},
        "y": A | {"anyOf": [ref("x"), ref("z")]},
        "z": A | {"anyOf": [ref("z"), ref("y"), B]},
    }
    schema = {"$defs": chain | {"d3000": B} | circles, "properties": {"c": A | ref("d0"), "k": A | ref("x")}}
    close(schema)
    assert schema["additionalProperties"] is False
    assert schema["properties"] == {"c": A | ref("d0"), "k": A | ref("x")}, "b is named at the end of each"
    schema["$defs"]["d3000"] = A
    close(schema)
    assert schema["properties"]["c"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("kind", "source", "unasked", "asked"),
    [
        (Kind.JSON_SCHEMA, json.dumps(A), False, True),
        (Kind.STRUCTURAL_TAG, tag(), False, True),
        (Kind.STRUCTURAL_TAG, tag("tools.tools[0].parameters"), False, True),
        (Kind.STRUCTURAL_TAG, json.dumps({"structures": [{"schema": A}], "triggers": ["<"]}), False, True),
        (Kind.COMPOSED, tag("grammar"), False, True),
        (Kind.COMPOSED, tag("tools.tools[0].parameters"), True, True),
        (Kind.LARK, f'start: "a" %json {json.dumps(A)}', False, True),
        (
            Kind.COMPOSED,
            json.dumps({"format": {"type": "lark", "grammar": "start: %json " + json.dumps(A)}}),
            False,
            True,
        ),
    ],
)
def test_the_request_decides_and_the_server_for_all_but_tools(
    kind: Kind, source: str, unasked: bool, asked: bool
) -> None:
    grammar = parse(kind, source, Whitespace.COMPACT)

    def is_closed(request: bool | None, default: bool) -> bool:
        return "additionalProperties" in with_closed_objects(grammar, request, default).text

    assert (is_closed(None, False), is_closed(True, False)) == (unasked, asked)
    assert is_closed(None, True)
    assert not is_closed(False, True)
