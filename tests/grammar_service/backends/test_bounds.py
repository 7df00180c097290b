"""Bounds of JSON values as grammar, on both libraries: a longer value is illegal, a short valid one stays legal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from grammar_service.backends.backend import Compiled
from grammar_service.errors import InvalidField, InvalidGrammar, LimitExceeded, NotEnforced, NotSupported
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import BOUNDS, Bounds, Kind, Reading, Whitespace, parse
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import STOPS

STR, INT, NUM, ARR, OBJ = ({"type": name} for name in ("string", "integer", "number", "array", "object"))
STRINGS, ITEMS, DIGITS = {"max_string_length": 3}, {"max_array_items": 3}, {"max_number_digits": 3}
FREE: dict[str, Any] = {"max_string_length": 3, "max_array_items": 2, "max_number_digits": 2}
SHORT = ('"abc"', "[[1],[2]]", '{"abc":{"abc":99.25}}', "-99", "true", "null", "[]", "{}")
LONG = ('"abcd"', "[1,2,3]", "[[1,2,3]]", '[["abcd"]]', '{"a":{"b":100}}', '{"a":0.125}', '{"a":[1,2,3]}')
LISTED = {**OBJ, "properties": {"long name": {"enum": ["long value", 12345]}}, "additionalProperties": False}

BOUNDED: list[tuple[Any, dict[str, int], list[str], list[str]]] = [
    (STR, STRINGS, ['""', '"abc"', r'"\n\n\n"'], ['"abcd"', r'"\n\n\n\n"']),
    ({**STR, "minLength": 1}, STRINGS, ['"abc"'], ['""', '"abcd"']),
    ({**STR, "minLength": 3}, STRINGS, ['"abc"'], ['"ab"', '"abcd"']),
    ({**STR, "maxLength": 2}, STRINGS, ['"ab"'], ['"abc"']),
    ({**STR, "maxLength": 9}, STRINGS, ['"abc"'], ['"abcd"']),
    (ARR, ITEMS, ["[]", "[1,2,3]"], ["[1,2,3,4]"]),
    ({**ARR, "items": INT, "minItems": 2}, ITEMS, ["[1,2]", "[1,2,3]"], ["[1]", "[1,2,3,4]"]),
    ({**ARR, "prefixItems": [INT, STR]}, ITEMS, ['[1,"a",3]'], ['[1,"a",3,4]']),
    (INT, DIGITS, ["0", "999", "-999"], ["1000", "-1000"]),
    ({**INT, "minimum": 5}, DIGITS, ["5", "999"], ["4", "1000"]),
    ({**INT, "maximum": 50}, DIGITS, ["50", "-999"], ["51", "-1000"]),
    ({**INT, "maximum": 5000, "minimum": -9}, DIGITS, ["999", "-9"], ["1000", "-10"]),
    (NUM, DIGITS, ["0", "999", "-999.125", "0.5"], ["1000", "0.1234", "1e5", "-1000.5"]),
    # In the places where a schema may be.
    ({**OBJ, "properties": {"a": STR}, "additionalProperties": False}, STRINGS, ['{"a":"abc"}'], ['{"a":"abcd"}']),
    ({**OBJ, "properties": {"a": INT}, "additionalProperties": INT}, DIGITS, ['{"a":1,"b":999}'], ['{"a":1,"b":1000}']),
    ({"$ref": "#/$defs/v", "$defs": {"v": {**ARR, "items": STR}}}, STRINGS, ['["abc"]'], ['["abcd"]']),
    ({"anyOf": [NUM, {"type": "null"}]}, DIGITS, ["999", "null"], ["1000"]),
    # Values without a schema at any depth, and names that no schema lists; what is listed is not bounded.
    *(
        (schema, FREE, [head + text + tail for text in SHORT], [head + text + tail for text in LONG])
        for head, tail, schema in (
            ('{"q":', "}", {}),
            ('{"q":', "}", OBJ),
            ("[", "]", ARR),
            ('{"q":', "}", {"type": ["object", "array", "string", "number"]}),
            ('{"q":', "}", {**OBJ, "properties": {"q": {}}}),
        )
    ),
    ({**OBJ, "properties": {"long name": INT}}, STRINGS, ['{"long name":1,"abc":1}'], ['{"long name":1,"abcdefgh":1}']),
    (
        {**OBJ, "properties": {"long name": INT}, "required": ["long name"]},
        STRINGS,
        ['{"long name":1}'],
        ['{"long name":"a"}', "{}"],
    ),
    (LISTED, FREE, ['{"long name":"long value"}', '{"long name":12345}'], []),
]
OF_LLGUIDANCE: list[tuple[Any, dict[str, int], list[str], list[str]]] = [
    ({**OBJ, "required": ["long name"]}, STRINGS, ['{"long name":1,"abc":2}'], ['{"long name":"abcd"}']),
    ({**ARR, "items": INT, "not": {"minItems": 9}}, ITEMS, ["[1,2,3]"], ["[1,2,3,4]"]),
    ({**STR, "pattern": "^a+$"}, STRINGS, ['"aaa"'], ['"aaaa"']),
]


@pytest.mark.parametrize(("schema", "bounds", "short", "long"), [*BOUNDED, *OF_LLGUIDANCE])
def test_a_longer_value_is_illegal(
    library: Library, schema: Any, bounds: dict[str, int], short: list[str], long: list[str]
) -> None:
    if library.name == "xgrammar" and (schema, bounds, short, long) in OF_LLGUIDANCE:
        with pytest.raises(InvalidGrammar):
            library.read(schema, **bounds)
        return
    made = library.read(schema, **bounds)
    assert [text for text in short if not library.accepts(made, text)] == []
    assert [text for text in long if library.accepts(made, text)] == []


@pytest.mark.parametrize(
    ("whitespace", "most", "wide"), [(Whitespace.COMPACT, 0, 0), (Whitespace.BOUNDED, 3, 8), (Whitespace.ANY, 3, 12)]
)
def test_white_space_is_bounded(library: Library, whitespace: Whitespace, most: int, wide: int) -> None:
    for bound, count in ((3, most), (12, wide)):
        made = library.read({**ARR, "items": INT}, whitespace, max_whitespace=bound)
        assert library.accepts(made, f"[{' ' * count}1]")
        assert not library.accepts(made, f"[{' ' * (count + 1)}1]")


TAG = '{"type":"structural_tag","format":{"type":"json_schema","json_schema":{"type":"string"}}}'
REFUSED: list[tuple[Any, dict[str, int], str]] = [
    ({**OBJ, "properties": {"a": {**STR, "minLength": 4}}}, STRINGS, "max_string_length: /properties/a/minLength is 4"),
    ({**ARR, "minItems": 9}, ITEMS, "max_array_items: /minItems is 9, above the limit of 3"),
    ({**INT, "minimum": 1000}, DIGITS, "max_number_digits: /minimum is 1000"),
    ({**NUM, "exclusiveMaximum": -1000}, DIGITS, "max_number_digits: /exclusiveMaximum is -1000"),
    ({"anyOf": [{**ARR, "minItems": 4}, INT]}, ITEMS, "max_array_items: /anyOf/0/minItems is 4"),
    ({**STR, "pattern": "^a{5}$"}, STRINGS, "max_string_length"),
    ({**OBJ, "properties": {"a": {**STR, "format": "date"}}}, STRINGS, "max_string_length"),
]
REFUSED_BY_XGRAMMAR: list[tuple[Any, dict[str, int], str]] = [
    ({**INT, "multipleOf": 5}, DIGITS, "multipleOf: is not bounded by max_number_digits"),
    ({**NUM, "minimum": 5}, DIGITS, "minimum: has numbers with 6 digits after the point"),
    ({**STR, "pattern": "^a+$"}, STRINGS, "/pattern: is not bounded by max_string_length"),
]


@pytest.mark.parametrize(("schema", "bounds", "message"), REFUSED)
def test_a_minimum_above_the_bound_is_refused_by_name(
    library: Library, schema: Any, bounds: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        library.read(schema, **bounds)


def test_what_xgrammar_does_not_bound_it_refuses_by_name(libraries: Any) -> None:
    library: Library = libraries("xgrammar")
    for schema, bounds, message in REFUSED_BY_XGRAMMAR:
        with pytest.raises(NotEnforced, match=message):
            library.read(schema, **bounds)
    with pytest.raises(NotSupported, match="max_array_items"):
        library.read(TAG, kind=Kind.STRUCTURAL_TAG, **ITEMS)


def test_schemas_in_other_grammars_are_bounded(libraries: Any) -> None:
    library: Library = libraries("llguidance")
    for kind, source, head in ((Kind.STRUCTURAL_TAG, TAG, ""), (Kind.LARK, 'start: "=" %json {"type":"string"}', "=")):
        made = library.read(source, kind=kind, **STRINGS)
        assert library.accepts(made, head + '"abc"')
        assert not library.accepts(made, head + '"abcd"')


def test_the_key_of_a_grammar_has_its_bounds() -> None:
    plain = parse(Kind.JSON_SCHEMA, "{}", Whitespace.COMPACT)
    bounds: list[dict[str, Any]] = [{name: value} for name in BOUNDS for value in (1, 2)]
    keys = {replace(plain, reading=replace(Reading(), **one)).key("llguidance") for one in bounds}
    assert len(keys | {plain.key("llguidance")}) == 9


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_out_of_range_names_itself(name: str) -> None:
    with pytest.raises(InvalidField, match=f"^{name}: -1 is not in"):
        Bounds(**{name: -1})
    with pytest.raises(InvalidField, match=f"^{name}: "):
        Bounds(**{name: BOUNDS[name] + 1})


# -- properties -----------------------------------------------------------------------------------------------------

LIMITS = Bounds(max_string_length=4, max_array_items=2, max_number_digits=2)


def obeys(value: Any, *, listed: bool = True, longer_names: int = 0) -> bool:
    """Return whether every value inside obeys LIMITS. `listed`: or is one that `random_schema` lists."""

    def inner(each: Any) -> bool:
        return obeys(each, listed=listed, longer_names=longer_names)

    if isinstance(value, str):
        return len(value) <= LIMITS.max_string_length or (listed and value == "a long value")
    if isinstance(value, list):
        return len(value) <= LIMITS.max_array_items and all(map(inner, value))
    if isinstance(value, dict):
        longest = LIMITS.max_string_length + longer_names
        names = all(len(name) <= longest or name == "a long name" for name in value)
        return names and all(map(inner, value.values()))
    if isinstance(value, bool) or value is None:
        return True
    whole, _, rest = repr(value).lstrip("-").partition(".")
    return len(whole) <= LIMITS.max_number_digits and len(rest) <= LIMITS.max_number_digits


def random_schema(draw: random.Random, depth: int = 3) -> Any:
    """Return a schema that llguidance enforces, with unbounded and bounded values of all types."""

    def inner() -> Any:
        return random_schema(draw, depth - 1)

    kinds = ["string", "integer", "number", "enum", "free", "array", "object", "any of", "all of", "not", "ref", "if"]
    kind = draw.choice(kinds if depth else kinds[:4])
    some = {keyword: value for keyword, value in {"a": 0, "b": 1}.items() if draw.random() < 0.5}
    if kind == "string":
        return {
            **STR,
            **draw.choice([{}, {"minLength": 2}, {"maxLength": 9}, {"pattern": "a+"}, {"pattern": "^[ab]*$"}]),
        }
    own: list[dict[str, Any]]
    if kind in ("integer", "number"):
        own = [{}, {"minimum": 7}, {"maximum": 700}, {"exclusiveMaximum": 50, "minimum": -500}, {"multipleOf": 5}]
        return {"type": kind, **draw.choice(own)}
    if kind == "enum":
        return {"enum": ["a", "a long value", 12.5, None]}
    if kind == "array":
        own = [{}, {"items": inner()}, {"prefixItems": [inner()], "items": inner()}, {"items": inner(), "minItems": 1}]
        return {**ARR, **draw.choice(own)}
    if kind == "object":
        members = {name: inner() for name in ("a", "b", "a long name") if draw.random() < 0.6}
        own = [{}, {"additionalProperties": False}, {"additionalProperties": inner()}, {"required": [*members][:1]}]
        return {**OBJ, "properties": members, **draw.choice(own)}
    if kind == "any of":
        return {"anyOf": [inner(), inner()]}
    if kind == "all of":
        return {**OBJ, "properties": {"a": inner()}, "allOf": [{"required": ["a"]}, {"properties": {"b": inner()}}]}
    if kind == "not":
        return {**OBJ, "properties": {"a": STR, "b": inner()}, "not": {"required": ["a"]}}
    if kind == "if":
        rest = {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}}
        return {**OBJ, "properties": {"a": INT, "b": inner()}, **rest}
    return {"$ref": "#/$defs/r"} if kind == "ref" else ({} if some else True)


def random_value(draw: random.Random, depth: int = 3) -> Any:
    kind = draw.choice(["string", "number", "array", "object", "word"] if depth else ["string", "number", "word"])
    if kind == "string":
        return draw.choice(["", "a", "ab", "aaaa", "aaaaa", "zz", "a long value"])
    if kind == "number":
        return draw.choice([0, 7, -5, 45, 99, 100, 700, 12.5, 0.25, -0.125, 50])
    if kind == "array":
        return [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == "object":
        names = ["a", "b", "c", "cccc", "ccccc"]
        return {name: random_value(draw, depth - 1) for name in names if draw.random() < 0.4}
    return draw.choice([True, False, None])


def documents(draw: random.Random, count: int) -> Iterator[Any]:
    for _ in range(count):
        schema = random_schema(draw)
        if isinstance(schema, dict):
            target = random_schema(draw, 1)
            # A definition that refers to itself alone has no answer.
            yield {**schema, "$defs": {"r": {} if isinstance(target, dict) and "$ref" in target else target}}


def answer(library: Library, made: Compiled, draw: random.Random) -> str:
    """Return an answer of random legal tokens, or "" where it does not end."""
    matcher, texts = made.matcher(), TokenBytes.of(library.vocabulary).texts
    tokens: list[int] = []
    for _ in range(300):
        row = {token for token in library.legal(matcher) if texts[token].isascii()}
        assert row, (made, b"".join(texts[token] for token in tokens))
        ends = [token for token in row if not set(texts[token]).isdisjoint(b'"]}')]
        stops = sorted(row & set(STOPS))
        token = (
            stops[0]
            if stops and draw.random() < 0.7
            else draw.choice(sorted(ends if ends and draw.random() < 0.4 else row))
        )
        if token in STOPS:
            return b"".join(texts[token] for token in tokens).decode()
        assert matcher.accept(token)
        tokens.append(token)
    return ""


def check(library: Library, seed: int, count: int) -> tuple[int, int]:
    """Check random schemas; return the numbers of answers and of instances that were compared."""
    draw, answers, instances = random.Random(seed), 0, 0
    bounds = {name: getattr(LIMITS, name) for name in BOUNDS}
    # xgrammar counts a name from where it differs from every listed one.
    longer_names = len("a long name") + 1 if library.name == "xgrammar" else 0
    for schema in documents(draw, count):
        try:
            plain = library.read(schema)
            made = library.read(schema, **bounds)
        except (InvalidGrammar, LimitExceeded):
            continue  # what is refused gives no answer
        python, rust = jsonschema.Draft202012Validator(schema), jsonschema_rs.Draft202012Validator(schema)
        for _ in range(4):
            text = answer(library, made, draw)
            if text:
                value = json.loads(text)
                assert python.is_valid(value), (schema, text)
                assert rust.is_valid(value), (schema, text)
                assert obeys(value, longer_names=longer_names), (schema, text)
                answers += 1
        for _ in range(30):
            value = random_value(draw)
            text = json.dumps(value, separators=(",", ":"))
            before, after = library.accepts(plain, text), library.accepts(made, text)
            assert before or not after, (schema, text)
            if obeys(value, listed=False):
                assert before == after, (schema, text)
                instances += before
    return answers, instances


def test_answers_are_valid_and_short_and_no_short_one_is_lost(library: Library) -> None:
    answers, instances = check(library, 1, 40)
    assert answers > 30
    assert instances > 30


@pytest.mark.slow
def test_answers_of_many_schemas_are_valid_and_short(library: Library) -> None:
    answers, instances = check(library, 2, 250)
    assert answers > 160
    assert instances > 160
