"""The walk over a schema, the rewriting of its keywords, and the reports of parts that have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from grammar_service.backends.json_schema.misspelled import MAX_NAMED as MOST_MISSPELLED
from grammar_service.backends.json_schema.misspelled import misspelled_keywords
from grammar_service.backends.json_schema.rewrite import rewrite
from grammar_service.backends.json_schema.unenforced import MAX_NAMED, Unenforced, pack, settle, unpack
from grammar_service.backends.json_schema.walk import subschemas
from grammar_service.errors import InvalidGrammar, NotEnforced

LEAF: dict[str, Any] = {"type": "string"}


def _paths(schema: Any) -> list[str]:
    return [path for path, _ in subschemas(schema)]


def test_the_walk_reaches_every_place_of_a_schema() -> None:
    one = ("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else")
    one += ("unevaluatedItems", "unevaluatedProperties")
    schema: dict[str, Any] = {key: dict(LEAF) for key in one}
    schema |= {key: [dict(LEAF), True] for key in ("anyOf", "oneOf", "allOf", "prefixItems")}
    schema |= {key: {"n": dict(LEAF)} for key in ("properties", "patternProperties", "dependentSchemas")}
    wanted = {"", *(f"/{key}" for key in one)}
    wanted |= {f"/{key}/0" for key in ("anyOf", "oneOf", "allOf", "prefixItems")}
    wanted |= {f"/{key}/n" for key in ("properties", "patternProperties", "dependentSchemas")}
    assert set(_paths(schema)) == wanted


def test_the_order_of_the_walk_is_that_of_the_keywords_and_not_of_the_schema() -> None:
    schema: dict[str, Any] = {
        "properties": {"n": dict(LEAF)},
        "items": [dict(LEAF), dict(LEAF)],
        "anyOf": [dict(LEAF)],
        "not": dict(LEAF),
        "prefixItems": [dict(LEAF)],
    }
    wanted = ["", "/not", "/anyOf/0", "/prefixItems/0", "/items/0", "/items/1", "/properties/n"]
    assert _paths(schema) == wanted
    assert _paths(dict(reversed(schema.items()))) == wanted
    assert _paths({"properties": {"n": {}}, "anyOf": [{}], "items": {}}) == ["", "/items", "/anyOf/0", "/properties/n"]


def test_data_is_a_schema_only_if_a_reference_points_to_it() -> None:
    data = {"const": {"not": {}}, "enum": [{"not": {}}], "default": {"not": {}}, "x": {"y": dict(LEAF)}}
    assert _paths(data) == [""]
    assert _paths({**data, "$ref": "#/x/y"}) == ["", "/x/y"]


@pytest.mark.parametrize(
    ("reference", "path"), [("#/$defs/a~1b%25", "/$defs/a~1b%25"), ("#here", "/$defs/n"), ("#/anyOf/0", "/anyOf/0")]
)
def test_references_are_followed(reference: str, path: str) -> None:
    schema = {"$defs": {"a/b%": dict(LEAF), "n": {"$anchor": "here"}}, "anyOf": [dict(LEAF)], "$ref": reference}
    assert path in _paths(schema)


def test_unused_definitions_are_skipped_unless_a_reference_cannot_be_followed() -> None:
    schema = {"$defs": {"a": dict(LEAF)}, "items": {"$defs": {"b": dict(LEAF)}}}
    assert _paths(schema) == ["", "/items"]
    assert _paths({**schema, "$ref": "other.json"}) == ["", "/items", "/$defs/a", "/items/$defs/b"]


def test_a_loop_of_references_ends() -> None:
    assert _paths({"$ref": "#"}) == [""]


def _upper(pattern: str) -> str:
    return pattern.upper()


def test_keywords_without_effect_are_removed() -> None:
    schema = {
        "uniqueItems": False,
        "unevaluatedItems": True,
        "unevaluatedProperties": {},
        "then": LEAF,
        "minContains": 1,
    }
    assert rewrite(schema, "", _upper) == []
    assert schema == {}
    unchanged = {"uniqueItems": 0, "unevaluatedItems": False, "if": {}, "then": LEAF, "contains": {}, "minContains": 1}
    schema = dict(unchanged)
    rewrite(schema, "", _upper)
    assert schema == unchanged


def test_patterns_are_rewritten_in_every_place() -> None:
    schema = {"pattern": "a", "items": {"patternProperties": {"b": {"pattern": "c"}}}}
    assert rewrite(schema, "", _upper) == []
    assert schema == {"pattern": "A", "items": {"patternProperties": {"B": {"pattern": "C"}}}}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"minProperties": 1}, False),
        ({"minProperties": 2}, True),
        ({"minProperties": 2, "required": ["a"]}, False),
        ({"minProperties": 3, "required": ["a"]}, True),
        ({"minProperties": 2, "additionalProperties": False}, False),
        ({"minProperties": 2, "additionalProperties": False, "patternProperties": {"a": True}}, True),
    ],
)
def test_counts_that_repeated_names_bypass_are_reported(schema: dict[str, Any], found: bool) -> None:
    assert [part.keyword for part in rewrite(schema, "/x", _upper)] == (["minProperties"] if found else [])


def test_one_of_becomes_any_of_only_with_a_proof() -> None:
    disjoint: dict[str, Any] = {"title": "t", "oneOf": [LEAF, {"type": "null"}], "x": 1}
    rewrite(disjoint, "", _upper)
    assert list(disjoint) == ["title", "anyOf", "x"]
    for schema in ({"oneOf": [LEAF, {}]}, {"oneOf": [LEAF, {"type": "null"}], "anyOf": [{}]}):
        before = dict(schema)
        rewrite(schema, "", _upper)
        assert schema == before


def test_unenforced_parts_are_refused_by_name_or_reported() -> None:
    found = [Unenforced("/a", "not", "is not enforced"), Unenforced("", "", "the library's own words")]
    with pytest.raises(
        NotEnforced, match="toy would not enforce all of it: /a/not: is not enforced; the library's own"
    ):
        settle("toy", found, False)
    warnings = settle("toy", [*found, found[0]], True)
    assert warnings == ("not enforced by toy: /a/not: is not enforced", "not enforced by toy: the library's own words")
    assert unpack(pack(warnings, b"x\ny")) == (warnings, b"x\ny")
    assert settle("toy", [], False) == ()
    assert issubclass(NotEnforced, InvalidGrammar)


def test_a_long_list_of_parts_ends_with_a_number() -> None:
    found = [Unenforced(f"/{i}", "not", "is not enforced") for i in range(MAX_NAMED + 5)]
    assert settle("toy", found, True)[-1] == "not enforced by toy: and 5 more"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("propertis", "properties"),
        ("requried", "required"),
        ("item", "items"),
        ("enums", "enum"),
        ("tpye", "type"),
        ("minlength", "minLength"),
        ("ref", "$ref"),
        ("addtionalProperties", "additionalProperties"),
    ],
)
def test_one_edit_is_a_misspelling(key: str, meant: str) -> None:
    assert misspelled_keywords({"items": {key: 1}}, "/x") == [
        f"/x/items/{key}: is not a keyword of JSON Schema and has no effect; did you mean {meant!r}?"
    ]


@pytest.mark.parametrize("key", ["zork", "x-order", "note", "ids", "iff", "comment", "example", "proprtis"])
def test_known_keywords_and_distant_words_are_not_reported(key: str) -> None:
    assert misspelled_keywords({key: 1}, "") == []


def test_names_of_properties_are_not_keywords() -> None:
    assert misspelled_keywords({"properties": {"requried": {}}, "default": {"propertis": 1}}, "") == []


def test_many_misspellings_end_with_a_number() -> None:
    schema = {"properties": {str(i): {"tpye": "string"} for i in range(MOST_MISSPELLED + 5)}}
    found = misspelled_keywords(schema, "")
    assert len(found) == MOST_MISSPELLED + 1
    assert found[-1] == "and 5 more keywords that may be misspelled"
