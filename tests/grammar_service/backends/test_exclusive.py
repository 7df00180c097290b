"""Proofs that the branches of a oneOf exclude each other:
they are found in usual cases, and hold for all values tried."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from grammar_service.backends.json_schema.exclusive import exclusive

A: dict[str, Any] = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}
B: dict[str, Any] = {"type": "object", "properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]}
ROOT: dict[str, Any] = {"$defs": {"a": A, "s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}

APART: list[list[Any]] = [
    [{"type": "string"}, {"type": "null"}],
    [{"type": "integer"}, {"type": ["string", "boolean"]}, {"type": "array"}],
    [{"const": 1}, {"const": 2}],
    [{"enum": ["a", "b"]}, {"enum": ["c"]}],
    [{"const": "a"}, {"type": "integer"}],
    [{"const": 0.5}, {"type": "integer"}],
    [A, B],
    [{"$ref": "#/$defs/a"}, B],
    [{"$ref": "#/$defs/s"}, {"type": "null"}],
    [{"allOf": [A, {"type": "object"}]}, B],
    [{"anyOf": [A, {"type": "string"}]}, {"anyOf": [B, {"type": "null"}]}],
    [{**A, "properties": {**A["properties"], "x": {}}, "required": ["x"]}, {**B, "additionalProperties": False}],
    [{"type": "string"}, False],
    [{"type": "string"}],
]
TOGETHER: list[list[Any]] = [
    [{"type": "number"}, {"type": "integer"}],
    [{"const": 1}, {"const": 1.0}],
    [{"const": 1}, {"enum": [2, 1]}],
    [{"type": "string"}, {"minimum": 3}],
    [{"type": "string"}, {}],
    [{"type": "string"}, True],
    [{"required": ["k"], "properties": A["properties"]}, {"required": ["k"], "properties": B["properties"]}],
    [{**A, "required": []}, {**B, "required": []}],
    [A, {**A, "additionalProperties": False}],
    [{"required": ["x"]}, {"properties": {"k": {}}, "additionalProperties": False}],
    [{**A, "required": ["x"]}, {**B, "additionalProperties": False, "patternProperties": {"x": {}}, "required": []}],
    [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}],
    [{"$ref": "http://elsewhere/"}, {"type": "object"}],
    [{"type": "object", "not": A}, {"type": "object", "not": B}],
]

VALUES: list[Any] = [None, True, 0, 1, 1.0, 2, 0.5, "a", "b", "c", "d", [], {}, {"k": "a"}, {"k": "b"}, {"x": 1}]
VALUES += [{"k": "a", "x": 1}, {"k": "b", "x": 1}, {"k": 1}, {"y": 1}]


@pytest.mark.parametrize("branches", APART, ids=json.dumps)
def test_a_proof_is_found_and_holds_for_every_value(branches: list[Any]) -> None:
    assert exclusive(branches, ROOT)
    for a, b in itertools.combinations(branches, 2):
        judges = [jsonschema.Draft202012Validator({**ROOT, "allOf": [each]}) for each in (a, b)]
        assert [value for value in VALUES if all(judge.is_valid(value) for judge in judges)] == []


@pytest.mark.parametrize("branches", TOGETHER, ids=json.dumps)
def test_no_proof_is_claimed_for_branches_that_overlap(branches: list[Any]) -> None:
    assert not exclusive(branches, ROOT)
