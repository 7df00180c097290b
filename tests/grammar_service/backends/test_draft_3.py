"""Draft 3: each of its own keywords on both backends, and random schemas next to another validator's reading of it."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from grammar_service.backends.json_schema.draft_3 import write_draft_3
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.errors import InvalidGrammar, NotEnforced
from grammar_service.grammar.value import Kind, Whitespace
from tests.grammar_service.conftest import Library

DRAFT_3 = "http://json-schema.org/draft-03/schema#"
INT, TEXT = {"type": "integer"}, {"type": "string"}


def of_draft_3(**schema: Any) -> str:
    return json.dumps({"$schema": DRAFT_3, **schema})


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


BOTH: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (closed(a={**INT, "required": True}, b=INT), ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"b":2}', '{"a":""}']),
    (closed(a={**INT, "required": False}), ["{}", '{"a":1}'], ['{"a":""}']),
    (closed(a=closed(b={**INT, "required": True}) | {"required": True}), ['{"a":{"b":1}}'], ["{}", '{"a":{}}']),
    (
        closed(a={"$ref": "#/definitions/n"}) | {"definitions": {"n": {**INT, "required": True}}},
        ['{"a":1}'],
        ["{}"],
    ),
    (closed(a={"extends": {**INT, "required": True}}), ['{"a":1}'], ["{}", '{"a":""}']),
    (closed(a={**INT, "required": True}, b=INT) | {"required": ["b", "a"]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"b":2}']),
    ({"type": ["null", {"type": "array", "items": INT}]}, ["null", "[]", "[1]"], ["1", '[""]']),
    ({"type": {"enum": [1]}}, ["1"], ["2"]),
    ({"type": "any", "enum": [1, "a"]}, ["1", '"a"'], ["2"]),
    ({"type": ["integer", "any"], "enum": [1, "a"]}, ["1", '"a"'], ["2"]),
    ({**INT, "divisibleBy": 3}, ["0", "12"], ["4"]),
    ({"extends": {**INT, "maximum": 5}}, ["5"], ["6", '"a"']),
    ({**TEXT, "format": "ip-address"}, ['"1.2.3.4"'], ['"1.2.3"']),
]
ONE: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({**INT, "divisibleBy": 3, "multipleOf": 2}, ["12"], ["3", "2"]),
    ({**INT, "extends": {"maximum": 5, "type": "integer"}}, ["5"], ["6", '"a"']),
    ({**INT, "extends": [{**INT, "minimum": 2}], "maximum": 5}, ["2", "5"], ["1", "6"]),
    ({"type": ["integer", "string"], "disallow": "integer"}, ['"a"'], ["1"]),
    (
        {"type": ["integer", "string", "boolean"], "disallow": ["integer", {"enum": ["a", True]}]},
        ['"b"', "false"],
        ["1", '"a"', "true"],
    ),
]
"""Only llguidance enforces what these are written as; xgrammar refuses it by name."""


def check(library: Library, schema: dict[str, Any], accepted: list[str], rejected: list[str]) -> None:
    compiled = library.compiled(Kind.JSON_SCHEMA, of_draft_3(**schema), Whitespace.COMPACT)
    validator = Validator(of_draft_3(**schema))
    assert [validator.is_valid(text.encode()) for text in [*accepted, *rejected]] == [
        *[True] * len(accepted),
        *[False] * len(rejected),
    ]
    assert compiled.warnings == ()
    assert {text: library.accepts(compiled, text) for text in [*accepted, *rejected]} == {
        **dict.fromkeys(accepted, True),
        **dict.fromkeys(rejected, False),
    }


@pytest.mark.parametrize(("schema", "accepted", "rejected"), BOTH)
def test_keywords_have_the_meaning_of_draft_3(
    library: Library, schema: dict[str, Any], accepted: list[str], rejected: list[str]
) -> None:
    check(library, schema, accepted, rejected)


@pytest.mark.parametrize(("schema", "accepted", "rejected"), ONE)
def test_what_one_library_does_not_enforce_it_refuses(
    libraries: Callable[[str], Library], schema: dict[str, Any], accepted: list[str], rejected: list[str]
) -> None:
    check(libraries("llguidance"), schema, accepted, rejected)
    with pytest.raises(NotEnforced):
        libraries("xgrammar").compiled(Kind.JSON_SCHEMA, of_draft_3(**schema))


@pytest.mark.parametrize("kind", [Kind.JSON_SCHEMA, Kind.STRUCTURAL_TAG])
def test_a_word_of_draft_3_is_a_warning_in_another_dialect(library: Library, kind: Kind) -> None:
    schema = {"type": "object", "properties": {"extends": INT, "a": {**INT, "divisibleBy": 2}}}
    if kind is Kind.STRUCTURAL_TAG:
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
        compiled = library.compiled(kind, json.dumps(tag))
    else:
        compiled = library.compiled(kind, json.dumps(schema))
    (line,) = compiled.warnings
    assert "/properties/a/divisibleBy: is a keyword of draft 3" in line


def test_a_boolean_in_required_is_a_warning_in_another_dialect(library: Library) -> None:
    schema = closed(a={**INT, "required": True}, b={**INT, "required": False}, required=INT)
    (line,) = library.compiled(Kind.JSON_SCHEMA, json.dumps(schema)).warnings
    assert line.startswith("/properties/a/required: is not an array of names")


def test_a_schema_of_a_tag_may_follow_draft_3(library: Library) -> None:
    schema = {"$schema": DRAFT_3, **closed(a={"type": "any", "enum": [1], "required": True})}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    compiled = library.compiled(Kind.STRUCTURAL_TAG, json.dumps(tag), Whitespace.COMPACT)
    assert library.accepts(compiled, '{"a":1}')
    assert not library.accepts(compiled, "{}")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"extends": 1}, "/extends: must be a schema or an array of schemas"),
        ({"properties": {"a": {"disallow": [1]}}}, "/properties/a/disallow: must be a type or an array of types"),
        ({"divisibleBy": 0}, "/divisibleBy: must be a number above 0"),
        ({"type": ["text"]}, "/type: 'text' is not a type of JSON Schema"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(
    library: Library, schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(message)):
        library.compiled(Kind.JSON_SCHEMA, of_draft_3(**schema))


def test_draft_3_inside_of_another_dialect_is_refused(library: Library) -> None:
    schema = closed(a={"$schema": DRAFT_3, "type": "integer"})
    with pytest.raises(InvalidGrammar, match=r"/properties/a/\$schema: draft 3 inside another dialect"):
        library.compiled(Kind.JSON_SCHEMA, json.dumps(schema))


def test_another_draft_stays_as_it_is() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "extends": INT, "divisibleBy": 2, "type": "any"}
    before = copy.deepcopy(schema)
    write_draft_3(schema, "")
    assert schema == before


KINDS = ("integer", "string", "boolean", "null", "array", "object")


def random_kinds(draw: random.Random, depth: int) -> Any:
    """Return the value of `type` or `disallow`."""
    kinds: list[Any] = [
        random_schema(draw, depth - 1) if depth and draw.random() < 0.3 else name
        for name in draw.sample(KINDS, draw.randint(1, 3))
    ]
    return kinds[0] if isinstance(kinds[0], str) and len(kinds) == 1 else kinds


def random_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """Return a schema of draft 3. What it extends has no `required`, for which the other validator does not look."""
    names = ("type", "disallow", "extends", "divisibleBy", "properties", "dependencies", "items")
    schema: dict[str, Any] = {}
    for keyword in draw.sample(names[: len(names) if depth else 4], 3):
        match keyword:
            case "type":
                schema[keyword] = random_kinds(draw, depth) if draw.random() < 0.9 else "any"
            case "disallow":
                schema[keyword] = random_kinds(draw, depth)
            case "divisibleBy":
                schema[keyword] = draw.randint(1, 3)
            case "dependencies":
                schema[keyword] = {draw.choice("ab"): draw.choice("abc"), "c": ["a", "b"]}
            case "extends" if depth:
                inner = [random_schema(draw, depth - 1) for _ in range(draw.randint(0, 2))]
                schema[keyword] = inner[0] if len(inner) == 1 and draw.random() < 0.5 else inner
            case "items":
                schema[keyword] = random_schema(draw, depth - 1)
            case "properties":
                schema[keyword] = {
                    name: random_schema(draw, depth - 1) | {"required": draw.random() < 0.5}
                    for name in draw.sample("abc", 2)
                }
                if draw.random() < 0.3:
                    schema["additionalProperties"] = False
    return schema


def values() -> list[Any]:
    plain: list[Any] = [*range(7), "", "a", True, False, None, [], [1], ["a", 2], {}]
    objects = [
        dict(zip(names, some, strict=True))
        for names in ("a", "ab", "abc", "bc")
        for some in (
            [1, 2, 3][: len(names)],
            ["a", 2, None][: len(names)],
            [{}, [], {"a": 1}][: len(names)],
        )
    ]
    return plain + objects + [{"a": {"a": 1, "b": 2}, "b": {"c": 6}}]


def check_random_schemas(seed: int, count: int) -> int:
    """Compare readings of random schemas; return how many schemas told the values apart."""
    draw, told_apart = random.Random(seed), 0
    for _ in range(count):
        schema = {"$schema": DRAFT_3, **random_schema(draw, 2)}
        other = jsonschema.Draft3Validator(schema)
        wanted = [other.is_valid(value) for value in values()]
        text = json.dumps(schema)
        own = Validator(text)
        assert [own.is_valid(json.dumps(value).encode()) for value in values()] == wanted, text
        written = json.loads(text)
        write_draft_3(written, "")
        rust = jsonschema_rs.Draft202012Validator(
            {**written, "$schema": "https://json-schema.org/draft/2020-12/schema"}
        )
        assert [rust.is_valid(value) for value in values()] == wanted, text
        told_apart += 0 < sum(wanted) < len(wanted)
    return told_apart


def test_random_schemas_mean_what_another_validator_reads() -> None:
    assert check_random_schemas(3, 300) > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_random_schemas(seed: int) -> None:
    assert check_random_schemas(100 + seed, 500) > 150
