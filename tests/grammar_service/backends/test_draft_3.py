"""Random schemas of draft 3 mean what another validator reads (conformance.py has each keyword)."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from grammar_service.backends.json_schema.draft_3 import write_draft_3
from grammar_service.backends.json_schema.validator import Validator

DRAFT_3 = "http://json-schema.org/draft-03/schema#"
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
        for some in ([1, 2, 3][: len(names)], ["a", 2, None][: len(names)], [{}, [], {"a": 1}][: len(names)])
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
    assert check_random_schemas(3, 150) > 50


@pytest.mark.slow
def test_many_random_schemas() -> None:
    assert check_random_schemas(100, 700) > 200
