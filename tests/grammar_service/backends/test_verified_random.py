"""Verified answers to random schemas with every keyword: each complete one passes two independent validators."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from grammar_service.errors import InvalidGrammar, LimitExceeded
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import Kind, Reading, Whitespace, parse
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import STOPS

NAMES = ("a", "b", "c")
VALUES: tuple[Any, ...] = (1, 2, "x", "yy", None, True, [], {}, [1], 7.5)


def leaf(draw: random.Random) -> Any:
    """Return a schema of one type, or none, with one keyword of scalars."""
    return draw.choice(
        [
            {"type": "string", "maxLength": draw.randrange(1, 4)},
            {"type": "string", "minLength": 1, "maxLength": 3},
            {"type": "string", "pattern": draw.choice(["^[ab]*$", "a", "^x|y$"])},
            {"type": "integer", "minimum": draw.randrange(-3, 3), "maximum": 30},
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
            {"type": "integer", "multipleOf": draw.randrange(2, 5)},
            {"const": draw.choice(VALUES)},
            {"enum": draw.sample(VALUES, 3)},
            {"type": draw.choice(["boolean", "null", ["boolean", "null"]])},
            {"type": "string", "format": draw.choice(["date", "ipv4", "uuid"])},
            {"$ref": "#/$defs/d"},
            {"$ref": "#named"},
        ]
    )


def random_schema(draw: random.Random, depth: int) -> Any:
    """Return a schema of any keywords; of objects and arrays more often than of scalars."""
    if depth == 0:
        return leaf(draw)

    def inner() -> Any:
        return random_schema(draw, depth - 1)

    if draw.random() < 0.5:
        members = {name: inner() for name in NAMES if draw.random() < 0.7}
        schema: dict[str, Any] = {"type": "object", "properties": members, "required": [*members][:1]}
        more: list[dict[str, Any]] = [
            {"additionalProperties": False},
            {"additionalProperties": inner()},
            {"patternProperties": {"^[bz]": inner()}},
            {"propertyNames": {"maxLength": 1}},
            {"minProperties": 2},
            {"maxProperties": 2},
            {"dependentRequired": {"a": ["b"]}},
            {"dependentSchemas": {"b": {"required": ["a"]}}},
            {"dependencies": {"a": ["c"]}},
            {"unevaluatedProperties": False},
        ]
    else:
        schema = {"type": "array", "maxItems": draw.randrange(1, 5)}
        more = [
            {"items": inner()},
            {"items": inner(), "uniqueItems": True},
            {"items": leaf(draw), "contains": leaf(draw)},
            {"prefixItems": [inner()], "items": inner()},
            {"prefixItems": [inner(), inner()], "unevaluatedItems": False},
            {"items": inner(), "minItems": 1},
            {"items": leaf(draw), "contains": leaf(draw), "minContains": 2, "maxContains": 3},
        ]
    for extra in draw.sample(more, draw.randrange(1, 3)):
        schema |= extra
    applied: list[dict[str, Any]] = [
        {},
        {"not": inner()},
        {"anyOf": [inner(), schema.copy()]},
        {"oneOf": [inner(), schema.copy()]},
        {"allOf": [{"not": leaf(draw)}]},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 1}},
        {"if": {"minItems": 2}, "then": {"uniqueItems": True}},
    ]
    return schema | draw.choice(applied)


def answer(library: Library, compiled: Any, draw: random.Random) -> tuple[str, str]:
    """Return (how it ended, text) of an answer of random legal tokens."""
    matcher, texts, text = compiled.matcher(), TokenBytes.of(library.vocabulary).texts, b""
    for _ in range(160):
        row = {token for token in library.legal(matcher) if texts[token].isascii()}
        if not row:
            return "invalid", ""
        stops = sorted(row & set(STOPS))
        ends = sorted(token for token in row if not set(texts[token]).isdisjoint(b'"]}'))
        token = stops[0] if stops else draw.choice(ends if ends and draw.random() < 0.5 else sorted(row))
        assert matcher.accept(token)
        if token in STOPS:
            return "stop", text.decode()
        text += texts[token]
    return "length", ""


def check(library: Library, seed: int, count: int) -> Counter[str]:
    """Check random schemas; return how answers ended, and how schemas were served."""
    draw, seen = random.Random(seed), Counter[str]()
    for _ in range(count):
        schema = random_schema(draw, draw.randrange(1, 3))
        schema |= {"$defs": {"d": leaf(random.Random(1)), "e": {"$anchor": "named", "type": "boolean"}}}
        grammar = parse(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT)
        grammar = replace(grammar, reading=Reading(verify=True))
        try:
            compiled = library.backend.load(grammar, library.backend.compile(grammar))
        except (InvalidGrammar, LimitExceeded):
            seen["refused"] += 1
            continue
        seen["verified" if any(line.startswith("verified: ") for line in compiled.warnings) else "enforced"] += 1
        python = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        rust = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        for _ in range(3):
            ended, text = answer(library, compiled, draw)
            seen[ended] += 1
            if ended == "stop":
                value = json.loads(text)
                assert python.is_valid(value), (json.dumps(schema), text)
                assert rust.is_valid(value), (json.dumps(schema), text)
    return seen


def test_complete_answers_are_valid(library: Library) -> None:
    seen = check(library, 5, 30)
    assert seen["stop"] >= 10, seen
    assert seen["verified"] >= 4, seen


@pytest.mark.slow
def test_complete_answers_to_many_schemas_are_valid(library: Library) -> None:
    seen = check(library, 6, 400)
    assert seen["stop"] >= 100, seen
    assert seen["verified"] >= 50, seen
