"""Schemas of a wheel: which files they are, and what is bundled into them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tools.collect_schemas import documents, evenly, is_schema, lines, main

DRAFT = "http://json-schema.org/draft-07/schema#"
SELF = {"$schema": DRAFT, "type": "object", "properties": {"a": {"type": "integer"}}}
FILES: dict[str, Any] = {
    "p/alone.json": SELF,
    "p/again.json": SELF,
    "p/data.json": {"a": 1},
    "p/instance.json": {"$schema": "http://x.test/schema.json", "a": 1},
    "p/list.json": [1],
    "p/part.json": {"$id": "http://x.test/part", "$schema": DRAFT, "definitions": {"i": {"type": "integer"}}},
    "p/whole.yaml": "type: object\nproperties:\n  a: {$ref: 'http://x.test/part#/definitions/i'}\n",
    "p/beside.json": {"$id": "http://x.test/b", "type": "object", "properties": {"a": {"$ref": "alone.json"}}},
    "p/other.json": {"$id": "http://x.test/o", "type": "object", "properties": {"a": {"$ref": "alone.json#/none"}}},
    "p/lacks.json": {"type": "object", "properties": {"a": {"$ref": "http://x.test/nowhere"}}},
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "p-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content if isinstance(content, str) else json.dumps(content))
    return path


def test_each_schema_comes_once_with_what_it_refers_to(wheel: Path) -> None:
    found = {line["name"]: line for line in lines(wheel, 12, bundle=True)}
    assert {name.removeprefix("p-1.0/p/"): line["group"] for name, line in found.items()} == {
        "again.json": "self-contained",
        "beside.json": "bundled",
        "lacks.json": "not all there",
        "other.json": "not all there",
        "part.json": "self-contained",
        "whole.yaml": "bundled",
    }
    whole = jsonschema.Draft7Validator(found["p-1.0/p/whole.yaml"]["schema"])
    assert whole.is_valid({"a": 1})
    assert not whole.is_valid({"a": "x"})
    beside = jsonschema.Draft7Validator(found["p-1.0/p/beside.json"]["schema"])
    assert beside.is_valid({"a": {"a": 1}})
    assert not beside.is_valid({"a": {"a": "x"}})


def test_without_bundles_a_schema_is_the_file(wheel: Path) -> None:
    found = {line["name"]: line["schema"] for line in lines(wheel, 12, bundle=False)}
    assert found["p-1.0/p/beside.json"] == FILES["p/beside.json"]


def test_data_and_instances_are_no_schemas(wheel: Path) -> None:
    assert [path for path, document in documents(wheel).items() if not is_schema(document)] == [
        "p/data.json",
        "p/instance.json",
    ]


def test_the_count_is_even() -> None:
    assert evenly(list("abcdefgh"), 4) == ["a", "c", "e", "g"]
    assert evenly(["a"], 4) == ["a"]


def test_the_command_writes_a_line_for_each(wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "schemas.jsonl"
    assert main([str(wheel), "--each", "3", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3
    assert all(set(row) == {"name", "group", "schema", "tests"} for row in rows)
