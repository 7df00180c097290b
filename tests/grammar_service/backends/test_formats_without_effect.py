"""Formats without effect, which schemas of real users have: those of numbers, and those that are not known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from grammar_service.backends.backend import Compiled
from grammar_service.errors import NotEnforced
from grammar_service.grammar.value import Kind, Reading, Whitespace, parse
from tests.grammar_service.conftest import Library


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({"type": "number", "format": "float"}, "1.5", '"1.5"'),
        ({"type": "integer", "format": "int32"}, "15", "1.5"),
        ({"type": ["integer", "null"], "format": "int64"}, "null", '"1"'),
    ],
)
def test_the_format_of_a_number_has_no_effect(
    library: Library, schema: dict[str, Any], accepted: str, rejected: str
) -> None:
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(schema))
    assert library.accepts(compiled, accepted)
    assert not library.accepts(compiled, rejected)
    assert compiled.warnings == ()


def read(library: Library, schema: Any, *, strict: bool) -> Compiled:
    grammar = replace(parse(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.BOUNDED), reading=Reading(strict))
    return library.backend.load(grammar, library.backend.compile(grammar))


@pytest.mark.parametrize("types", ["string", ["null", "string"]])
def test_a_format_of_strings_that_is_not_known_is_a_warning(library: Library, types: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": types, "format": "float"}}, "required": ["a"]}
    compiled = read(library, {**schema, "additionalProperties": False}, strict=False)
    assert compiled.warnings == ("/properties/a/format: 'float' is not a format that is enforced; it has no effect",)
    assert library.accepts(compiled, '{"a":"x"}')
    assert not library.accepts(compiled, '{"a":1}')


def test_it_is_refused_where_the_server_is_strict(library: Library) -> None:
    with pytest.raises(NotEnforced, match="/format: 'float' is not enforced"):
        read(library, {"type": "string", "format": "float"}, strict=True)


def test_a_known_format_is_enforced_and_gives_no_warning(library: Library) -> None:
    for strict in (False, True):
        compiled = read(library, {"type": "string", "format": "uri-reference"}, strict=strict)
        assert compiled.warnings == ()
        assert library.accepts(compiled, '"/a?b#c"')
        assert not library.accepts(compiled, '"a b"')
