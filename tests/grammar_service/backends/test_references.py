"""References of random compound documents, judged by jsonschema-rs, and names of documents in other dialects.

Each leaf of a random document accepts only one number, so the numbers that a property accepts say where its reference
leads. conformance.py has each kind of reference.
"""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import urljoin

import jsonschema_rs
import pytest

from grammar_service.backends.json_schema.references import take_out_dialects, write_pointers
from grammar_service.backends.json_schema.validator import Validator

ROOT = "http://x.test/a/root.json"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
OTHER = "http://x.test/dialect/1"
INT = {"type": "integer"}

NAMES = ("b.json", "../c.json", "/d/e.json", "sub/", "sub/f.json", "http://y.test/g.json", "http://y.test/h/i.json")
NUM_RESOURCES = 4
LEAVES = 3 * NUM_RESOURCES


class Bundle:
    """A random document of resources, each with properties that refer to leaves of any of them."""

    def __init__(self, seed: int, *, old: bool) -> None:
        self._random = random.Random(seed)
        self._old, self._definitions = old, "definitions" if old else "$defs"
        names = self._random.sample(NAMES, NUM_RESOURCES - 1)
        resources = [self._resource(name, 3 * number) for number, name in enumerate((ROOT, *names))]
        self._urls = [ROOT]
        for number, name in enumerate(names, start=1):
            parent = self._random.randrange(number)
            self._urls.append(urljoin(self._urls[parent], name))
            resources[parent][self._definitions][f"resource {number}"] = resources[number]
        for resource, url in zip(resources, self._urls, strict=True):
            resource["properties"] = {name: {"$ref": self._reference(url)} for name in "pqr"}
        to_all = {f"to {number}": {"$ref": url} for number, url in enumerate(self._urls[1:], start=1)}
        resources[0]["properties"] |= to_all
        self.schema = {**({"$schema": DRAFT_7} if old else {}), **resources[0]}

    def _resource(self, name: str, number: int) -> dict[str, Any]:
        """Return a resource with a leaf at a place of each kind, which accept `number` and the two after it."""
        anchor = {"$id": "#n"} if self._old else {"$anchor": "n"}
        listed = {"anyOf": [{"$ref": "#/elsewhere/free"}, {"$ref": f"#/{self._definitions}/leaf"}]}
        return {
            "$id": name,
            "type": "object",
            self._definitions: {"leaf": {"const": number}, "named": {**anchor, "const": number + 1}},
            "elsewhere": {"list": listed, "free": {"const": number + 2}},
        }

    def _reference(self, base: str) -> str:
        """Return a reference to a leaf, in one of the spellings that lead there from a resource with the URL `base`."""
        url = self._random.choice(self._urls)
        path = url.partition(".test")[2]
        spellings = ["", path, f"..{path}", path.removeprefix("/a/"), path.rpartition("/")[2], url]
        leading = [each for each in spellings if urljoin(base, each) == url]
        places = ("/elsewhere/free", "/elsewhere/list", f"/{self._definitions}/leaf", "n")
        return f"{self._random.choice(leading)}#{self._random.choice(places)}"

    def instances(self) -> list[Any]:
        """Return values that tell where each reference leads, one or two levels deep."""
        inner = [{name: number} for name in "pqr" for number in range(LEAVES)]
        return inner + [{f"to {number}": each} for number in range(1, NUM_RESOURCES) for each in inner]


@pytest.mark.parametrize("old", [False, True])
def test_references_of_random_documents_lead_where_the_judge_says(old: bool) -> None:
    for seed in range(60):
        bundle = Bundle(seed, old=old)
        judge = jsonschema_rs.validator_for(bundle.schema, base_uri=ROOT)
        validator = Validator(json.dumps(bundle.schema))
        wanted = [judge.is_valid(each) for each in bundle.instances()]
        # Each of the references leads to one leaf or to two.
        assert 3 * NUM_RESOURCES <= sum(wanted) <= 6 * NUM_RESOURCES
        found = [validator.is_valid(json.dumps(each).encode()) for each in bundle.instances()]
        assert found == wanted, (seed, bundle.schema)


def test_a_property_that_is_called_schema_stays() -> None:
    schema: dict[str, Any] = {"properties": {"$schema": {"const": OTHER}}, "enum": [{"$schema": OTHER}]}
    before = json.dumps(schema)
    assert take_out_dialects(schema, "") == []
    assert json.dumps(schema) == before


def test_another_dialect_that_names_documents_as_draft_4_does() -> None:
    schema: dict[str, Any] = {
        "$schema": OTHER,
        "id": "http://x.test/root",
        "properties": {"a": {"$ref": "http://x.test/int"}},
        "definitions": {"x": {"id": "http://x.test/int", **INT}},
    }
    write_pointers(schema)
    assert schema["properties"] == {"a": {"$ref": "#/definitions/x"}}


def test_a_scheme_that_python_does_not_know_joins_alike() -> None:
    schema: dict[str, Any] = {
        "$id": "asdf://x.test/a/root",
        "properties": {"a": {"$ref": "int#/$defs/i"}, "b": {"$ref": "elsewhere#x"}, "c": {"$ref": "urn:x:y"}},
        "$defs": {"x": {"$id": "asdf://x.test/a/int", "$defs": {"i": INT}}},
    }
    write_pointers(schema)
    assert [each["$ref"] for each in schema["properties"].values()] == [
        "#/$defs/x/$defs/i",
        "asdf://x.test/a/elsewhere#x",
        "urn:x:y",
    ]
