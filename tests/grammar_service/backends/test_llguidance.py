"""llguidance only: schemas on which it fails as a whole, and what it refuses by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.llguidance.backend import LlguidanceBackend
from grammar_service.backends.llguidance.loosening import Loosening
from grammar_service.backends.llguidance.notation import Rounds, notation
from grammar_service.errors import GrammarServiceError, InvalidGrammar, LimitExceeded, NotEnforced, NotSupported
from grammar_service.grammar.value import Grammar, Kind, Reading, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.backends.conformance import Schema, closed, const, json_content, structural, tag
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import tokenizer_json

CLOSED = {"type": "object", "additionalProperties": False}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/tree",
    "$defs": {"tree": {**CLOSED, "properties": {"a": {"$ref": "#/$defs/tree", "minProperties": 1}}}},
}
MIXED: dict[str, Any] = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "named": {"properties": {"a": {"allOf": [{"$ref": "#/$defs/tree"}, {"required": ["b"]}]}}},
        "tree": {"type": "object", "properties": {"b": {"type": "boolean"}}, "allOf": [{"$ref": "#/$defs/named"}]},
    },
}
NAMES: dict[str, Any] = {**CLOSED, "patternProperties": {"a": {"type": "boolean"}, "b": {"const": True}}}
SHAPES: dict[str, Any] = {
    "type": "object",
    "anyOf": [{"$ref": "#/$defs/pair"}, {"$ref": "#/$defs/leaf"}],
    "$defs": {
        "shape": {"type": "object", "anyOf": [{"$ref": "#/$defs/pair"}, {"$ref": "#/$defs/leaf"}]},
        "pair": {"type": "object", "properties": {"a": {"$ref": "#/$defs/shape"}}, "required": ["a"]},
        "leaf": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}
TOOLS: dict[str, Any] = {
    "type": "object",
    "oneOf": [{"$ref": "#/$defs/flow"}, {"$ref": "#/$defs/tool"}],
    "properties": {"step": {"type": "object"}, "v": {"const": 1}},
    "required": ["v"],
    "$defs": {
        "flow": {**CLOSED, "properties": {"step": {"$ref": "#/$defs/any"}, "v": {}}, "required": ["step"]},
        "tool": {**CLOSED, "properties": {"name": {"type": "string"}, "v": {}}, "required": ["name"]},
        "any": {"oneOf": [{"$ref": "#/$defs/flow"}, {"$ref": "#/$defs/tool"}], "required": ["v"]},
    },
}


LISTS: dict[str, Any] = {
    "properties": {"x": {"$ref": "#/$defs/kinds"}},
    "required": ["x"],
    "$defs": {
        "plain": {"anyOf": [{"type": "string"}]},
        "base": {"properties": {"of": {"$ref": "#/$defs/plain"}}},
        "kind": {"anyOf": [{"$ref": "#/$defs/list"}, {"enum": ["a"]}]},
        "kinds": {"oneOf": [{"additionalProperties": {"anyOf": [{"$ref": "#/$defs/kind"}]}}]},
        "list": {
            "allOf": [{"$ref": "#/$defs/base"}, {"type": "object", "properties": {"of": {"$ref": "#/$defs/kind"}}}]
        },
    },
}


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else {}


def every(*counts: int) -> dict[str, Any]:
    """Return clauses that only objects satisfy whose depth is a multiple of each count."""
    clauses: list[Any] = [{"$ref": f"#/$defs/{count}_0"} for count in counts]
    definitions = {
        f"{count}_{at}": {
            "additionalProperties": {"$ref": f"#/$defs/{count}_{(at + 1) % count}"},
            **({"minProperties": 1} if at else {}),
        }
        for count in counts
        for at in range(count)
    }
    return {"allOf": clauses, "$defs": definitions}


CYCLES = every(2, 3, 5)
CYCLES["allOf"].insert(0, {"$ref": "#/$defs/word"})
CYCLES["$defs"]["word"] = {**CLOSED, "properties": {"a": {"$ref": "#/$defs/word"}}}
WORDS = {f"^{name}$": {"const": name} for name in "ABCDEFGHIJKLMNOPQRST"}
CASES: dict[str, tuple[Any, str, list[Any], list[Any]]] = {
    "keywords beside a reference": (
        TREE,
        "minProperties: is not enforced next to a reference in a circle",
        [{}],
        [{"a": {}}, {"a": {"a": {}}}, {"b": 1}],
    ),
    "patterns of names": (
        NAMES,
        "patternProperties: 'b' overlaps",
        [{"a": False, "b": True, "ab": True}, {}],
        [{"ab": False}, {"c": 1}, {"b": False}, {"a": 1}],
    ),
    "patterns of names that the library cannot tell apart": (
        {**CLOSED, "patternProperties": {f"^[a-z][0-9_a-z]{{0,245}}_{end}$": {"const": end} for end in ("bin", "hex")}},
        "overlaps another pattern of names",
        [{"a_bin": "bin", "a_hex": "hex"}, {}],
        [{"a_bin": "hex"}, {"a_hex": "bin"}, {"a": "bin"}],
    ),
    "a pattern of names that overlaps more patterns than there are rounds": (
        {**CLOSED, "patternProperties": {"^[A-Z]{1,9}$": {"type": "string"}, **WORDS}},
        "overlaps another pattern of names",
        [{"A": "A", "B": "B", "Z": "any"}, {}],
        [{"A": "B"}, {"Z": 1}, {"a": "a"}],
    ),
    "alternatives in a circle": (
        TOOLS,
        "/properties: is not enforced next to a reference in a circle",
        [{"step": {"name": "a", "v": 2}, "v": 1}, {"name": "a", "v": 1}],
        [{"step": {"name": "a"}, "v": 1}, {"name": "a", "v": 2}, {"name": "a"}],
    ),
    "a member of a clause in a circle": (
        {"type": "object", **LISTS},
        "/properties/of/$ref: a reference in a circle is not followed",
        [{"x": {"y": "a"}}, {"x": {"y": {"of": "a"}}}],
        [{"x": {"y": "b"}}, {"x": {"y": {"of": "b"}}}, {"x": {"y": {"of": {}}}}],
    ),
    "clauses of a schema that grows too large": (
        CYCLES,
        "/allOf/3: is not enforced in a schema this large",
        [nested(30), nested(60)],
        [nested(1), nested(6), nested(15)],
    ),
}


@pytest.fixture
def llguidance(libraries: Callable[[str], Library]) -> Library:
    return libraries("llguidance")


@pytest.mark.parametrize("name", CASES)
def test_a_part_is_refused_by_name_or_verified(llguidance: Library, name: str) -> None:
    schema, named, valid, invalid = CASES[name]
    for judge in (jsonschema.Draft202012Validator(schema), jsonschema_rs.Draft202012Validator(schema)):
        assert [judge.is_valid(each) for each in (*valid, *invalid)] == [True] * len(valid) + [False] * len(invalid)
    with pytest.raises(NotEnforced, match=re.escape(named)):
        llguidance.compiled(Kind.JSON_SCHEMA, json.dumps(schema))
    compiled = llguidance.read(schema, verify=True)
    assert any(line.startswith("verified: ") and named in line for line in compiled.warnings)
    texts = [[json.dumps(each, separators=(",", ":")) for each in values] for values in (valid, invalid)]
    assert [text for text in texts[0] if not llguidance.accepts(compiled, text)] == []
    assert [text for text in texts[1] if llguidance.accepts(compiled, text)] == []


def test_a_reference_in_a_circle_goes_where_other_clauses_hold(llguidance: Library) -> None:
    with pytest.raises(NotEnforced, match="in a circle"):
        llguidance.compiled(Kind.JSON_SCHEMA, json.dumps(MIXED))
    compiled = llguidance.read(MIXED, verify=True)
    assert llguidance.accepts(compiled, '{"b":true}')
    assert llguidance.accepts(compiled, '{"a":{"b":true}}') or llguidance.accepts(compiled, '{"b":true,"a":{"b":true}}')
    assert not llguidance.accepts(compiled, '{"a":{}}')


def test_a_type_that_alternatives_in_a_circle_repeat_is_enforced(llguidance: Library) -> None:
    compiled = llguidance.compiled(Kind.JSON_SCHEMA, json.dumps(SHAPES))
    assert compiled.warnings == ()
    assert llguidance.accepts(compiled, '{"a":{"a":{"n":1}}}')
    assert not any(llguidance.accepts(compiled, text) for text in ('{"a":{"a":{}}}', '{"a":1}', '{"n":"a"}', "1"))
    other = {**SHAPES, "anyOf": [*SHAPES["anyOf"], {"type": "array"}]}
    assert Loosening(lone=frozenset({"#/$defs/pair"})).apply(json.loads(json.dumps(other)), "") == []
    taken = json.loads(json.dumps(other))
    Loosening(lone=frozenset({"#/$defs/pair"})).apply(taken, "")
    assert taken["type"] == "object"
    assert "type" not in taken["$defs"]["shape"]


def test_nothing_is_taken_out_of_a_schema_that_the_library_takes() -> None:
    schema = json.loads(json.dumps(NAMES))
    assert Loosening().apply(schema, "") == []
    assert schema == NAMES
    assert Loosening().further("no such message") is None


def test_the_same_message_again_ends_the_rounds() -> None:
    overlap = "patternProperty regexes /a/ and /b/ are not disjoint"
    loosening = Loosening().further(overlap)
    assert loosening is not None
    assert loosening.further(overlap) is None
    circle = "circular references with sibling keys are not supported: json-schema:///#/$defs/x%20y"
    first = loosening.further(circle)
    assert first is not None
    assert first.lone == {"#/$defs/x y"}
    second = first.further(circle)
    assert second is not None
    assert second.gone == {"#/$defs/x y"}
    assert second.further(circle) is None


NUMBERS = {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}, "maxItems": 3}
SETS = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 1}
NEVER = {
    **CLOSED,
    "properties": {"a": {"$ref": "#/$defs/gone"}, "b": {"$ref": "#/$defs/never"}, "c": {"type": "integer"}},
    "$defs": {"gone": {"not": {}, "title": "removed"}, "never": {"$ref": "#/$defs/no"}, "no": False},
}
DRAFTS = ("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema")
SERVED: dict[str, tuple[Any, list[str], list[str]]] = {
    "a definition that no value satisfies": (NEVER, ['{"c":1}'], ['{"a":1}', '{"b":1}']),
    # Below an older dialect the library passes over `prefixItems`, which is how these keywords are rewritten.
    **{
        f"{name} below {draft}": ({"$schema": draft, **schema}, good, bad)
        for draft in DRAFTS
        for name, schema, good, bad in (
            ("contains", NUMBERS, ["[1]", "[2,1]", "[2,2,1]"], ["[2]", "[]", "[2,2,2]"]),
            ("uniqueItems", SETS, ['["a"]', '["b","a"]'], ["[]", '["a","a"]', '["a","b","a"]']),
        )
    },
    "additionalItems after another keyword": (
        {"type": "array", "items": [{"const": 1}], "anyOf": [{"minItems": 1}], "additionalItems": False},
        ["[1]"],
        ["[]", "[1,2]", "[2]"],
    ),
    "characters that no URI has": (
        {"$ref": "#/definitions/Row<int>", "definitions": {"Row<int>": {"const": 1}}},
        ["1"],
        ["2"],
    ),
    "a class next to the surrogates": (
        {"type": "string", "pattern": "^[ -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]*$"},
        ['"a"'],
        ['"\\n"'],
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_the_library_would_misread_is_served(llguidance: Library, name: str) -> None:
    schema, accepted, rejected = SERVED[name]
    compiled = llguidance.compiled(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT)
    assert [text for text in accepted if not llguidance.accepts(compiled, text)] == []
    assert [text for text in rejected if llguidance.accepts(compiled, text)] == []


def _intersections(count: int) -> Any:
    """Return a schema whose alternatives the library intersects into more than it takes."""
    ways = [[{"properties": {f"p{i}": {"const": j}}} for j in range(3)] for i in range(count)]
    return {"type": "object", "required": ["p0"], "allOf": [{"anyOf": each, "minProperties": 1} for each in ways]}


def test_a_schema_that_is_too_large_as_a_whole_is_verified(llguidance: Library) -> None:
    schema = _intersections(14)
    with pytest.raises(NotEnforced, match="in a schema this large"):
        llguidance.compiled(Kind.JSON_SCHEMA, json.dumps(schema))
    compiled = llguidance.read(schema, verify=True)
    assert llguidance.accepts(compiled, '{"p0":1,"p3":2}')
    assert not llguidance.accepts(compiled, '{"p0":1,"p3":4}')
    assert not llguidance.accepts(compiled, "{}")


def test_a_dynamic_reference_with_several_targets_is_verified(llguidance: Library) -> None:
    tree = {"$id": "http://x.test/tree", "$dynamicAnchor": "n", "type": "object"}
    tree |= {"properties": {"a": {"$dynamicRef": "#n"}}, "additionalProperties": {"type": "boolean"}}
    strict = {
        "$id": "http://x.test/strict",
        "$dynamicAnchor": "n",
        "$ref": "tree",
        "maxProperties": 1,
        "$defs": {"t": tree},
    }
    judge = jsonschema_rs.Draft202012Validator(strict)
    compiled = llguidance.read(strict, verify=True)
    for value in ({}, {"a": {}}, {"b": True}, {"a": {"b": True, "c": True}}, {"b": True, "c": True}):
        text = json.dumps(value, separators=(",", ":"))
        assert llguidance.accepts(compiled, text) == judge.is_valid(value), text


def test_the_lenient_notation_names_what_the_strict_one_refuses(vocabulary: Vocabulary) -> None:
    """A schema is built in the lenient notation alone, so a part that it passed over in silence would be lost."""
    tokenizer = LLTokenizer(tokenizer_json().decode(), n_vocab=vocabulary.size, eos_token=list(vocabulary.stop_ids))
    refused = [
        {"uniqueItems": True},
        {"contains": {"const": 1}},
        {"not": {"pattern": "a"}},
        {"unevaluatedProperties": False, "type": "object"},
        {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
        {"properties": {"a": True}, "maxProperties": 1},
        {"$defs": {"x": {"multipleOf": 2, "not": {"multipleOf": 3}}}, "$ref": "#/$defs/x"},
    ]
    for schema in (*refused, {"type": "string"}, {"maxLength": 3}, CLOSED):
        grammar = parse(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT)
        strict = LLMatcher(tokenizer, notation(grammar, lenient=False)[0], log_level=0)
        lenient = LLMatcher(tokenizer, notation(grammar, lenient=True)[0], log_level=0)
        assert not lenient.is_error()
        assert strict.is_error() == any(lenient.get_grammar_warnings()) == (schema in refused), schema


class CountingBackend(LlguidanceBackend):
    """Counts how often a grammar is built."""

    built = 0

    def _built(self, grammar: Grammar, allow_unenforced: bool) -> tuple[str, list[Unenforced]]:
        self.built += 1
        return super()._built(grammar, allow_unenforced)


def test_a_later_round_reads_a_schema_as_the_first_one_does() -> None:
    places = {name: {**NAMES, "dependentRequired": {"a": ["b"]}} for name in "xy"}
    schema = {"type": "object", "properties": {**places, "z": TREE, "t": {"type": "string", "format": "unheard"}}}
    schema["$defs"] = TREE["$defs"]
    grammar = parse(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT)
    overlap = Loosening(overlaps=frozenset({"a/ and /b"}))
    rounds = Rounds()
    several = [Loosening(), overlap, replace(overlap, lone=frozenset({"#/$defs/tree"}))]
    several += [replace(several[-1], size=size) for size in (1, 2, 3)]
    texts = [notation(grammar, lenient=True, loosening=each, rounds=rounds) for each in several]
    assert texts == [notation(grammar, lenient=True, loosening=each) for each in several]
    assert len({text for text, _ in texts}) > 3


def test_a_grammar_that_was_refused_is_built_once(vocabulary: Vocabulary) -> None:
    backend = CountingBackend(vocabulary)
    for number, keyword in enumerate(({"uniqueItems": True}, {"contains": {"const": 1}}), start=1):
        grammar = parse(Kind.JSON_SCHEMA, json.dumps({"type": "array", **keyword}), Whitespace.COMPACT)
        with pytest.raises(NotEnforced):
            backend.compile(grammar)
        artifact = backend.compile(replace(grammar, reading=Reading(verify=True)), allow_unenforced=True)
        assert backend.built == number
        assert backend.load(grammar, artifact).warnings
    assert backend.compile(parse(Kind.JSON_SCHEMA, "true", Whitespace.COMPACT))
    assert backend.built == 3


TEXT, CLOSED_X = {"type": "any_text"}, json_content(closed(x={"type": "integer"}))
CALLS = [tag("<a>", CLOSED_X, "</a>"), tag("<b>", const("!"), "</b>")]


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        ({"type": "glob"}, NotSupported, "/format/type: this backend supports any_text"),
        ({"type": "sequence"}, InvalidGrammar, "/format/elements"),
        ({"type": "sequence", "elements": [TEXT, CLOSED_X]}, NotSupported, "/format/elements/0: .* after any_text"),
        ({"type": "triggered_tags", "at_least_one": True}, NotSupported, "/format/at_least_one"),
        ({"type": "triggered_tags", "triggers": []}, InvalidGrammar, "/format/triggers"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": []}, InvalidGrammar, "/format/tags"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [1]}, InvalidGrammar, "/format/tags/0"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": ""}]}, InvalidGrammar, "/tags/0/begin"),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("a", CLOSED_X, "")]},
            InvalidGrammar,
            "'a' starts with none of the triggers",
        ),
        (
            {"type": "sequence", "elements": [{"type": "triggered_tags", "triggers": ["<"], "tags": CALLS}, TEXT]},
            NotSupported,
            "/format/elements/0: this backend needs triggered_tags at the end",
        ),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": {"type": "token", "token": 5}}]},
            InvalidGrammar,
            "/format/tags/0: names tokens",
        ),
        ({**CLOSED_X, "style": "qwen_xml"}, NotSupported, "/format/style"),
        ({"type": "repeat", "min": 2, "max": 1, "content": CLOSED_X}, InvalidGrammar, "/format: min and max"),
    ],
)
def test_llguidance_names_the_place_of_what_it_refuses(
    llguidance: Library, form: Schema, error: type[GrammarServiceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        llguidance.compiled(Kind.STRUCTURAL_TAG, json.dumps(structural(form)))


def test_more_alternatives_than_a_row_holds_are_refused_before_a_row_fails(llguidance: Library) -> None:
    source = "start: " + " | ".join(f'"{i}"' for i in range(20_002))
    with pytest.raises(LimitExceeded, match="at most 20000 may be open"):
        llguidance.compiled(Kind.LARK, source)


def llguidance_takes(schema: Schema, text: str) -> bool:
    notated, _ = notation(parse(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT), lenient=True)
    matcher = LLMatcher(LLTokenizer("byte"), notated, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


BIG = 1 << 53
INT64 = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}


@pytest.mark.parametrize(
    ("bounds", "legal", "illegal"),
    [
        ({"minimum": BIG + 1}, [BIG + 2], [BIG, BIG - 9]),
        ({"maximum": BIG + 3}, [BIG + 2], [BIG + 4]),
        ({"exclusiveMinimum": BIG + 1}, [BIG + 3], [BIG, BIG + 1]),
        ({"exclusiveMaximum": -BIG - 3}, [-BIG - 4], [-BIG - 3, -BIG - 2]),
        ({"exclusiveMaximum": BIG + 4, "maximum": BIG + 9}, [BIG + 2], [BIG + 4, BIG + 6]),
        ({"exclusiveMinimum": BIG + 4, "minimum": BIG + 9}, [BIG + 10], [BIG + 4, BIG + 6, BIG + 8]),
        (INT64, [0, -(10**18), 10**18, (1 << 63) - 1, 1024 - (1 << 63)], [1 << 63, -(1 << 63) - 1]),
        ({"minimum": -1e30, "maximum": 0}, [-5, 0, -(10**18)], [1]),
    ],
)
def test_bounds_beyond_doubles_are_rounded_inwards(bounds: Schema, legal: list[int], illegal: list[int]) -> None:
    schema = {"type": "integer", **bounds}
    for values, wanted in ((legal, True), (illegal, False)):
        for value in values:
            assert jsonschema.Draft202012Validator(schema).is_valid(value) == wanted
            assert llguidance_takes(schema, str(value)) == wanted, value


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"const": BIG + 1}, "/const"),
        ({"const": 123456789012345678}, "/const"),
        ({"enum": [1, BIG + 1]}, "/enum/1"),
        ({"const": {"a": [(1 << 64) + 1]}}, "/const"),
        ({"const": 93277170.12350215}, "/const"),
        ({"type": "integer", "minimum": (1 << 63) + 1, "maximum": (1 << 63) + 300}, "/minimum"),
        ({"type": "integer", "maximum": -(1 << 64)}, "/maximum"),
    ],
)
def test_a_number_that_the_library_would_change_is_named(schema: Schema, named: str) -> None:
    _, found = notation(parse(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT), lenient=True)
    assert [f"{part.path}/{part.keyword}" for part in found] == [named]


@pytest.mark.parametrize(
    "value", [BIG, -BIG, BIG + 2, 1 << 62, 10**17, 10**20, True, 0.5, 3.141592653589793, 1e-7, -0.0]
)
def test_a_number_that_the_library_writes_as_it_is_is_taken(value: float) -> None:
    _, found = notation(parse(Kind.JSON_SCHEMA, json.dumps({"const": value}), Whitespace.COMPACT), lenient=True)
    assert not found
    text = json.dumps(value) if isinstance(value, int) else f"{Decimal(repr(value)):f}".removesuffix(".0")
    assert llguidance_takes({"const": value}, text)
