"""The conformance suite: every library accepts and refuses the same texts of every kind of grammar."""

from __future__ import annotations

import copy
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest

from grammar_service.backends.backend import spelled_freely
from grammar_service.backends.json_schema.draft_3 import write_draft_3
from grammar_service.backends.json_schema.references import write_pointers
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.backends.registry import load_backend
from grammar_service.errors import InvalidField, InvalidGrammar, NotEnforced, NotSupported
from grammar_service.grammar.value import Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.backends.conformance import (
    ARR,
    CASES,
    DIFFERENCES,
    DRAFT,
    INT,
    NAME,
    OBJ,
    OLD_SCHEMAS,
    OTHER_DIALECT,
    REFERENCES,
    REFUSALS,
    STR,
    WEAKENED,
    Case,
    Refusal,
    Schema,
    closed,
    json_content,
    structural,
    tag,
    triggered,
)
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import SPECIAL, STOPS, spell, tokenizer_json


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:60])
def test_a_grammar_has_one_language_on_every_backend(library: Library, case: Case) -> None:
    difference = DIFFERENCES.get((case.name, library.name))
    if difference and difference.error is None:
        pytest.skip(difference.reason)
    if difference and difference.error:
        with pytest.raises(difference.error, match=difference.reason):
            library.compiled(case.kind, case.text, case.whitespace)
        return
    compiled = library.compiled(case.kind, case.text, case.whitespace)
    assert [text for text in case.accepted if not library.accepts(compiled, text)] == []
    assert [text for text in case.rejected if library.accepts(compiled, text)] == []
    assert len(compiled.warnings) == bool(case.warning)
    assert all(line.startswith(case.warning) for line in compiled.warnings)


def test_a_difference_names_a_case() -> None:
    assert {name for name, _ in DIFFERENCES} <= {case.name for case in CASES}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.kind.name} {refusal.text[:60]}")
def test_no_backend_serves_a_grammar_that_is_wrong(library: Library, vocabulary: Vocabulary, refusal: Refusal) -> None:
    def compile_as_the_sidecar_does() -> None:
        vocabulary.refuse_special(parse(refusal.kind, refusal.text, Whitespace.COMPACT))
        library.compiled(refusal.kind, refusal.text)

    with pytest.raises(refusal.error, match=refusal.reason) as failed:
        compile_as_the_sidecar_does()
    assert isinstance(failed.value, InvalidGrammar | NotSupported)


@pytest.mark.parametrize(("schema", "invalid"), WEAKENED, ids=lambda value: json.dumps(value)[:60])
def test_no_keyword_is_weakened_silently(library: Library, schema: Schema, invalid: list[Any]) -> None:
    try:
        compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.ANY)
    except InvalidGrammar:
        return
    assert [value for value in invalid if library.accepts(compiled, json.dumps(value))] == []


def texts_of(values: Any) -> list[bytes]:
    return [text.encode() for text in values]


@pytest.mark.parametrize("case", REFERENCES, ids=lambda case: case.name)
def test_references_lead_where_the_specification_says(case: Case) -> None:
    # A document is taken as read from the URL that it gives itself.
    judge = jsonschema_rs.validator_for(case.source, base_uri=case.source.get("$id"))
    validator = Validator(case.text)
    for texts, valid in ((case.accepted, True), (case.rejected, False)):
        assert [text for text in texts if judge.is_valid(json.loads(text)) != valid] == []
        assert [text for text in texts if validator.is_valid(text.encode()) != valid] == []
    schema = copy.deepcopy(case.source)
    write_pointers(schema)
    again = copy.deepcopy(schema)
    write_pointers(again)
    assert again == schema


@pytest.mark.parametrize("case", OLD_SCHEMAS, ids=lambda case: case.name[:60])
def test_the_validator_reads_draft_3(case: Case) -> None:
    validator = Validator(case.text)
    assert [text for text in case.accepted if not validator.is_valid(text.encode())] == []
    assert [text for text in case.rejected if validator.is_valid(text.encode())] == []


def test_a_document_without_names_stays_as_it_is() -> None:
    schema: Schema = {
        "properties": {"a": {"$ref": "#/$defs/x y"}, "id": {"const": 1}},
        "$defs": {"x y": {"type": "string", "$comment": "id"}},
    }
    before = copy.deepcopy(schema)
    write_pointers(schema)
    assert schema == before
    other = {"$schema": DRAFT(4), "extends": INT, "divisibleBy": 2, "type": "any"}
    before = copy.deepcopy(other)
    write_draft_3(other, "")
    assert other == before


# -- what is not enforced, and dialects -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected", "warnings"),
    [
        (
            closed(a={**ARR, "items": INT, "uniqueItems": True}),
            '{"a":[1,1]}',
            '{"a":["x"]}',
            ["/properties/a/uniqueItems: is not enforced"],
        ),
        ({**STR, "pattern": "^(?!a+)b*$", "maxLength": 2}, '"a"', '"abc"', ["/pattern: .*look-around"]),
        (
            {**ARR, "contains": {**OBJ, "requried": ["a"]}},
            "[]",
            "1",
            ["/contains: is not enforced", "/contains/requried"],
        ),
    ],
)
def test_an_allowed_unenforced_part_is_left_out_with_a_warning(
    library: Library, schema: Schema, accepted: str, rejected: str, warnings: list[str]
) -> None:
    grammar = parse(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT)
    with pytest.raises(NotEnforced):
        library.backend.compile(grammar)
    compiled = library.backend.load(grammar, library.backend.compile(grammar, allow_unenforced=True))
    assert library.accepts(compiled, accepted)
    assert not library.accepts(compiled, rejected)
    assert len(compiled.warnings) == len(warnings)
    assert all(re.search(wanted, line) for wanted, line in zip(warnings, compiled.warnings, strict=True))


def test_a_strict_server_refuses_an_unknown_format(library: Library) -> None:
    with pytest.raises(NotEnforced, match="/format: 'float' is not enforced"):
        library.read({**STR, "format": "float"}, strict_formats=True)
    assert library.read({**STR, "format": "uri-reference"}, strict_formats=True).warnings == ()


def with_metaschema(required: bool) -> str:
    vocabularies = {"https://json-schema.org/draft/2020-12/vocab/core": True, "http://x.test/units": required}
    metaschema = {"$id": OTHER_DIALECT, "$vocabulary": vocabularies}
    return json.dumps(
        {"$id": "http://x.test/root", "$schema": OTHER_DIALECT, **closed(a=INT), "$defs": {"m": metaschema}}
    )


def test_a_dialect_that_requires_an_unknown_vocabulary_is_refused(library: Library) -> None:
    with pytest.raises(InvalidGrammar, match=r"requires the vocabulary 'http://x\.test/units'"):
        library.compiled(Kind.JSON_SCHEMA, with_metaschema(True))
    with pytest.raises(InvalidGrammar, match="requires the vocabulary"):
        Validator(with_metaschema(True))
    assert len(library.compiled(Kind.JSON_SCHEMA, with_metaschema(False)).warnings) == 1


# -- special tokens -------------------------------------------------------------------------------------------------


def triggered_json(begin: str, schema: Any, end: str, trigger: str) -> tuple[Kind, str]:
    return Kind.STRUCTURAL_TAG, json.dumps(structural(triggered(trigger, tag(begin, json_content(schema), end))))


def byte_texts() -> dict[int, bytes]:
    """Return token -> bytes, without special tokens."""
    vocab = json.loads(tokenizer_json())["model"]["vocab"]
    bytes_of = {text: i - len(SPECIAL) for text, i in vocab.items() if len(SPECIAL) <= i < len(SPECIAL) + 256}
    return {i: bytes(bytes_of[c] for c in text) for text, i in vocab.items() if i >= len(SPECIAL)}


AS_TEXT = [
    (Kind.JSON_SCHEMA, json.dumps({"const": NAME}), json.dumps(NAME)),
    (Kind.JSON_SCHEMA, json.dumps({"enum": [NAME, "<|end|>"]}), '"<|end|>"'),
    (Kind.JSON_SCHEMA, json.dumps({**closed(**{NAME: {"const": 1}}), "required": [NAME]}), f'{{"{NAME}":1}}'),
    (Kind.JSON_SCHEMA, json.dumps({**STR, "pattern": "^<\\|start[|]>$"}), json.dumps(NAME)),
    (Kind.JSON_SCHEMA, "{}", json.dumps({NAME: NAME}, separators=(",", ":"))),
    (Kind.CHOICE, json.dumps([NAME, "other"]), NAME),
    (Kind.REGEX, r"\x3c[|]start\|>", NAME),
    (Kind.REGEX, ".*", NAME),
    (Kind.EBNF, 'root ::= "<|sta" "rt|>"', NAME),
    (Kind.EBNF, r'root ::= "\x3c|start|>"', NAME),
    (Kind.EBNF, 'root ::= a "start|>"\na ::= [<] "|"', NAME),
    (Kind.EBNF, "root ::= [^x]*", NAME),
    (Kind.LARK, 'start: "<|sta" "rt|>"', NAME),
    (Kind.LARK, r"start: /<\|start\|>/", NAME),
    (Kind.LARK, 'start: "<|STArt|>"i', NAME),
    (Kind.LARK, r'start: %json {"const": "<\u007cstart|>"}', json.dumps(NAME)),
    (*triggered_json(NAME, {"const": 1}, "<|end|>", "<|st"), f"x{NAME}1<|end|>y"),
    (*triggered_json("<f>", {"const": NAME}, "</f>", "<f"), f'x<f>"{NAME}"</f>y'),
]


@pytest.mark.parametrize(("kind", "source", "text"), AS_TEXT, ids=lambda value: str(value)[:40])
def test_the_name_of_a_special_token_is_spelled_with_other_tokens(
    library: Library, kind: Kind, source: str, text: str
) -> None:
    if kind is Kind.LARK and library.name == "xgrammar":
        pytest.skip("xgrammar has no Lark")
    matcher = library.compiled(kind, source, Whitespace.COMPACT).matcher()
    texts, rest = byte_texts(), text.encode()
    while rest:
        legal = library.legal(matcher)
        assert 2 not in legal
        # Jump-forward text is legal in canonical tokens only, so the longest token that fits is chosen.
        fitting = [token for token in legal if token in texts and rest.startswith(texts[token])]
        assert fitting, rest
        token = max(fitting, key=lambda each: len(texts[each]))
        assert matcher.accept(token)
        rest = rest[len(texts[token]) :]
    assert library.legal(matcher) & set(range(len(SPECIAL))) == set(STOPS)
    assert not matcher.accept(2)
    assert matcher.accept(STOPS[0])


def test_a_token_name_in_a_description_is_harmless(library: Library) -> None:
    schema = {**INT, "description": NAME, "x": {"x-guidance": NAME}}
    assert library.compiled(Kind.JSON_SCHEMA, json.dumps(schema)).matcher().accept(spell("1")[0])


# -- white space ----------------------------------------------------------------------------------------------------

SPACES = " \n\t  \r  " * 5
"""All four characters, longer than any bound."""
LONGEST = {Whitespace.COMPACT: 0, Whitespace.BOUNDED: 8, Whitespace.ANY: 40}
AB = "{ 'a' : 1 , 'b' : 2 }"
AS_PROPERTIES = {"a": INT, "b": INT}
SHAPES: list[tuple[str, Any, str]] = [
    ("properties", {**OBJ, "properties": {**AS_PROPERTIES, "c": INT}, "required": ["a", "b"]}, AB),
    ("optional properties", {**OBJ, "properties": {"x": INT, "a": INT, "y": INT, "b": INT}}, AB),
    ("closed", closed(a=INT, b=INT), AB),
    ("additional", {**OBJ, "properties": {"a": INT}}, AB),
    ("free object", OBJ, "{ 'a' : [ 1 , { 'q' : null } , [ ] , { } ] , 'b' : 'x' }"),
    ("additionalProperties", {**OBJ, "additionalProperties": INT}, AB),
    ("patternProperties", {**ARR, "items": {**OBJ, "patternProperties": {"^[ab]$": INT}}}, f"[ {AB} , {AB} ]"),
    ("propertyNames", {**OBJ, "propertyNames": {"enum": ["a", "b"]}}, AB),
    ("minProperties", {**OBJ, "minProperties": 1}, AB),
    ("maxProperties", {**OBJ, "maxProperties": 2}, AB),
    ("minItems, maxItems", {**ARR, "items": INT, "minItems": 2, "maxItems": 4}, "[ 1 , 2 , 3 ]"),
    ("prefixItems", {**ARR, "prefixItems": [INT, INT]}, "[ 1 , 2 , 'x' ]"),
    ("free array", ARR, "[ 1 , [ 'x' , true ] , { } ]"),
    ("empty object", closed(), "{ }"),
    ("empty array", {**ARR, "maxItems": 0}, "[ ]"),
    ("anyOf", {"anyOf": [{**ARR, "items": INT}, OBJ]}, AB),
    ("recursion", {**ARR, "items": {"$ref": "#"}}, "[ [ ] , [ [ ] ] ]"),
    ("any value", {}, "[ { 'a' : [ ] } , 1 ]"),
]


def check_spaces(library: Library, kind: Kind, source: str, spaced: str, before: str = "", after: str = "") -> None:
    """Check that each place of white space in an answer takes as much as each policy says."""
    parts = spaced.replace("'", '"').split(" ")
    for whitespace, longest in LONGEST.items():
        compiled = library.compiled(kind, source, whitespace)
        for i in range(1, len(parts)):
            for count in (0, 1, 8, 9, 16):
                text = "".join(parts[:i]) + SPACES[:count] + "".join(parts[i:])
                assert library.accepts(compiled, before + text + after) is (count <= longest), (text, count)


@pytest.mark.parametrize(("schema", "text"), [shape[1:] for shape in SHAPES], ids=[shape[0] for shape in SHAPES])
def test_the_bound_of_white_space_holds_everywhere(library: Library, schema: Any, text: str) -> None:
    check_spaces(library, Kind.JSON_SCHEMA, json.dumps(schema), text)


def test_the_bound_of_white_space_holds_in_other_kinds(library: Library) -> None:
    check_spaces(library, Kind.JSON_OBJECT, "", AB)
    kind, source = triggered_json("<f=a>", closed(a=INT, b=ARR), "</f>", "<f=")
    check_spaces(library, kind, source, "{ 'a' : 1 , 'b' : [ 1 , { } ] }", f"free {SPACES} text <f=a>", f"</f>{SPACES}")
    if library.name == "llguidance":
        check_spaces(library, Kind.LARK, 'start: "x" %json {"type": "array"}', "[ 1 , 2 ]", "x")


@pytest.mark.parametrize(("schema", "text"), [shape[1:] for shape in SHAPES], ids=[shape[0] for shape in SHAPES])
def test_spaced_is_the_layout_of_json_dumps_and_no_other(library: Library, schema: Any, text: str) -> None:
    check_spaced(library, Kind.JSON_SCHEMA, json.dumps(schema), text)


def test_spaced_is_one_layout_in_other_kinds(library: Library) -> None:
    kind, source = triggered_json("<f=a>", closed(a=INT, b=ARR), "</f>", "<f=")
    check_spaced(library, kind, source, "{ 'a' : 1 , 'b' : [ 1 , { } ] }", "<f=a>", "</f>")
    if library.name == "llguidance":
        check_spaced(library, Kind.LARK, 'start: "x" %json {"type": "array"}', "[ 1 , 2 ]", "x")


def check_spaced(library: Library, kind: Kind, source: str, text: str, before: str = "", after: str = "") -> None:
    compiled = library.compiled(kind, source, Whitespace.SPACED)
    wanted = json.dumps(json.loads(text.replace("'", '"')))
    assert library.accepts(compiled, before + wanted + after)
    places = [at for at in range(1, len(wanted)) if not wanted[at - 1].isalpha() or not wanted[at].isalpha()]
    others = {wanted[:at] + " " + wanted[at:] for at in places if '"' not in (wanted[at - 1], wanted[at])}
    others |= {wanted[:at] + wanted[at + 1 :] for at, character in enumerate(wanted) if character == " "}
    assert [other for other in sorted(others) if library.accepts(compiled, before + other + after)] == []


def test_white_space_inside_strings_and_around_answers_is_not_the_policys(library: Library) -> None:
    compiled = library.compiled(Kind.JSON_SCHEMA, '{"enum": ["a  b", "whitespace{0, 8}"]}', Whitespace.COMPACT)
    assert library.accepts(compiled, '"a  b"')
    assert library.accepts(compiled, '"whitespace{0, 8}"')
    spaced = library.compiled(Kind.JSON_SCHEMA, json.dumps(closed(a=INT)), Whitespace.ANY)
    assert not library.accepts(spaced, ' {"a":1}')
    assert not library.accepts(spaced, '{"a":1} ')


ONLY_TRUE = {
    Kind.CHOICE: '["true"]',
    Kind.REGEX: "true",
    Kind.JSON_SCHEMA: '{"const": true}',
    Kind.EBNF: 'root ::= "true"',
    Kind.LARK: 'start: "true"',
}


@pytest.mark.parametrize("kind", ONLY_TRUE)
def test_a_freely_spelled_grammar_allows_every_spelling_of_its_only_text(library: Library, kind: Kind) -> None:
    if kind is Kind.LARK and library.name == "xgrammar":
        pytest.skip("xgrammar reads no Lark")
    compiled = spelled_freely(library.compiled(kind, ONLY_TRUE[kind], Whitespace.COMPACT))
    t, r, u, e = spell("true")
    tr, tru, true = 261, 262, 263  # tokens of the toy vocabulary
    spellings = [(true,), (tru, e), (tr, u, e), (t, r, u, e)]
    for spelling in spellings:
        matcher = compiled.matcher()
        for at, token in enumerate(spelling):
            assert library.legal(matcher) == {each[at] for each in spellings if each[:at] == spelling[:at]}
            assert matcher.accept(token)
        assert library.legal(matcher) == set(STOPS)
    assert spelled_freely(compiled) is compiled


def test_every_caller_gets_a_freely_spelled_grammar_that_is_ready(library: Library) -> None:
    names = {f"name_{i}": {"type": "string", "pattern": f"^[a-z]{{{i},9}}$"} for i in range(8)}
    compiled = library.read({**closed(**names), "required": list(names)})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(spelled_freely, [compiled] * 4))
    assert len(set(map(id, found))) == 1
    assert len(library.legal(found[0].matcher())) == 2, "`{` and the token that goes on after it"


# -- backends and artifacts -----------------------------------------------------------------------------------------


def test_an_artifact_contains_all_that_loading_needs(library: Library, vocabulary: Vocabulary) -> None:
    """The sidecar never compiles: a second backend object gets the same language from the artifact alone."""
    names = {f"name_{i}": {"type": "string", "pattern": f"^[a-z]{{{i},9}}$"} for i in range(8)}
    wide = parse(Kind.JSON_SCHEMA, json.dumps({**closed(**names), "required": list(names)}), Whitespace.COMPACT)
    artifact = library.backend.compile(wide)
    other = parse(Kind.JSON_SCHEMA, "{}", Whitespace.COMPACT)
    compiled = load_backend(library.name, vocabulary).load(other, artifact)
    assert compiled.memory_bytes > 0
    answer = json.dumps({f"name_{i}": "abcdefghi" for i in range(8)}, separators=(",", ":"))
    assert library.accepts(compiled, answer)
    assert not library.accepts(compiled, "{}")


def test_a_grammar_loads_alike_where_it_was_compiled_and_elsewhere(library: Library, vocabulary: Vocabulary) -> None:
    elsewhere = load_backend(library.name, vocabulary)
    sources = closed(a=INT), {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1}
    grammars = [parse(Kind.JSON_SCHEMA, json.dumps(each), Whitespace.COMPACT) for each in sources]
    artifacts = [library.backend.compile(grammar) for grammar in grammars]
    # In the order of compilation, so that the first load is not that of the last compilation; then once more.
    for i in (0, 1, 1, 0):
        here, there = (each.load(grammars[i], artifacts[i]).matcher() for each in (library.backend, elsewhere))
        for token in spell(('{"a":1', '["a"')[i]):
            assert library.legal(here) == library.legal(there)
            assert here.accept(token)
            assert there.accept(token)


def test_wrong_backends_and_tokenizers_are_refused_by_name(library: Library, vocabulary: Vocabulary) -> None:
    with pytest.raises(NotSupported, match="llguidance, xgrammar"):
        load_backend("outlines", vocabulary)
    broken = Vocabulary.load(b'{"model":{"type":"BPE"}}', 10, (1,))
    with pytest.raises(InvalidField, match="tokenizer_json"):
        load_backend(library.name, broken)
