"""Plain schemas, which are compiled without a dozen walks, become what the walks make of them."""

from __future__ import annotations

import json
import random
from typing import Any

from grammar_service.backends.json_schema.closed_objects import with_closed_objects
from grammar_service.backends.json_schema.plain import is_plain
from grammar_service.backends.llguidance.notation import misspelled, notation
from grammar_service.grammar.value import Grammar, Kind, Reading, Whitespace

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string", None)
NOTE = '"$comment": "", '
"""A keyword without meaning, with which no schema is plain."""


def drawn(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return a random schema that is plain."""
    schema: dict[str, Any] = {"type": rng.choice(TYPES)}
    if schema["type"] is None:
        del schema["type"]
    if rng.random() < 0.3:
        schema["description"], schema["default"] = "A text.", rng.choice([1, None, {"$ref": "#"}, ["a"]])
    if depth and rng.random() < 0.7:
        names = rng.sample(["a", "b c", "$ref", "type", "d~/", "enum"], rng.randrange(4))
        schema["properties"] = {name: drawn(rng, depth - 1) for name in names}
        if rng.random() < 0.5:
            schema["required"] = rng.sample(names, rng.randrange(len(names) + 1))
    if rng.random() < 0.3:
        schema["additionalProperties"] = rng.random() < 0.5
    if depth and rng.random() < 0.4:
        schema["items"] = drawn(rng, depth - 1)
    if schema.get("type", "string") == "string" and rng.random() < 0.4:
        schema["enum"] = rng.sample(["a", "b", '"', "\\", ""], rng.randrange(1, 4))
    return schema


def grammar(text: str, reading: Reading) -> Grammar:
    return Grammar(Kind.JSON_SCHEMA, text, Whitespace.BOUNDED, reading)


def test_a_plain_schema_is_what_the_walks_make_of_it() -> None:
    rng = random.Random(7)
    readings = (Reading(), Reading(max_string_length=9, max_array_items=3), Reading(strict_formats=True))
    for _ in range(300):
        schema, reading = drawn(rng, 3), rng.choice(readings)
        assert is_plain(schema), schema
        plain = with_closed_objects(grammar(json.dumps(schema), reading), True, False)
        noted = with_closed_objects(grammar(json.dumps({"$comment": "", **schema}), reading), True, False)
        assert json.loads(noted.text) == {"$comment": "", **json.loads(plain.text)}
        (text, found), (text_noted, found_noted) = notation(plain, lenient=True), notation(noted, lenient=True)
        assert (text, found) == (text_noted.replace(NOTE, ""), found_noted), schema
        assert misspelled(plain) == misspelled(noted) == ()


def test_what_a_walk_may_change_is_not_plain() -> None:
    for schema in (
        *(True, {"typ": "string"}, {"type": ["string"]}, {"type": "strin"}, {"$ref": "#"}, {"enum": [1]}, {"enum": []}),
        *({"enum": ["a", "a"]}, {"enum": ["\u007f"]}, {"enum": ["a"], "type": "integer"}, {"required": ["a"]}),
        *(
            {"properties": {"a": False}},
            {"items": [{}]},
            {"additionalProperties": {}},
            {"properties": {"a": {"if": {}}}},
        ),
        {"properties": {"a": {}}, "required": ["a", "a"]},
        {"properties": None},
    ):
        assert not is_plain(schema), schema


def test_equal_schemas_of_many_functions_are_one_rule() -> None:
    texts: list[dict[str, Any]] = [
        {"type": "json_schema", "json_schema": {"type": "integer"}},
        {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}, "style": "text"},
        {"type": "any_text"},
    ]
    tags = [{"type": "tag", "begin": f"<{i}>", "content": texts[i % 3], "end": "\n"} for i in range(30)]
    source = json.dumps({"format": {"type": "sequence", "elements": tags}})
    text, _ = notation(Grammar(Kind.STRUCTURAL_TAG, source, Whitespace.BOUNDED), lenient=True)
    assert len(text.splitlines()) == len(["start", "integer", "string", "string, lazy", "any", "TEXT"])
