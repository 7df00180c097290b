"""The checks of a grammar before any backend sees it."""

from __future__ import annotations

import pytest

from grammar_service.errors import InvalidField, InvalidGrammar, LimitExceeded
from grammar_service.grammar.text_grammar import (
    check_gbnf,
    embedded_schemas,
    gbnf_literal,
    ignored_attributes,
    refuse_token_references,
    with_schemas,
)
from grammar_service.grammar.value import MAX_JSON_DEPTH, Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.toy import PADDED, STOPS, tokenizer_json


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (Kind.JSON_SCHEMA, "", "source: is empty; a JSON Schema is required"),
        (Kind.JSON_SCHEMA, "{", "not JSON: .* at line 1 column 2"),
        (Kind.JSON_SCHEMA, '{\n"a": }', "line 2 column 6"),
        (Kind.JSON_SCHEMA, "[]", "must be an object or a boolean, not an array"),
        (Kind.JSON_SCHEMA, "3", "not a number"),
        (Kind.JSON_SCHEMA, "null", "not null"),
        (Kind.JSON_SCHEMA, "false", "admits no answer"),
        (Kind.JSON_SCHEMA, '{"minimum":NaN}', "NaN is not JSON"),
        (Kind.JSON_SCHEMA, '{"minimum":1e999}', "beyond the range"),
        (Kind.JSON_SCHEMA, '{"const":"\\ud800"}', "lone surrogate"),
        (Kind.JSON_SCHEMA, '{"type":"string","type":"integer"}', "the key 'type' occurs twice"),
        (Kind.JSON_OBJECT, "{}", "must be empty"),
        (Kind.CHOICE, "[]", "the list is empty"),
        (Kind.CHOICE, '"a"', "must be a JSON array of strings, not a string"),
        (Kind.CHOICE, '["a", 1]', r"choice\[1\]: must be a string, not a number"),
        (Kind.CHOICE, '["a", ""]', r"choice\[1\]: is empty"),
        (Kind.REGEX, "", "a regular expression is required"),
        (Kind.EBNF, " \n", "rule `root`"),
        (Kind.LARK, "", "rule `start`"),
        (Kind.STRUCTURAL_TAG, "[]", "must be a JSON object"),
    ],
)
def test_an_invalid_source_is_refused_with_its_problem(kind: Kind, source: str, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        parse(kind, source, Whitespace.ANY)


def test_a_blank_is_a_valid_regular_expression() -> None:
    assert parse(Kind.REGEX, " ", Whitespace.ANY).text == " "


@pytest.mark.parametrize("source", ["[" * (MAX_JSON_DEPTH + 2) + "]" * (MAX_JSON_DEPTH + 2), "[" * 100_000])
def test_json_beyond_the_depth_limit_is_refused(source: str) -> None:
    with pytest.raises(LimitExceeded, match=r"max_grammar_depth: .* deeper than 128"):
        parse(Kind.JSON_SCHEMA, source, Whitespace.ANY)


def test_the_order_of_keys_is_part_of_a_schema() -> None:
    assert parse(Kind.JSON_SCHEMA, '{"b": 1, "a": 2}', Whitespace.ANY).text == '{"b":1,"a":2}'


def test_equal_choices_are_merged() -> None:
    assert parse(Kind.CHOICE, '["b", "a", "b"]', Whitespace.ANY).text == '["b","a"]'


@pytest.mark.parametrize(
    "lark",
    ['start: "<b>" x "</b>"\nx: /<[a-z]+>/', "start: A // <[5]>\nA: /[<>]/", 'start: "\\"<a>"', 'start: "a"+ "b"*'],
)
def test_lark_may_describe_angle_brackets(lark: str) -> None:
    refuse_token_references(lark)


def test_gbnf_may_not_name_tokens() -> None:
    for gbnf in ('root ::= Token(5) "a"', "root ::= ExcludeToken (1, 2)", 'root ::= "a" | TagDispatch(("a", root))'):
        with pytest.raises(InvalidGrammar, match="line 1"):
            check_gbnf(gbnf)
    check_gbnf('root ::= "Token(5)" [Token(] # Token(1)')


def test_gbnf_literals_escape_quotes_and_control_characters() -> None:
    assert gbnf_literal('a"\\\n\x7fé') == '"a\\"\\\\\\u000a\\u007fé"'


def test_an_error_of_the_vocabulary_names_the_field() -> None:
    content = tokenizer_json()
    for arguments, field in (
        ((b"{", 10, (1,)), "tokenizer_json"),
        ((b"[]", 10, (1,)), "tokenizer_json"),
        ((b'{"model":{},"added_tokens":7}', 10, (1,)), "tokenizer_json"),
        ((b'{"model":{},"added_tokens":[{"id":2,"special":true}]}', 10, (1,)), "tokenizer_json"),
        ((b'{"model":{},"added_tokens":[{"id":-1,"content":"<a>"}]}', 10, (1,)), "tokenizer_json"),
        ((content, 0, (0,)), "vocab_size"),
        ((content, 10, ()), "stop_token_ids"),
        ((content, 10, (10,)), "stop_token_ids"),
    ):
        with pytest.raises(InvalidField) as caught:
            Vocabulary.load(*arguments)
        assert caught.value.field == field


def test_the_digest_depends_on_every_field(vocabulary: Vocabulary) -> None:
    content = tokenizer_json()
    assert Vocabulary.load(content, PADDED, STOPS[::-1]).digest == vocabulary.digest
    others = [(content, PADDED + 1, STOPS), (content, PADDED, STOPS[:1]), (content + b" ", PADDED, STOPS)]
    assert len({Vocabulary.load(*other).digest for other in others} | {vocabulary.digest}) == 4


@pytest.mark.parametrize(
    ("lark", "name"),
    [
        ('start: a\na[temperature=0.5]: "x"', "temperature"),
        ('start: a\na[capture="max_tokens"]: "x"', "capture"),
        ('start: a\na[lazy, suffix="x"]: /a*/', None),
        ('start: "a[max_tokens=2]: " /[stop]/ // b[stop="x"]:', None),
    ],
)
def test_lark_attributes_without_effect_are_found(lark: str, name: str | None) -> None:
    assert [found for found, _ in ignored_attributes(lark)] == ([name] if name else [])


@pytest.mark.parametrize("attribute", ["max_tokens=3", 'stop="x"', 'lazy, stop_capture="x"'])
def test_lark_attributes_that_prevent_rollback_are_refused(attribute: str) -> None:
    with pytest.raises(InvalidGrammar, match="line 2: rule 'a'"):
        ignored_attributes(f"start: a\na[{attribute}]: /x*/")


def test_schemas_inside_lark_are_found_and_replaced() -> None:
    lark = 'start: %json {"const": "%json {}"} "x %json {}" a // %json {}\na: %json\n{"a": [1]}'
    assert [(path, schema) for path, schema, _ in embedded_schemas(lark)] == [
        ("/%json/0", {"const": "%json {}"}),
        ("/%json/1", {"a": [1]}),
    ]
    replaced = with_schemas(lark, lambda schema, path: path)
    assert replaced == 'start: %json /%json/0 "x %json {}" a // %json {}\na: %json\n/%json/1'


@pytest.mark.parametrize(
    ("gbnf", "message"),
    [
        ('root ::= "a"\nroot ::= "b"', "line 2: rule 'root' is defined twice"),
        ('root ::= b\nb[max_tokens=2] ::= "a"*', "line 2: rule 'b': attributes"),
    ],
)
def test_gbnf_that_would_be_misread_is_refused(gbnf: str, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        check_gbnf(gbnf)
    check_gbnf('root ::= "b ::= x" b # root ::= "a"\nb ::= [b] "c" [:=]')
