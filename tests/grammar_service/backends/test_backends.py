"""The conformance suite, which runs over every backend."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import pytest

from grammar_service.backends.backend import Rows, chain_filler_of
from grammar_service.backends.registry import load_backend
from grammar_service.errors import InvalidField, InvalidGrammar, LimitExceeded, NotEnforced, NotSupported
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import PADDED, SPECIAL, STOPS, spell, tokenizer_json, tokens_in

TEXT_TOKENS = range(len(SPECIAL), len(SPECIAL) + 256)
FREE = {"type": "object"}
POINT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def schema(value: object) -> tuple[Kind, str]:
    return Kind.JSON_SCHEMA, json.dumps(value)


def test_a_row_contains_exactly_the_tokens_that_accept_accepts(library: Library) -> None:
    compiled = library.compiled(*schema(POINT))
    matcher = compiled.matcher()
    for token in spell('{"a":-12,"b":["x\\n",""]}'):
        legal = library.legal(matcher)
        for other in range(PADDED):
            if other in legal:
                assert matcher.accept(other)
                matcher.rollback(1)
        assert matcher.accept(token)
    assert library.legal(matcher) >= set(STOPS)


def test_stop_tokens_are_legal_exactly_when_the_answer_is_complete(library: Library) -> None:
    compiled = library.compiled(Kind.REGEX, "ab?c?")
    for text, complete in (("", False), ("a", True), ("ab", True), ("abc", True)):
        matcher = compiled.matcher()
        assert all(matcher.accept(token) for token in spell(text))
        assert set(STOPS) & library.legal(matcher) == (set(STOPS) if complete else set())
        for stop in STOPS:
            assert matcher.accept(stop) is complete
            assert matcher.terminated is complete
            if complete:
                assert not matcher.accept(spell("b")[0])
                assert not matcher.accept(stop)
                matcher.rollback(1)
                assert not matcher.terminated


@pytest.mark.parametrize("end", ["x", '{"a":1,"b":[]}'])
def test_rollback_takes_back_the_stop_token_and_earlier_tokens(library: Library, end: str) -> None:
    # The first answer could continue at its end, the second could not.
    kind, source = (Kind.REGEX, "x+") if end == "x" else schema(POINT)
    matcher = library.compiled(kind, source).matcher()
    rows = []
    for token in spell(end):
        rows.append(library.legal(matcher))
        assert matcher.accept(token)
    rows.append(library.legal(matcher))
    assert matcher.accept(STOPS[1])
    matcher.rollback(2)
    assert library.legal(matcher) == rows[-2]
    assert matcher.accept(spell(end)[-1])
    assert library.legal(matcher) == rows[-1]


def test_any_rollback_restores_the_rows(library: Library) -> None:
    draw = random.Random(1)
    text = [*spell('{"a": 10, "b": ["q", "\\n\u00e9", ""]}'), STOPS[0]]
    matcher = library.compiled(*schema(POINT)).matcher()
    rows: list[set[int]] = []
    at = 0
    for _ in range(400):
        if at < len(text) and (at == 0 or draw.random() < 0.8):
            if at == len(rows):
                rows.append(library.legal(matcher))
            assert library.legal(matcher) == rows[at]
            assert matcher.accept(text[at])
            at += 1
        else:
            back = draw.randrange(min(at, 5) + 1)
            matcher.rollback(back)
            at -= back
    assert len(rows) == len(text)


def test_a_copy_rolls_back_and_goes_elsewhere(library: Library) -> None:
    """As a fork does: the copy takes back what the matcher has accepted since, and neither changes the other."""
    draw = random.Random(2)
    text, other = spell('{"a":-12,"b":["x"]}'), spell('{"a":7,"b":[]}')
    compiled = library.compiled(*schema(POINT))
    for _ in range(20):
        at = draw.randrange(len(spell('{"a":')) + 1)
        matcher, end = compiled.matcher(), draw.randrange(at, len(text) + 1)
        assert all(matcher.accept(token) for token in text[:end])
        twin, before = matcher.copy(), library.legal(matcher)
        twin.rollback(end - at)
        fresh = compiled.matcher()
        assert all(fresh.accept(token) for token in other[:at])
        for token in [*other[at:], STOPS[0]]:
            assert library.legal(twin) == library.legal(fresh)
            assert twin.accept(token)
            assert fresh.accept(token)
        assert twin.terminated
        assert library.legal(matcher) == before
        assert all(matcher.accept(token) for token in [*text[end:], STOPS[1]])


def test_tokens_may_follow_exactly_when_a_matcher_accepts_them_one_by_one(library: Library) -> None:
    rng = random.Random(3)
    text = spell('{"a":-12,"b":["x\\n",""]}')
    others = [*spell('",:}]0x'), *STOPS, *range(len(SPECIAL)), PADDED - 1, PADDED, -1]
    compiled = library.compiled(*schema(POINT))
    matcher = compiled.matcher()
    filler = chain_filler_of(matcher)
    assert filler is not None
    answers = set()
    for at in range(len(text) + 1):
        rest = text[at:]
        asked = [[], [STOPS[0]], [STOPS[1]], [*rest, STOPS[0]], [*rest, STOPS[1]], rest[: rng.randrange(len(rest) + 1)]]
        for other in others:
            asked += [[other], [other, *rest, STOPS[1]], [*rest[:3], other], [*rest[:-1], other, STOPS[0]]]
        before = library.legal(matcher)
        for tokens in asked:
            if any(token in STOPS for token in tokens[:-1]):
                continue
            twin = matcher.copy()
            expected = all(twin.accept(token) for token in tokens)
            assert filler.may_follow(matcher, tuple(tokens)) is expected, (at, tokens)
            answers.add(expected)
        assert library.legal(matcher) == before
        if rest:
            assert matcher.accept(rest[0])
    assert answers == {True, False}
    assert matcher.accept(STOPS[0])
    assert not filler.may_follow(matcher, (STOPS[0],))


def test_an_illegal_token_changes_nothing(library: Library) -> None:
    matcher = library.compiled(*schema(POINT)).matcher()
    assert matcher.accept(spell("{")[0])
    before = library.legal(matcher)
    for token in (spell("x")[0], STOPS[0], 2, PADDED - 1, PADDED, 10**9, -1):
        assert not matcher.accept(token)
    assert library.legal(matcher) == before
    assert matcher.accept(spell('"')[0])


@pytest.mark.parametrize(
    ("kind", "source", "start"),
    [
        (Kind.JSON_OBJECT, "", '{"'),
        (Kind.REGEX, "(.|\n)*", "a"),
        (Kind.EBNF, "root ::= [^a]* ", "b"),
        (Kind.STRUCTURAL_TAG, json.dumps({"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": FREE}]}), "a"),
    ],
)
def test_special_tokens_and_padding_are_never_text(library: Library, kind: Kind, source: str, start: str) -> None:
    matcher = library.compiled(kind, source).matcher()
    assert all(matcher.accept(token) for token in spell(start))
    legal = library.legal(matcher)
    tokens = len(json.loads(tokenizer_json())["model"]["vocab"])
    assert 2 not in legal
    assert not legal & set(range(tokens, library.num_words * 32))
    assert len(legal) > 100


def test_white_space_around_an_answer_is_rejected(library: Library) -> None:
    compiled = library.compiled(*schema(POINT), Whitespace.ANY)
    assert not library.accepts(compiled, ' {"a":1,"b":[]}')


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("{}", True),
        ('{"a":1}', True),
        ('{"a":{"b":[1,null,true,-1.5e3,"x"]},"c":{}}', True),
        ("[]", False),
        ("1", False),
        ('"a"', False),
        ('{"a":01}', False),
        ("{a:1}", False),
        ('{"a":1,}', False),
    ],
)
def test_a_json_object_accepts_any_object_and_nothing_else(library: Library, text: str, valid: bool) -> None:
    assert library.accepts(library.compiled(Kind.JSON_OBJECT, "", Whitespace.COMPACT), text) is valid


def test_the_schemas_true_and_empty_accept_any_value(library: Library) -> None:
    for source in ("true", "{}"):
        compiled = library.compiled(Kind.JSON_SCHEMA, source)
        assert all(library.accepts(compiled, text) for text in ("1", "null", '"a"', "[1]", '{"a":1}'))


CHOICES = ["a", "ab", 'q"uo\\te', "né", "two\nlines", "\x01", "/slash/", "{}", "日本"]


def test_a_choice_accepts_exactly_its_strings(library: Library) -> None:
    compiled = library.compiled(Kind.CHOICE, json.dumps(CHOICES))
    assert [text for text in CHOICES if not library.accepts(compiled, text)] == []
    assert [text for text in ("", "b", "aba", "two", "n", "[") if library.accepts(compiled, text)] == []


def test_thousands_of_choices_compile(library: Library) -> None:
    many = [f"item {i}" for i in range(3000)]
    compiled = library.compiled(Kind.CHOICE, json.dumps(many))
    assert library.accepts(compiled, many[0])
    assert library.accepts(compiled, many[-1])
    assert not library.accepts(compiled, "item 3000")


@pytest.mark.parametrize("kind", [Kind.EBNF, Kind.LARK])
def test_thousands_of_alternatives_deep_inside_a_grammar_compile(library: Library, kind: Kind) -> None:
    if kind is Kind.LARK and library.name == "xgrammar":
        pytest.skip("xgrammar has no Lark")
    items = " | ".join(f'"item{i}"' for i in range(5000))
    source = f'start: "a"~9 r\nr: {items}' if kind is Kind.LARK else f'root ::= "a"{{9}} r\nr ::= {items}'
    compiled = library.compiled(kind, source)
    assert library.accepts(compiled, "aaaaaaaaaitem4999")
    assert not library.accepts(compiled, "aaaaaaaaaitem5000")


def test_more_alternatives_than_a_row_holds_are_refused_before_a_row_fails(libraries: Callable[[str], Library]) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")
    source = "start: " + " | ".join(f'"{i}"' for i in range(20_002))
    with pytest.raises(LimitExceeded, match="at most 20000 may be open"):
        libraries("llguidance").compiled(Kind.LARK, source)


def test_hundreds_of_properties_compile(libraries: Callable[[str], Library]) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance; xgrammar compiles this too slowly")
    library = libraries("llguidance")
    names = [f"p{i}" for i in range(600)]
    source = {"type": "object", "properties": dict.fromkeys(names, INT), "additionalProperties": False}
    compiled = library.compiled(*schema(source), Whitespace.COMPACT)
    assert library.accepts(compiled, '{"p3":1,"p599":2}')
    assert not library.accepts(compiled, '{"p600":2}')


def test_an_allowed_unenforced_part_is_left_out_with_a_warning(library: Library) -> None:
    source = {"type": "object", "properties": {"a": {"type": "array", "items": INT, "uniqueItems": True}}}
    grammar = parse(*schema(source), Whitespace.COMPACT)
    compiled = library.backend.load(grammar, library.backend.compile(grammar, allow_unenforced=True))
    assert compiled.warnings == (f"not enforced by {library.name}: /properties/a/uniqueItems: is not enforced",)
    assert library.accepts(compiled, '{"a":[1,1]}')
    assert not library.accepts(compiled, '{"a":["x"]}')
    assert library.compiled(*schema(POINT)).warnings == ()


def test_an_error_names_every_part_that_is_not_enforced(library: Library) -> None:
    source = {"type": "object", "properties": {"a": {"uniqueItems": True}, "b": {"type": "array", "contains": INT}}}
    with pytest.raises(NotEnforced) as caught:
        library.compiled(*schema(source))
    assert "/properties/a/uniqueItems: " in str(caught.value)
    assert "/properties/b/contains: " in str(caught.value)


def test_a_pattern_that_is_not_portable_is_left_out_if_allowed(library: Library) -> None:
    grammar = parse(*schema({"type": "string", "pattern": "^(?!a)b*$", "maxLength": 2}), Whitespace.COMPACT)
    compiled = library.backend.load(grammar, library.backend.compile(grammar, allow_unenforced=True))
    assert "look-around" in compiled.warnings[0]
    assert [text for text in ('"a"', '"abc"') if library.accepts(compiled, text)] == ['"a"']


def test_a_regex_matches_the_whole_answer(library: Library) -> None:
    compiled = library.compiled(Kind.REGEX, "[a-c]{2,3}|x\\d+")
    assert all(library.accepts(compiled, text) for text in ("ab", "cab", "x1", "x99"))
    assert not any(library.accepts(compiled, text) for text in ("a", "abca", "x", "zab", "abz", ""))
    anchored = library.compiled(Kind.REGEX, "^ab$")
    assert library.accepts(anchored, "ab")
    assert not library.accepts(anchored, "abc")


def test_an_ebnf_grammar_with_recursion(library: Library) -> None:
    source = 'root ::= "[" item ("," item)* "]"  # a list\nitem ::= [0-9]+ | "\\"" [^"\\\\]* "\\"" | root\n'
    compiled = library.compiled(Kind.EBNF, source)
    assert all(library.accepts(compiled, text) for text in ("[1]", '[1,"a",[22]]'))
    assert not any(library.accepts(compiled, text) for text in ("[]", "[1,]", "1"))


def test_both_notations_of_structural_tags(library: Library) -> None:
    closed = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    closed["additionalProperties"] = False
    tag = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": closed}, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag]}
    old = {"structures": [{"begin": "<f=a>", "schema": closed, "end": "</f>"}], "triggers": ["<f="]}
    for source in ({"type": "structural_tag", "format": form}, old):
        compiled = library.compiled(Kind.STRUCTURAL_TAG, json.dumps(source))
        for text in ("", "hi", 'hi <f=a>{"x":1}</f> there <f=a>{"x": 2}</f>'):
            assert library.accepts(compiled, text), text
        for text in ("<f=b>", '<f=a>{"x":"s"}</f>', '<f=a>{"x":1}', f'<f=a>{{"x":{" " * 9}1}}</f>'):
            assert not library.accepts(compiled, text), text


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (Kind.JSON_SCHEMA, '{"type":"strin"}'),
        (Kind.JSON_SCHEMA, '{"$ref":"#/$defs/nowhere"}'),
        (Kind.JSON_SCHEMA, '{"$ref":"http://localhost/x"}'),
        (Kind.JSON_SCHEMA, '{"enum":[]}'),
        (Kind.JSON_SCHEMA, '{"type":"string","format":{"a":1}}'),
        (Kind.REGEX, "["),
        (Kind.REGEX, "a(?=b)"),
        (Kind.REGEX, "(a)\\1"),
        (Kind.EBNF, 'root ::= "a'),
        (Kind.EBNF, "root ::= nowhere"),
        (Kind.EBNF, 'start ::= "a"'),
        (Kind.EBNF, 'root ::= "a" Token(5)'),
        (Kind.EBNF, 'root ::= "a" <|end|>'),
        (Kind.STRUCTURAL_TAG, "{}"),
        (Kind.STRUCTURAL_TAG, '{"format":{"type":"triggered_tags","triggers":[],"tags":[]}}'),
        (Kind.STRUCTURAL_TAG, '{"format":{"type":"token_triggered_tags","trigger_tokens":[2],"tags":[]}}'),
        (Kind.STRUCTURAL_TAG, '{"format":{"type":"token","token":"<|start|>"}}'),
    ],
)
def test_every_backend_refuses_an_invalid_grammar(library: Library, kind: Kind, source: str) -> None:
    with pytest.raises(InvalidGrammar):
        library.compiled(kind, source)


INT, STR = {"type": "integer"}, {"type": "string"}
WEAKENED: list[tuple[dict[str, object], list[object]]] = [
    ({"type": []}, [1, "a", None]),
    ({"type": "string", "maxLength": -1}, ["a"]),
    ({"type": "array", "maxItems": -1}, [[1]]),
    ({"type": "object", "maxProperties": -1}, [{"a": 1}]),
    ({"oneOf": [STR, {"const": "a"}]}, ["a"]),
    ({"allOf": [STR, {"minLength": 2}]}, ["a", 1]),
    ({"allOf": [{"minLength": 2}], "type": "string"}, ["a", 1]),
    ({"allOf": [{"required": ["a"]}], "type": "object", "properties": {"a": INT}}, [{}]),
    ({"anyOf": [STR, INT], "minLength": 2}, ["a"]),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{}]),
    ({"type": "string", "pattern": "^a+$", "minLength": 2}, ["a"]),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, ["aaa"]),
    ({"type": "string", "format": "date", "maxLength": 2}, ["2020-01-01"]),
    ({"type": "string", "pattern": "^a.*$", "format": "email"}, ["b@c.co"]),
    ({"type": "string", "pattern": "^(?!x)a"}, ["xa"]),
    ({"type": "string", "format": "idn-email"}, ["x"]),
    ({"type": "integer", "multipleOf": 3}, [4]),
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, [3, 5]),
    ({"type": "number", "multipleOf": 0.5}, [1.7]),
    ({"minimum": 3}, [2]),
    ({"minItems": 1}, [[]]),
    ({"pattern": "^a$"}, ["b"]),
    ({"type": "array", "items": INT, "uniqueItems": True}, [[1, 1]]),
    ({"type": "array", "contains": INT}, [["a"]]),
    ({"not": STR}, ["a"]),
    ({"type": "integer", "not": {"const": 1}}, [1]),
    ({"type": "object", "properties": {"a": INT}, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{"a": 1}]),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}}, [{"a": 1}]),
    ({"type": "object", "properties": {"a": INT}, "dependentSchemas": {"a": {"required": ["b"]}}}, [{"a": 1}]),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "dependencies": {"a": ["b"]}}, [{"a": 1}]),
    ({"type": "object", "properties": {"a": INT}, "patternProperties": {"^x": INT}}, [{"xa": "s"}]),
    ({"type": "object", "properties": {"a": INT}, "patternProperties": {"^a": {"maximum": 3}}}, [{"a": 5}]),
    ({"type": "object", "patternProperties": {"^[a-z]+$": INT}, "required": ["a"]}, [{}, {"b": 1}]),
    ({"type": "object", "properties": {"a": INT, "bbb": INT}, "propertyNames": {"maxLength": 2}}, [{"bbb": 1}]),
    ({"type": "object", "properties": {"a": INT}, "unevaluatedProperties": False}, [{"b": 1}]),
    ({"type": "object", "required": ["a"]}, [{}]),
    ({"type": "object", "properties": {"b": INT}, "required": ["a"]}, [{"b": 1}]),
    ({"type": "object", "properties": {"a": INT}, "additionalProperties": False, "required": ["b"]}, [{"a": 1}]),
    ({"type": "string", "enum": ["a", 1]}, [1]),
    ({"type": ["string", "integer"], "enum": ["a", 1, None]}, [None]),
    ({"type": "string", "const": 1}, [1]),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INT}}, [1]),
    ({"$ref": "#x", "$defs": {"q": {"$anchor": "x", "type": "integer"}}}, ["a"]),
    ({"$ref": "#/odd/place", "odd": {"place": {"type": "array", "uniqueItems": True}}}, [[1, 1]]),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"not": INT}}}}, [{"a": [1]}]),
    ({"type": "array", "prefixItems": [INT], "maxItems": 2, "items": STR}, [[1, 2], [1, "a", "b"]]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{}, {"a": 1, "b": 1, "c": 1}]),
    ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 5}, [0.4, 5, 11]),
]


@pytest.mark.parametrize(("source", "invalid"), WEAKENED, ids=lambda value: json.dumps(value)[:60])
def test_no_keyword_is_weakened_silently(library: Library, source: dict[str, object], invalid: list[object]) -> None:
    try:
        compiled = library.compiled(*schema(source), Whitespace.ANY)
    except InvalidGrammar:
        return
    assert [value for value in invalid if library.accepts(compiled, json.dumps(value))] == []


def test_a_refused_keyword_is_named_with_its_place(library: Library) -> None:
    source = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(InvalidGrammar, match="/properties/a/uniqueItems"):
        library.compiled(*schema(source))


def test_a_request_cannot_set_options_of_a_library(library: Library) -> None:
    source = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidGrammar):
        library.compiled(*schema(source))


def test_schemas_that_a_backend_enforces_are_not_refused(library: Library) -> None:
    enforced = [
        POINT,
        {"oneOf": [STR, INT]},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": INT}, "description": "not an assertion"},
        {"type": "string", "format": "date-time"},
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"type": "integer", "minimum": 3, "maximum": 5},
        {"type": "array", "items": INT, "minItems": 1, "maxItems": 2},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^[a-z]+$": INT}, "additionalProperties": False},
    ]
    for source in enforced:
        library.compiled(*schema(source))


def test_a_grammar_loads_from_its_artifact_in_another_backend_object(library: Library, vocabulary: Vocabulary) -> None:
    grammar = parse(*schema(POINT), Whitespace.COMPACT)
    artifact = library.backend.compile(grammar)
    compiled = load_backend(library.name, vocabulary).load(grammar, artifact)
    assert compiled.memory_bytes > 0
    assert library.accepts(compiled, '{"a":1,"b":[]}')


def test_a_grammar_loads_alike_where_it_was_compiled_and_elsewhere(library: Library, vocabulary: Vocabulary) -> None:
    elsewhere = load_backend(library.name, vocabulary)
    point, words = (
        parse(*schema(each), Whitespace.COMPACT)
        for each in (POINT, {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1})
    )
    first, second = (library.backend.compile(grammar) for grammar in (point, words))
    # In the order of compilation, so that the first load is not that of the last compilation; then once more.
    for grammar, artifact in ((point, first), (words, second), (words, second), (point, first)):
        loaded = [each.load(grammar, artifact).matcher() for each in (library.backend, elsewhere)]
        text = '{"a":1,"b":[' if grammar is point else '["a"'
        for token in spell(text):
            assert library.legal(loaded[0]) == library.legal(loaded[1])
            assert all(matcher.accept(token) for matcher in loaded)


def test_unknown_backends_are_not_supported(vocabulary: Vocabulary) -> None:
    with pytest.raises(NotSupported, match="llguidance, xgrammar"):
        load_backend("outlines", vocabulary)


def test_a_tokenizer_that_cannot_be_read_names_its_field(library: Library) -> None:
    broken = Vocabulary.load(b'{"model":{"type":"BPE"}}', 10, (1,))
    with pytest.raises(InvalidField, match="tokenizer_json"):
        load_backend(library.name, broken)


def test_every_ascii_byte_is_legal_as_text(library: Library) -> None:
    legal = library.legal(library.compiled(Kind.REGEX, "[^]*").matcher())
    ascii_tokens = {TEXT_TOKENS[byte] for byte in range(0x80)}
    assert ascii_tokens <= legal


def test_an_artifact_contains_all_that_loading_needs(library: Library, vocabulary: Vocabulary) -> None:
    """The sidecar never compiles: a second backend object gets the same language from the artifact alone."""
    names = {f"name_{i}": {"type": "string", "pattern": f"^[a-z]{{{i},9}}$"} for i in range(8)}
    wide = parse(*schema({"type": "object", "properties": names, "required": list(names)}), Whitespace.COMPACT)
    artifact = library.backend.compile(wide)
    other = parse(Kind.JSON_SCHEMA, "{}", Whitespace.COMPACT)
    compiled = load_backend(library.name, vocabulary).load(other, artifact)
    answer = json.dumps({f"name_{i}": "abcdefghi" for i in range(8)}, separators=(",", ":"))
    assert library.accepts(compiled, answer)
    assert not library.accepts(compiled, "{}")


def test_filling_a_row_changes_no_other_row(library: Library) -> None:
    rows = Rows(np.full((5, library.num_words + 6), 0x5A5A5A5A, dtype=np.int32))
    matcher = library.compiled(Kind.REGEX, "a|b").matcher()
    matcher.fill(rows, 3)
    assert tokens_in(rows.words[3, : library.num_words]) == {*spell("a"), *spell("b")}
    assert (np.delete(rows.words, 3, axis=0) == 0x5A5A5A5A).all()
    assert (rows.words[3, library.num_words :] == 0x5A5A5A5A).all()


JUMP_FORWARD = [
    ((Kind.REGEX, "hello world"), "", "hello world"),
    ((Kind.REGEX, "hello world"), "hel", "lo world"),
    ((Kind.REGEX, "(hello|help) me"), "hel", ""),
    ((Kind.REGEX, "(hello|help) me"), "hell", "o me"),
    ((Kind.REGEX, "(hello|help) me"), "help me", ""),
    ((Kind.REGEX, "a[0-9]+b"), "a", ""),
    (schema({"const": {"a": "abcd"}}), "", '{"a":"abcd"}'),
    (schema({"enum": ["customer", "supplier"]}), '"c', 'ustomer"'),
    ((Kind.CHOICE, '["yes, certainly", "no"]'), "y", "es, certainly"),
    ((Kind.REGEX, "\u00e9t\u00e9 \u65e5\u672c"), "", "\u00e9t\u00e9 \u65e5\u672c"),
]


@pytest.mark.parametrize(("grammar", "prefix", "text"), JUMP_FORWARD)
def test_jump_forward_text_is_proposed_in_legal_tokens(
    library: Library, vocabulary: Vocabulary, grammar: tuple[Kind, str], prefix: str, text: str
) -> None:
    texts = TokenBytes.of(vocabulary)
    matcher = library.compiled(*grammar, Whitespace.COMPACT).matcher()
    assert all(matcher.accept(token) for token in spell(prefix))
    before = library.legal(matcher)
    tokens = matcher.jump_forward_tokens(99)
    proposed = texts.text(tokens)
    # Tokens at the end may be left out, because later text could change them.
    assert text.encode().startswith(proposed)
    assert len(text.encode()) - len(proposed) <= 2
    assert matcher.jump_forward_tokens(2) == tokens[:2]
    assert library.legal(matcher) == before
    assert all(matcher.accept(token) for token in tokens)


def test_a_token_that_a_longer_one_could_replace_is_not_proposed(library: Library) -> None:
    # The vocabulary contains "tru" and "true", and both are possible after "tr".
    matcher = library.compiled(Kind.REGEX, "x(tru|true|truex)y").matcher()
    assert matcher.accept(spell("x")[0])
    assert TokenBytes.of(library.vocabulary).text(matcher.jump_forward_tokens(9)) == b""


def test_nothing_is_proposed_where_the_answer_may_end(library: Library) -> None:
    matcher = library.compiled(Kind.REGEX, "ab?").matcher()
    assert matcher.accept(spell("a")[0])
    assert matcher.jump_forward_tokens(9) == ()
