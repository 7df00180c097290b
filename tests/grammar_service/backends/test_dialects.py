"""`$schema`: drafts in each spelling, other dialects with a warning, and vocabularies that must be refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammar_service.backends.json_schema.references import take_out_dialects, write_pointers
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.errors import InvalidGrammar
from grammar_service.grammar.value import Kind, Whitespace
from tests.grammar_service.conftest import Library

OTHER = "http://x.test/dialect/1"
INT = {"type": "integer"}
CLOSED = {"type": "object", "additionalProperties": False, "properties": {"a": INT}, "required": ["a"]}


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/draft-03/schema#",
        "http://json-schema.org/draft-04/schema",
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft/2020-12/schema#",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/schema#",
    ],
)
def test_a_draft_is_known_in_each_spelling(library: Library, dialect: str) -> None:
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps({"$schema": dialect, **CLOSED}), Whitespace.COMPACT)
    assert compiled.warnings == ()
    assert library.accepts(compiled, '{"a":1}')
    assert not library.accepts(compiled, '{"a":"x"}')


def test_another_dialect_is_a_warning_that_names_it_once(library: Library) -> None:
    inner = {"$schema": OTHER, **INT}
    schema = {"$schema": OTHER, **CLOSED, "properties": {"a": inner}}
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT)
    (line,) = compiled.warnings
    assert line.startswith(f"/$schema: '{OTHER}' is not a dialect")
    assert library.accepts(compiled, '{"a":1}')
    assert not library.accepts(compiled, '{"a":"x"}')
    assert not library.accepts(compiled, "{}")


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


def _with_metaschema(required: bool) -> str:
    vocabularies = {"https://json-schema.org/draft/2020-12/vocab/core": True, "http://x.test/units": required}
    metaschema = {"$id": OTHER, "$vocabulary": vocabularies}
    return json.dumps({"$id": "http://x.test/root", "$schema": OTHER, **CLOSED, "$defs": {"m": metaschema}})


def test_a_dialect_that_requires_an_unknown_vocabulary_is_refused(library: Library) -> None:
    with pytest.raises(InvalidGrammar, match=r"requires the vocabulary 'http://x\.test/units'"):
        library.compiled(Kind.JSON_SCHEMA, _with_metaschema(True))
    with pytest.raises(InvalidGrammar, match="requires the vocabulary"):
        Validator(_with_metaschema(True))
    assert len(library.compiled(Kind.JSON_SCHEMA, _with_metaschema(False)).warnings) == 1
