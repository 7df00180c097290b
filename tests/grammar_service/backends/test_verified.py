"""Verified answers: rows without the tokens that lose the answer, on both libraries, judged by two validators."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from grammar_service.backends.backend import Compiled, Matcher
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.backends.registry import load_backend
from grammar_service.backends.verified import VerifiedCompiled
from grammar_service.errors import InvalidGrammar, NotEnforced
from grammar_service.grammar.value import Kind, Reading, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import PADDED, STOPS, spell, tokenizer_json

WORDS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
NEEDS_TRUE = {"type": "array", "items": {"type": "boolean"}, "contains": {"const": True}, "minItems": 1}


def verified(library: Library, schema: Any, kind: Kind = Kind.JSON_SCHEMA) -> Compiled:
    grammar = parse(kind, schema if isinstance(schema, str) else json.dumps(schema), Whitespace.COMPACT)
    grammar = replace(grammar, reading=Reading(verify=True))
    return library.backend.load(grammar, library.backend.compile(grammar))


def behind(compiled: Compiled, text: str) -> Matcher:
    matcher = compiled.matcher()
    assert all(matcher.accept(token) for token in spell(text)), text
    return matcher


def legal(library: Library, compiled: Compiled, text: str, byte: str) -> bool:
    return spell(byte)[0] in library.legal(behind(compiled, text))


def test_a_second_equal_item_cannot_end(library: Library) -> None:
    compiled = verified(library, {"type": "object", "properties": {"a": WORDS}, "required": ["a"]})
    assert [line.startswith("verified: not enforced by") for line in compiled.warnings] == [True]
    assert legal(library, compiled, '{"a":["x","y', '"')
    assert not legal(library, compiled, '{"a":["x","x', '"')
    assert legal(library, compiled, '{"a":["x","x', "y")
    assert legal(library, compiled, '{"a":["x","xy"', "]")
    assert library.accepts(compiled, '{"a":["x","xy"]}')
    assert not library.accepts(compiled, '{"a":["x","x"]}')


def test_an_array_stays_open_until_it_is_valid(library: Library) -> None:
    compiled = verified(library, {"type": "object", "properties": {"a": NEEDS_TRUE}, "required": ["a"]})
    assert not legal(library, compiled, '{"a":[false,false', "]")
    assert legal(library, compiled, '{"a":[false,false', ",")
    assert legal(library, compiled, '{"a":[false,true', "]")


def test_an_object_inside_an_array_is_checked_where_it_ends(library: Library) -> None:
    item = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
    compiled = verified(library, {"type": "array", "items": {**item, "not": {"properties": {"a": {"pattern": "^x"}}}}})
    assert not legal(library, compiled, '[{"a":"xy"', "}")
    assert legal(library, compiled, '[{"a":"yx"', "}")


def test_a_number_that_is_not_valid_goes_on_or_the_row_is_empty(library: Library) -> None:
    odd = {"type": "integer", "minimum": 0, "maximum": 50, "not": {"multipleOf": 2}}
    compiled = verified(library, odd)
    matcher = behind(compiled, "4")
    row = library.legal(matcher)
    assert not row & set(STOPS)
    assert spell("1")[0] in row
    assert not matcher.accept(STOPS[0])
    assert not matcher.terminated
    assert library.accepts(compiled, "41")
    # 50 can neither end nor go on.
    assert library.legal(behind(compiled, "50")) == set()


def test_a_condition_that_the_rest_may_change_loses_nothing(library: Library) -> None:
    item = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    properties = {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    compiled = verified(library, {**schema, "if": {"required": ["b"]}, "else": {"properties": {"a": item}}})
    assert legal(library, compiled, '{"a":[1,1', "]")
    assert library.accepts(compiled, '{"a":[1,1],"b":2}')
    assert not library.accepts(compiled, '{"a":[1,1]}')


def test_rows_are_those_of_the_tokens_alone(library: Library) -> None:
    """After rollbacks, in copies and in a matcher that is made anew, as drafts and a killed process need it."""
    draw = random.Random(5)
    compiled = verified(library, {"type": "object", "properties": {"a": WORDS}, "required": ["a"]})
    text = [*spell('{"a":["x","xy","","\\"q","q"]}'), STOPS[0]]
    matcher, at = compiled.matcher(), 0
    rows: dict[int, set[int]] = {}
    for _ in range(300):
        if at < len(text) and (at == 0 or draw.random() < 0.7):
            rows.setdefault(at, library.legal(matcher))
            assert library.legal(matcher) == rows[at]
            assert library.legal(matcher.copy()) == rows[at]
            assert matcher.accept(text[at])
            at += 1
        else:
            back = draw.randrange(min(at, 6) + 1)
            matcher.rollback(back)
            at -= back
    for at, row in rows.items():
        anew = compiled.matcher()
        assert all(anew.accept(token) for token in text[:at])
        assert library.legal(anew) == row


def test_a_copy_goes_elsewhere(library: Library) -> None:
    compiled = verified(library, WORDS)
    matcher = behind(compiled, '["a","')
    twin = matcher.copy()
    assert all(twin.accept(token) for token in spell('b"'))
    assert matcher.accept(spell("a")[0])
    assert spell('"')[0] not in library.legal(matcher)
    assert spell("]")[0] in library.legal(twin)


def test_other_kinds_are_refused_as_without_it(library: Library) -> None:
    form = {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": "a"}, {"type": "json_schema", "json_schema": WORDS}],
    }
    with pytest.raises(NotEnforced, match="uniqueItems"):
        verified(library, json.dumps({"type": "structural_tag", "format": form}), Kind.STRUCTURAL_TAG)


def test_a_composed_answer_behind_a_reasoning_is_verified(library: Library) -> None:
    document = {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": WORDS},
        "reasoning": {"begin": "<t>", "end": "</t>", "open": False, "max_tokens": None},
    }
    compiled = verified(library, json.dumps(document), Kind.COMPOSED)
    for start in ("", "<t>hm</t>"):
        assert library.accepts(compiled, start + '["a","b"]')
        assert not library.accepts(compiled, start + '["a","a"]')


@pytest.mark.parametrize(
    "schema", [{"uniqueItems": True, "$ref": "http://x/y"}, {"uniqueItems": True, "required": "a"}]
)
def test_a_schema_that_the_validator_cannot_read_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidGrammar, match="cannot be verified"):
        Validator(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"items": [{"type": "string"}], "additionalItems": False}, ["a"], ["a", 1]),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}, 4, 3),
        ({"minimum": 3, "exclusiveMinimum": False}, 3, 2),
        ({"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
        ({"definitions": {"x": {"type": "string"}}, "$ref": "#/definitions/x", "maxLength": 1}, "a", "ab"),
    ],
)
def test_older_names_of_keywords_are_read(schema: Any, valid: Any, invalid: Any) -> None:
    validator = Validator(json.dumps(schema))
    assert validator.is_valid(json.dumps(valid).encode())
    assert not validator.is_valid(json.dumps(invalid).encode())


@pytest.mark.parametrize(
    ("schema", "text", "depth", "lost"),
    [
        (WORDS, '["a","a"]', 1, True),
        (WORDS, '["a","b"]', 1, False),
        ({"properties": {"a": WORDS}, "required": ["b"]}, '{"a":["x","x"]}', 2, True),
        ({"properties": {"a": WORDS}, "required": ["b"]}, '{"a":["x"]}', 1, False),
        ({"anyOf": [{"properties": {"a": WORDS}}, {"required": ["b"]}]}, '{"a":["x","x"]}', 1, False),
        ({"properties": {"a": {"anyOf": [WORDS, {"maxItems": 1}]}}}, '{"a":["x","x"]}', 1, True),
        ({"uniqueItems": True}, '[{"a":1},{"a":1}]', 1, True),
        ({"uniqueItems": True}, '[{"a":1},{"a":1}]', 2, False),  # the second object may get another member
        ({"contains": {"required": ["a"], "maxProperties": 1}, "maxContains": 0}, '[{"a":1}]', 2, False),
        ({"items": {"contains": {"const": 1}}}, "[[2]]", 2, False),
        ({"items": {"contains": {"const": 1}}}, "[[2],[]]", 1, True),
        ({"if": {"required": ["b"]}, "then": {"properties": {"a": WORDS}}}, '{"b":1,"a":["x","x"]}', 1, False),
    ],
)
def test_a_value_is_lost_only_if_nothing_behind_it_can_help(schema: Any, text: str, depth: int, lost: bool) -> None:
    assert Validator(json.dumps(schema)).is_lost(text.encode(), depth) is lost


@pytest.mark.parametrize("pattern", ["^(?s:.)$", "(?i)a", "a(?-i:b)", "(?P<a>b)"])
def test_flags_of_a_pattern_are_refused_because_the_validator_reads_another_dialect(pattern: str) -> None:
    with pytest.raises(InvalidGrammar, match="flags"):
        Validator(json.dumps({"type": "string", "pattern": pattern}))
    with pytest.raises(InvalidGrammar, match="flags"):
        Validator(json.dumps({"type": "array", "items": {"patternProperties": {pattern: {}}}}))


@pytest.mark.parametrize("pattern", [r"\(\?i", "[(?i)]x", "(?:a)", "(?=a)", "(?!a)", "(?<=a)b", "(?<!a)b", "(?<a>b)"])
def test_other_groups_and_characters_are_no_flags(pattern: str) -> None:
    assert Validator(json.dumps({"pattern": pattern})).is_valid(b"1")


def test_grammars_share_the_rows_of_their_own_vocabulary(library: Library) -> None:
    one, two = verified(library, WORDS), verified(library, NEEDS_TRUE)
    assert isinstance(one, VerifiedCompiled)
    assert isinstance(two, VerifiedCompiled)
    assert one.verification.tokens is two.verification.tokens
    assert one.verification.validator is not two.verification.validator
    stops = STOPS[:1]
    vocabulary = Vocabulary.load(tokenizer_json(), PADDED, stops)
    other = verified(Library(load_backend(library.name, vocabulary), vocabulary), WORDS)
    assert isinstance(other, VerifiedCompiled)
    assert other.verification.tokens.stops == set(stops) != one.verification.tokens.stops
