"""References by $id, $anchor, URLs of the document and dynamic anchors mean what the specification says."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema_rs
import pytest

from grammar_service.backends.json_schema.references import write_pointers
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.errors import InvalidGrammar
from grammar_service.grammar.value import Kind, Whitespace
from tests.grammar_service.conftest import Library

OBJ: dict[str, Any] = {"type": "object", "additionalProperties": False}
INT, STR = {"type": "integer"}, {"type": "string"}
DRAFT = "http://json-schema.org/draft-0{}/schema#".format

CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "pointer": ({**OBJ, "properties": {"a": {"$ref": "#/$defs/i"}}, "$defs": {"i": INT}}, [{"a": 1}], [{"a": "x"}]),
    "anchor": (
        {**OBJ, "properties": {"a": {"$ref": "#i"}}, "$defs": {"x": {"$anchor": "i", **INT}}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "relative $id": (
        {
            "$id": "http://x.test/root.json",
            **OBJ,
            "properties": {"a": {"$ref": "item.json"}, "b": {"$ref": "/item.json"}},
            "$defs": {"x": {"$id": "item.json", **INT}},
        },
        [{"a": 1}, {"b": 2}],
        [{"a": "x"}, {"b": "x"}],
    ),
    "URL of the document": (
        {
            "$id": "http://x.test/root.json",
            **OBJ,
            "properties": {"a": {"$ref": "http://x.test/root.json#/$defs/i"}},
            "$defs": {"i": INT},
        },
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "the document itself by its URL": (
        {"$id": "http://x.test/tree", **OBJ, "properties": {"a": {"$ref": "http://x.test/tree"}}},
        [{}, {"a": {}}, {"a": {"a": {}}}],
        [{"a": 1}, {"a": {"b": 1}}],
    ),
    "a bundled document, from a root that is a reference in draft 6": (
        {
            "$schema": DRAFT(6),
            "$id": "http://x.test/root.json",
            "$ref": "parts.json#/definitions/o",
            "definitions": {
                "x": {
                    "$id": "http://x.test/parts.json",
                    "definitions": {"o": {**OBJ, "properties": {"a": {"$ref": "#/definitions/i"}}}, "i": INT},
                }
            },
        },
        [{"a": 1}, {}],
        [{"a": "x"}, 1],
    ),
    "a pointer below an $id is read from there": (
        {
            "$id": "http://x.test/root.json",
            **OBJ,
            "properties": {"a": {"$id": "sub.json", "$ref": "#/$defs/v", "$defs": {"v": STR}}},
            "$defs": {"v": INT},
        },
        [{"a": "x"}],
        [{"a": 1}],
    ),
    "an anchor of another resource": (
        {
            "$id": "http://x.test/root.json",
            **OBJ,
            "properties": {"a": {"$ref": "sub.json#v"}, "b": {"$ref": "#v"}},
            "$defs": {
                "one": {"$id": "sub.json", "$defs": {"v": {"$anchor": "v", **STR}}},
                "two": {"$anchor": "v", **INT},
            },
        },
        [{"a": "x"}, {"b": 1}],
        [{"a": 1}, {"b": "x"}],
    ),
    "a URN": (
        {
            "$id": "urn:x:root",
            **OBJ,
            "properties": {"a": {"$ref": "urn:x:i"}},
            "$defs": {"x": {"$id": "urn:x:i", **INT}},
        },
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "escapes in a pointer": (
        {
            **OBJ,
            "properties": {
                "a": {"$ref": "#/$defs/t~0e"},
                "b": {"$ref": "#/$defs/s~1h"},
                "c": {"$ref": "#/$defs/p%25t"},
                "d": {"$ref": "#/$defs/q%22t"},
            },
            "$defs": {"t~e": INT, "s/h": INT, "p%t": INT, 'q"t': INT},
        },
        [{"a": 1, "b": 2, "c": 3, "d": 4}],
        [{"a": "x"}, {"b": "x"}, {"c": "x"}, {"d": "x"}],
    ),
    "a property that is called $ref": (
        {**OBJ, "properties": {"$ref": STR, "$id": {"$ref": "#/$defs/i"}}, "$defs": {"i": INT}},
        [{"$ref": "x", "$id": 1}],
        [{"$ref": 1}, {"$id": "x"}],
    ),
    "$dynamicRef with one target": (
        {
            "$id": "http://x.test/tree",
            "$dynamicAnchor": "node",
            **OBJ,
            "properties": {"a": {"type": "array", "items": {"$dynamicRef": "#node"}}},
        },
        [{}, {"a": [{}, {"a": []}]}],
        [{"a": [1]}, {"a": [{"a": 1}]}],
    ),
    "$dynamicRef to an $anchor": (
        {**OBJ, "properties": {"a": {"$dynamicRef": "#i"}}, "$defs": {"x": {"$anchor": "i", **INT}}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "an $id in a value of enum names nothing": (
        {
            "$id": "http://x.test/root",
            **OBJ,
            "properties": {"a": {"enum": [{"$id": "item"}]}, "b": {"$ref": "item"}},
            "$defs": {"x": {"$id": "item", **INT}},
        },
        [{"a": {"$id": "item"}}, {"b": 1}],
        [{"a": {}}, {"b": "x"}],
    ),
    "a reference through an unknown keyword": (
        {
            "$id": "http://x.test/root.json",
            **OBJ,
            "properties": {"a": {"$ref": "#/components/one"}},
            "components": {"one": {"$ref": "item"}, "two": INT},
            "$defs": {"x": {"$id": "item", **INT}},
        },
        [{"a": 1}],
        [{"a": "x"}],
    ),
}

OLD: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "id of draft 4": (
        {
            "$schema": DRAFT(4),
            "id": "http://x.test/root.json",
            **OBJ,
            "properties": {"a": {"$ref": "item.json"}, "b": {"id": "other.json", "$ref": "#/definitions/v"}},
            "definitions": {"x": {"id": "item.json", **INT}, "v": INT},
        },
        [{"a": 1}, {"b": 1}],
        [{"a": "x"}, {"b": "x"}],
    ),
    "$id as an anchor, in draft 6 and 7": (
        {"$schema": DRAFT(7), **OBJ, "properties": {"a": {"$ref": "#i"}}, "definitions": {"x": {"$id": "#i", **INT}}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "$recursiveRef with one resource": (
        {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "$recursiveAnchor": True,
            **OBJ,
            "properties": {"a": {"$recursiveRef": "#"}},
        },
        [{}, {"a": {"a": {}}}],
        [{"a": 1}],
    ),
}


@pytest.mark.parametrize("name", [*CASES, *OLD])
def test_a_reference_leads_where_the_specification_says(library: Library, name: str) -> None:
    schema, valid, invalid = (CASES | OLD)[name]
    # A document is taken as read from the URL that it gives itself.
    judge = jsonschema_rs.validator_for(schema, base_uri=schema.get("$id"))
    assert [judge.is_valid(each) for each in (*valid, *invalid)] == [True] * len(valid) + [False] * len(invalid)
    if name == "escapes in a pointer" and library.name == "xgrammar":
        pytest.skip("xgrammar reads no escapes in a pointer, and refuses them")
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT)
    texts = [[json.dumps(each, separators=(",", ":")) for each in values] for values in (valid, invalid)]
    assert [text for text in texts[0] if not library.accepts(compiled, text)] == []
    assert [text for text in texts[1] if library.accepts(compiled, text)] == []


@pytest.mark.parametrize("name", [*CASES, *OLD])
def test_a_document_with_pointers_has_no_other_names(name: str) -> None:
    schema, valid, invalid = copy.deepcopy((CASES | OLD)[name])
    write_pointers(schema)
    again = copy.deepcopy(schema)
    write_pointers(again)
    assert again == schema
    validator = Validator(json.dumps((CASES | OLD)[name][0]))
    assert all(validator.is_valid(json.dumps(each).encode()) for each in valid)
    assert not any(validator.is_valid(json.dumps(each).encode()) for each in invalid)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://x.test/other.json"},
        {"$ref": "#nowhere"},
        {"$id": "http://x.test/a", "$ref": "b"},
        {"properties": {"a": {"$id": "http://x.test/b", "$ref": "#/$defs/v"}}, "$defs": {"v": {"type": "string"}}},
        {
            "$id": "http://x.test/a",
            "$dynamicAnchor": "n",
            "properties": {"a": {"$dynamicRef": "b#n"}},
            "$defs": {"b": {"$id": "b", "$dynamicAnchor": "n", "type": "string"}},
        },
    ],
)
def test_what_has_no_single_target_here_is_refused(library: Library, schema: Any) -> None:
    with pytest.raises(InvalidGrammar):
        library.compiled(Kind.JSON_SCHEMA, json.dumps(schema))


def test_a_document_without_names_stays_as_it_is() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/x y"}, "id": {"const": 1}},
        "$defs": {"x y": {"type": "string", "$comment": "id"}},
    }
    before = copy.deepcopy(schema)
    write_pointers(schema)
    assert schema == before
