"""OpenAPI's formats of numbers, which tools of real users have: without effect, and no reason to refuse a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammar_service.errors import NotEnforced
from grammar_service.grammar.value import Kind
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


@pytest.mark.parametrize("types", ["string", ["number", "string"]])
def test_of_a_string_it_is_refused(library: Library, types: Any) -> None:
    with pytest.raises(NotEnforced, match="/format: 'float' is not enforced"):
        library.compiled(Kind.JSON_SCHEMA, json.dumps({"type": types, "format": "float"}))
