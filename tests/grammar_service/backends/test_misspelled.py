"""Warnings for keywords that are one edit away from a keyword of JSON Schema."""

from __future__ import annotations

import json

import pytest

from grammar_service.backends.json_schema.misspelled import MAX_NAMED, misspelled_keywords
from grammar_service.errors import InvalidGrammar
from grammar_service.grammar.value import Kind, Whitespace, parse
from tests.grammar_service.conftest import Library


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
    schema = {"properties": {str(i): {"tpye": "string"} for i in range(MAX_NAMED + 5)}}
    found = misspelled_keywords(schema, "")
    assert len(found) == MAX_NAMED + 1
    assert found[-1] == "and 5 more keywords that may be misspelled"


def test_a_compiled_schema_carries_the_warning(library: Library) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxlength": 2}}, "requried": ["a"]}
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(schema))
    assert [warning.split(":")[0] for warning in compiled.warnings] == ["/requried", "/properties/a/maxlength"]
    assert library.accepts(compiled, "{}")


def test_a_structural_tag_carries_the_warning_with_its_path(library: Library) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "object", "requried": ["a"]}}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}
    compiled = library.compiled(Kind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))
    (warning,) = compiled.warnings
    assert warning.startswith("/format/tags/0/content/json_schema/requried: ")
    assert "'required'" in warning


def test_a_misspelled_keyword_inside_an_unenforced_part_is_a_second_warning(library: Library) -> None:
    text = '{"type":"array","contains":{"type":"object","requried":["a"]}}'
    grammar = parse(Kind.JSON_SCHEMA, text, Whitespace.COMPACT)
    compiled = library.backend.load(grammar, library.backend.compile(grammar, allow_unenforced=True))
    assert len(compiled.warnings) == 2


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": "strng"}}}, "/properties/a/type: 'strng' .*; did you mean 'string'"),
        ({"items": {"type": ["Integer", "null"]}}, "/items/type: 'Integer' .*; did you mean 'integer'"),
        ({"type": "zork"}, "/type: 'zork' .*; they are array, boolean, integer"),
    ],
)
def test_an_unknown_type_is_an_error_with_its_place(library: Library, schema: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        library.compiled(Kind.JSON_SCHEMA, json.dumps(schema))
