"""How a verified answer without a legal token goes back: how far, and what it avoids from then on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from grammar_service.backends.backend import Compiled
from grammar_service.backends.json_schema.places import Place, compacted, goes_on
from grammar_service.backends.verified import WayBack, avoiding, find_way_back
from grammar_service.grammar.value import Kind, Reading, Whitespace, parse
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import spell

WORDS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "pattern": "^(ab|ac|d)$"},
    "uniqueItems": True,
    "minItems": 2,
    "maxItems": 2,
}
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 4}, "uniqueItems": True, "minItems": 4}


def verified(
    library: Library, schema: Any, whitespace: Whitespace = Whitespace.COMPACT, *, verify: bool = True
) -> Compiled:
    grammar = replace(parse(Kind.JSON_SCHEMA, json.dumps(schema), whitespace), reading=Reading(verify=verify))
    return library.backend.load(grammar, library.backend.compile(grammar))


def way_back(compiled: Compiled, text: str, kept: str = "", dead: tuple[bytes, ...] = ()) -> WayBack | None:
    return find_way_back(avoiding(compiled, dead).matcher, spell(text), len(spell(kept)))


def legal(library: Library, compiled: Compiled, text: str) -> str:
    """Return the characters that may follow."""
    matcher = compiled.matcher()
    assert all(matcher.accept(token) for token in spell(text)), text
    return "".join(chr(byte) for byte in range(32, 127) if spell(chr(byte))[0] in library.legal(matcher))


def test_a_word_is_taken_back_as_a_whole(library: Library) -> None:
    compiled = verified(library, WORDS)
    assert legal(library, compiled, '["ab","ab') == ""
    found = way_back(compiled, '["ab","ab')
    assert found == WayBack(len('["ab","'), (b'["ab","a',))
    assert legal(library, avoiding(compiled, found.dead), '["ab","') == "d"


def test_a_place_without_another_choice_is_passed(library: Library) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[xy]$"}, "b": {"enum": ["text"]}, "c": {"const": 1}},
        "required": ["a", "b", "c"],
        "additionalProperties": False,
        "not": {"properties": {"a": {"pattern": "x"}, "c": {"multipleOf": 1}}},
    }
    compiled, text = verified(library, schema), '{"a":"x","b":"text","c":1'
    assert legal(library, compiled, text) == ""
    assert way_back(compiled, text) == WayBack(len('{"a":"'), (b'{"a":"x',))
    assert way_back(compiled, text, kept='{"a":"x') is None


def test_what_is_dead_stays_dead_with_other_white_space(library: Library) -> None:
    compiled = avoiding(verified(library, DIGITS, Whitespace.ANY), (b"[1,2",))
    assert "2" in legal(library, compiled, "[2,")
    for text in ("[1,", "[ 1 , ", "[1 ,\n"):
        assert "2" not in legal(library, compiled, text), text
        assert "3" in legal(library, compiled, text), text


def test_a_row_of_white_space_alone_is_empty(library: Library) -> None:
    compiled = verified(library, {**DIGITS, "maxItems": 4}, Whitespace.ANY)
    assert legal(library, compiled, "[1,2,3,3") == ""
    assert " " in legal(library, compiled, "[1,2,3,")
    found = way_back(compiled, "[1,2, 3,\n3")
    assert found == WayBack(len("[1,2, 3,\n"), (b"[1,2,3,3",))


def test_a_dead_text_takes_the_place_of_longer_ones(library: Library) -> None:
    compiled = verified(library, {**DIGITS, "maxItems": 4})
    dead = tuple(f"[1,2,3,{digit}".encode() for digit in "123")
    assert legal(library, avoiding(compiled, dead), "[1,2,3,") == "4"
    found = way_back(compiled, "[1,2,3,4", dead=dead)
    assert found is not None
    assert found.dead[-1] == b"[1,2,3"
    assert not any(text.startswith(b"[1,2,3,") for text in found.dead)


def test_without_a_valid_answer_there_is_no_way(library: Library) -> None:
    schema = {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    assert way_back(verified(library, schema), "[null,null") is None


def test_an_answer_that_is_not_verified_has_no_way(library: Library) -> None:
    compiled = verified(library, {"type": "boolean"}, verify=False)
    assert way_back(compiled, "tru") is None
    assert avoiding(compiled, (b"true",)) is compiled


@pytest.mark.parametrize(
    ("before", "text", "same"),
    [
        ('["', "a", False),
        ('["a', "b", True),
        ('["a', '"', True),
        ('["a', '" ', True),
        ('["a', '",', False),
        ('["a\\"', "b", True),
        ("[1", "2", True),
        ("[1", ",", False),
        ("[1", "2,", False),
        ("[", "1", False),
        ("[tr", "ue", True),
        ("[1", " ", False),
    ],
)
def test_where_a_token_only_goes_on_with_a_scalar(before: str, text: str, same: bool) -> None:
    compact, place = compacted(Place(), before.encode())
    assert goes_on(place, compact, text.encode()) is same


def test_white_space_between_values_is_left_out() -> None:
    text = b' { "a b" :\n[ 1 , "c \\" d" ] } '
    compact, place = compacted(Place(), text)
    assert compact == b'{"a b":[1,"c \\" d"]}'
    assert place.brackets == b""
