"""Verified answers: rows without the tokens that lose the answer, and how an answer without a legal token goes back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from grammar_service.backends.backend import Compiled, Matcher
from grammar_service.backends.json_schema.places import Place, compacted, goes_on
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.backends.registry import load_backend
from grammar_service.backends.verified import VerifiedCompiled, WayBack, avoiding, find_way_back
from grammar_service.errors import InvalidGrammar, NotEnforced
from grammar_service.grammar.value import Kind, Whitespace
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import PADDED, STOPS, spell, tokenizer_json

WORDS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
NEEDS_TRUE = {"type": "array", "items": {"type": "boolean"}, "contains": {"const": True}, "minItems": 1}


def after(compiled: Compiled, text: str) -> Matcher:
    matcher = compiled.matcher()
    assert all(matcher.accept(token) for token in spell(text)), text
    return matcher


def legal(library: Library, compiled: Compiled, text: str, byte: str) -> bool:
    return spell(byte)[0] in library.legal(after(compiled, text))


def test_a_second_equal_item_cannot_end(library: Library) -> None:
    compiled = library.read({"type": "object", "properties": {"a": WORDS}, "required": ["a"]}, verify=True)
    assert [line.startswith("verified: not enforced by") for line in compiled.warnings] == [True]
    assert legal(library, compiled, '{"a":["x","y', '"')
    assert not legal(library, compiled, '{"a":["x","x', '"')
    assert legal(library, compiled, '{"a":["x","x', "y")
    assert legal(library, compiled, '{"a":["x","xy"', "]")
    assert library.accepts(compiled, '{"a":["x","xy"]}')
    assert not library.accepts(compiled, '{"a":["x","x"]}')


def test_an_array_stays_open_until_it_is_valid(library: Library) -> None:
    compiled = library.read({"type": "object", "properties": {"a": NEEDS_TRUE}, "required": ["a"]}, verify=True)
    assert not legal(library, compiled, '{"a":[false,false', "]")
    assert legal(library, compiled, '{"a":[false,false', ",")
    assert legal(library, compiled, '{"a":[false,true', "]")


def test_an_object_inside_an_array_is_checked_where_it_ends(library: Library) -> None:
    item = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
    compiled = library.read(
        {"type": "array", "items": {**item, "not": {"properties": {"a": {"pattern": "^x"}}}}}, verify=True
    )
    assert not legal(library, compiled, '[{"a":"xy"', "}")
    assert legal(library, compiled, '[{"a":"yx"', "}")


def test_a_number_that_is_not_valid_goes_on_or_the_row_is_empty(library: Library) -> None:
    odd = {"type": "integer", "minimum": 0, "maximum": 50, "not": {"multipleOf": 2}}
    compiled = library.read(odd, verify=True)
    matcher = after(compiled, "4")
    row = library.legal(matcher)
    assert not row & set(STOPS)
    assert spell("1")[0] in row
    assert not matcher.accept(STOPS[0])
    assert not matcher.terminated
    assert library.accepts(compiled, "41")
    # 50 can neither end nor go on.
    assert library.legal(after(compiled, "50")) == set()


def test_a_condition_that_the_rest_may_change_loses_nothing(library: Library) -> None:
    item = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    properties = {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    compiled = library.read({**schema, "if": {"required": ["b"]}, "else": {"properties": {"a": item}}}, verify=True)
    assert legal(library, compiled, '{"a":[1,1', "]")
    assert library.accepts(compiled, '{"a":[1,1],"b":2}')
    assert not library.accepts(compiled, '{"a":[1,1]}')


def test_rows_are_those_of_the_tokens_alone(library: Library) -> None:
    """After rollbacks, in copies and in a matcher that is made anew, as drafts and a killed process need it."""
    draw = random.Random(5)
    compiled = library.read({"type": "object", "properties": {"a": WORDS}, "required": ["a"]}, verify=True)
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
    compiled = library.read(WORDS, verify=True)
    matcher = after(compiled, '["a","')
    twin = matcher.copy()
    assert all(twin.accept(token) for token in spell('b"'))
    assert matcher.accept(spell("a")[0])
    assert spell('"')[0] not in library.legal(matcher)
    assert spell("]")[0] in library.legal(twin)


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("a+", True),
        ("([abc])+[^x]+$", True),
        ("(?=a)b", True),
        ("(?<n>a)", True),
        ("^(abc]", False),
        ("(?P<n>a)", False),
        ("a**", False),
        ("[b", False),
        ("a{2,1}", False),
    ],
)
def test_a_string_with_the_format_regex_is_a_regular_expression(library: Library, text: str, takes: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "regex"}}, "required": ["a"]}
    verified = library.read(schema, verify=True)
    assert verified.warnings[0].startswith("verified: /properties/a/format: no grammar enforces 'regex'")
    assert legal(library, verified, f'{{"a":"{text}', '"') is takes
    assert library.accepts(verified, f'{{"a":"{text}"}}') is takes
    plain = library.read(schema)
    assert plain.warnings[0].startswith("not verified: /properties/a/format: ")
    assert library.accepts(plain, f'{{"a":"{text}"}}')


def test_other_kinds_are_refused_as_without_it(library: Library) -> None:
    form = {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": "a"}, {"type": "json_schema", "json_schema": WORDS}],
    }
    with pytest.raises(NotEnforced, match="uniqueItems"):
        library.read({"type": "structural_tag", "format": form}, kind=Kind.STRUCTURAL_TAG, verify=True)


def test_a_composed_answer_behind_a_reasoning_is_verified(library: Library) -> None:
    document = {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": WORDS},
        "reasoning": {"begin": "<t>", "end": "</t>", "open": False, "max_tokens": None},
    }
    compiled = library.read(document, kind=Kind.COMPOSED, verify=True)
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
    one, two = library.read(WORDS, verify=True), library.read(NEEDS_TRUE, verify=True)
    assert isinstance(one, VerifiedCompiled)
    assert isinstance(two, VerifiedCompiled)
    assert one.verification.tokens is two.verification.tokens
    assert one.verification.validator is not two.verification.validator
    stops = STOPS[:1]
    vocabulary = Vocabulary.load(tokenizer_json(), PADDED, stops)
    other = Library(load_backend(library.name, vocabulary), vocabulary).read(WORDS, verify=True)
    assert isinstance(other, VerifiedCompiled)
    assert other.verification.tokens.stops == set(stops) != one.verification.tokens.stops


# -- the way back of an answer without a legal token ------------------------------------------------------------------

PICKS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "pattern": "^(ab|ac|d)$"},
    "uniqueItems": True,
    "minItems": 2,
    "maxItems": 2,
}
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 4}, "uniqueItems": True, "minItems": 4}


def way_back(compiled: Compiled, text: str, kept: str = "", dead: tuple[bytes, ...] = ()) -> WayBack | None:
    return find_way_back(avoiding(compiled, dead).matcher, spell(text), len(spell(kept)))


def followers(library: Library, compiled: Compiled, text: str) -> str:
    """Return the characters that may follow."""
    row = library.legal(after(compiled, text))
    return "".join(chr(byte) for byte in range(32, 127) if spell(chr(byte))[0] in row)


def test_a_word_is_taken_back_as_a_whole(library: Library) -> None:
    compiled = library.read(PICKS, verify=True)
    assert followers(library, compiled, '["ab","ab') == ""
    found = way_back(compiled, '["ab","ab')
    assert found == WayBack(len('["ab","'), (b'["ab","a',))
    assert followers(library, avoiding(compiled, found.dead), '["ab","') == "d"


def test_a_place_without_another_choice_is_passed(library: Library) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[xy]$"}, "b": {"enum": ["text"]}, "c": {"const": 1}},
        "required": ["a", "b", "c"],
        "additionalProperties": False,
        "not": {"properties": {"a": {"pattern": "x"}, "c": {"multipleOf": 1}}},
    }
    compiled, text = library.read(schema, verify=True), '{"a":"x","b":"text","c":1'
    assert followers(library, compiled, text) == ""
    assert way_back(compiled, text) == WayBack(len('{"a":"'), (b'{"a":"x',))
    assert way_back(compiled, text, kept='{"a":"x') is None


def test_what_is_dead_stays_dead_with_other_white_space(library: Library) -> None:
    compiled = avoiding(library.read(DIGITS, Whitespace.ANY, verify=True), (b"[1,2",))
    assert "2" in followers(library, compiled, "[2,")
    for text in ("[1,", "[ 1 , ", "[1 ,\n"):
        assert "2" not in followers(library, compiled, text), text
        assert "3" in followers(library, compiled, text), text


def test_a_row_of_white_space_alone_is_empty(library: Library) -> None:
    compiled = library.read({**DIGITS, "maxItems": 4}, Whitespace.ANY, verify=True)
    assert followers(library, compiled, "[1,2,3,3") == ""
    assert " " in followers(library, compiled, "[1,2,3,")
    found = way_back(compiled, "[1,2, 3,\n3")
    assert found == WayBack(len("[1,2, 3,\n"), (b"[1,2,3,3",))


def test_a_dead_text_takes_the_place_of_longer_ones(library: Library) -> None:
    compiled = library.read({**DIGITS, "maxItems": 4}, verify=True)
    dead = tuple(f"[1,2,3,{digit}".encode() for digit in "123")
    assert followers(library, avoiding(compiled, dead), "[1,2,3,") == "4"
    found = way_back(compiled, "[1,2,3,4", dead=dead)
    assert found is not None
    assert found.dead[-1] == b"[1,2,3"
    assert not any(text.startswith(b"[1,2,3,") for text in found.dead)


def test_without_a_valid_answer_there_is_no_way(library: Library) -> None:
    schema = {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    assert way_back(library.read(schema, verify=True), "[null,null") is None


def test_an_answer_that_is_not_verified_has_no_way(library: Library) -> None:
    compiled = library.read({"type": "boolean"})
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
