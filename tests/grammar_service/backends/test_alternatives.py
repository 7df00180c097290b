"""Rewritten schemas accept and reject what the original does, by two independent validators, for every keyword.

Instances come from the schemas themselves: their names, constants, bounds and the values next to them.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from grammar_service.backends.json_schema.alternatives import MAX_PARTS, expand
from grammar_service.backends.json_schema.negation import NoComplement, complement, other_strings
from grammar_service.backends.json_schema.walk import subschemas
from grammar_service.grammar.value import Kind
from tests.grammar_service.conftest import Library

A, B, C = ({"required": [name]} for name in "abc")
STR, INT, OBJ, ARR = ({"type": name} for name in ("string", "integer", "object", "array"))
KIND = {"type": "object", "properties": {"k": {"enum": ["x", "y", "z"]}, "a": INT, "b": STR}}

REWRITTEN: dict[str, Any] = {
    "dependentRequired": {"dependentRequired": {"a": ["b", "c"], "b": []}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"], "b": {"properties": {"c": INT}}, "c": True}},
    "dependentSchemas": {"dependentSchemas": {"a": {"properties": {"b": INT}, "required": ["b"]}, "c": False}},
    "if and then": {"if": A, "then": B},
    "if and else": {"if": A, "else": B},
    "if by a constant": {**KIND, "if": {"properties": {"k": {"const": "x"}}}, "then": A, "else": B},
    "if by two properties": {
        **KIND,
        "if": {"properties": {"k": {"const": "x"}, "a": INT}, "required": ["k"]},
        "then": B,
    },
    "if by type": {"if": STR, "then": {"minLength": 2}, "else": INT},
    "if by a number": {"type": "number", "if": {"minimum": 3}, "then": {"maximum": 5}, "else": {"multipleOf": 2}},
    "if in then": {"if": A, "then": {"if": B, "then": C}},
    "a chain of conditions": {"allOf": [{"if": A, "then": B}, {"if": B, "then": {"properties": {"c": INT}}}]},
    "then alone": {"type": "object", "then": A},
    "not a type": {"not": {"type": ["string", "integer", "number"]}},
    "not two properties": {"type": "object", "not": {"required": ["a", "b"]}},
    "not a constant": {"not": {"const": "ab"}},
    "not a number": {"type": "integer", "not": {"const": 3}},
    "not numbers": {"type": "number", "not": {"enum": [1, 2.5, 2]}},
    "not a boolean": {"not": {"const": True}},
    "not an empty list": {"not": {"enum": [[], {}]}},
    "not values of an enum": {"enum": ["a", "b", 1, None], "not": {"enum": ["a", 1, "c"]}},
    "not strings": {"type": "string", "not": {"enum": ["a", "ab", "b", 'q"', "\u00e9"]}},
    "not a property's value": {**KIND, "not": {"properties": {"k": {"const": "x"}}, "required": ["k"]}},
    "not any": {"not": {"anyOf": [STR, A, {"type": "array", "minItems": 1}]}},
    "not all": {"not": {"allOf": [A, B]}},
    "not not": {"not": {"not": {"type": "object", "required": ["a"]}}},
    **{f"not {key}": {"not": {key: 3}} for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    "not lengths": {"not": {"minLength": 1, "maxLength": 2}},
    "not counts": {"type": "array", "not": {"minItems": 2, "maxItems": 3}},
    "not a reference": {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "string", "maxLength": 1}}},
    "not a condition": {"not": {"if": A, "then": B, "else": C}},
    "not contains": {"type": "array", "not": {"contains": STR}},
    "not everything": {"properties": {"a": {"not": {}}}},
    "not exclusive branches": {"not": {"oneOf": [STR, {"type": "null"}]}},
    "not dependent": {"not": {"dependentRequired": {"a": ["b"]}}},
    "oneOf by required": {"type": "object", "oneOf": [A, B]},
    "oneOf of three": {"oneOf": [{**OBJ, **A}, {**OBJ, **B}, {"maxProperties": 1, **OBJ}]},
    "oneOf by length": {"type": "string", "oneOf": [{"maxLength": 2}, {"minLength": 2}]},
    "oneOf by bounds": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    "oneOf with a constant": {"oneOf": [STR, {"enum": ["a", 1]}]},
    "oneOf beside anyOf": {"oneOf": [STR, INT], "anyOf": [{"minLength": 2}, {"minimum": 3}]},
    "oneOf in a property": {"properties": {"a": {"oneOf": [A, B]}}},
    "oneOf of properties": {"oneOf": [{"properties": {"k": {"const": "x"}}}, {"properties": {"k": {"const": "y"}}}]},
    "contains in few places": {"type": "array", "contains": STR, "maxItems": 3},
    "contains without bounds": {"contains": {"const": 1}, "maxItems": 2},
    "contains anything": {"contains": {}, "minContains": 2, "maxContains": 3},
    "contains what the items are": {"items": INT, "contains": INT, "minContains": 2},
    "contains none": {"contains": STR, "minContains": 0, "maxContains": 0},
    "minContains 0": {"contains": STR, "minContains": 0},
    "propertyNames by pattern": {"propertyNames": {"pattern": "^[ab]"}},
    "propertyNames by a list": {"type": "object", "propertyNames": {"enum": ["a", "b", 1]}},
    "propertyNames by length": {"propertyNames": {"minLength": 2, "maxLength": 3}},
    "propertyNames by what they are not": {"propertyNames": {"not": {"enum": ["a", "ab"]}}},
    "propertyNames by a reference": {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {**STR, "minLength": 2}}},
    "propertyNames false": {"propertyNames": False},
    "uniqueItems of an enum": {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True},
    "uniqueItems of few": {"items": {"enum": [1, 2, 3, 4, 5, 6]}, "uniqueItems": True, "maxItems": 2},
    "uniqueItems of booleans": {"items": {"enum": [True, False, 1]}, "uniqueItems": True},
    "uniqueItems of one": {"uniqueItems": True, "maxItems": 1},
    "several at once": {**KIND, "not": A, "dependentRequired": {"b": ["k"]}, "if": B, "then": {"minProperties": 2}},
    "nested allOf": {
        "allOf": [{"allOf": [{"not": STR}, {"allOf": [{"not": {"const": 1}}]}]}, {"not": {"type": "null"}}]
    },
}
UNTOUCHED: dict[str, Any] = {
    "a negation in a circle": {"not": {"$ref": "#"}},
    "a condition in a circle": {
        "if": {"anyOf": [STR, {"$ref": "#/$defs/a"}]},
        "then": A,
        "$defs": {"a": {"$ref": "#"}},
    },
    "not without other properties": {"not": {"properties": {"a": INT}, "unevaluatedProperties": False}},
    "not without other items": {"type": "array", "not": {"minItems": 1, "unevaluatedItems": False}},
    "not a pattern": {"type": "string", "not": {"pattern": "a"}},
    "not a multiple": {"type": "integer", "not": {"multipleOf": 3}},
    "not an integer": {"type": "number", "not": INT},
    "not items": {"not": {"type": "array", "items": INT}},
    "oneOf by a pattern": {"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
    "contains in any place": {"type": "array", "contains": STR},
    "maxContains": {"type": "array", "contains": STR, "maxContains": 2, "maxItems": 3},
    "uniqueItems of anything": {"type": "array", "items": INT, "uniqueItems": True},
    "uniqueItems of many": {"items": {"enum": [*range(9)]}, "uniqueItems": True},
    "a keyword that a reference leads into": {"properties": {"a": {"$ref": "#/not"}}, "not": {"type": "string"}},
}
SCALARS: list[Any] = [None, True, False, 0, 1, 2, 3, 4, 5, 6, 2.5, 1.5, -1]
SCALARS += ["", "a", "ab", "abc", "b", "x", 'q"', "\u00e9", "\u00e9x"]
OTHERS = [
    {"ab": 1},
    {"abc": 1, "a": 1},
    {"ba": 1},
    {"cab": 1},
    {"a": {"a": 1}},
    {"a": {"b": 1}},
    {"a": {"a": 1, "b": 1}},
]


def instances() -> list[Any]:
    """Return values of every type: all small objects over a few names, all short lists over a few values, and more."""
    draw = random.Random(7)
    objects: list[Any] = [*OTHERS]
    for names in itertools.chain.from_iterable(itertools.combinations("abck", n) for n in range(5)):
        objects += [dict.fromkeys(names, value) for value in (1, "x", None)]
        objects += [{name: draw.choice([1, 2, "x", "y", "z", None, {}]) for name in names} for _ in range(6)]
    few = [1, 2, "a", None, True]
    lists = [list(each) for n in range(4) for each in itertools.product(few, repeat=n)]
    lists += [[draw.randrange(1, 7) for _ in range(draw.randrange(5))] for _ in range(40)]
    return [*SCALARS, *objects, *lists]


def verdicts(schema: Any, values: list[Any]) -> list[tuple[bool, bool]]:
    python, rust = jsonschema.Draft202012Validator(schema), jsonschema_rs.Draft202012Validator(schema)
    return [(python.is_valid(value), rust.is_valid(value)) for value in values]


def keywords(schema: Any) -> set[str]:
    return {key for _, node in subschemas(schema) for key in node}


HANDLED = {"not", "if", "then", "else", "contains", "propertyNames", "uniqueItems", "dependencies", "dependentRequired"}
HANDLED |= {"dependentSchemas", "minContains", "maxContains"}


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_rewritten_schema_means_the_same(name: str) -> None:
    schema, values = REWRITTEN[name], instances()
    rewritten = copy.deepcopy(schema)
    expand(rewritten)
    assert not HANDLED & keywords(rewritten), rewritten
    before, after = verdicts(schema, values), verdicts(rewritten, values)
    # jsonschema does not know `dependencies` in the new draft; the other validator does.
    wrong = [v for v, old, new in zip(values, before, after, strict=True) if old[1] != new[1] or old[1] != new[0]]
    assert wrong == [], (wrong[:3], rewritten)
    assert {old[1] for old in before} == ({True} if name == "minContains 0" else {True, False})


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_has_no_exact_form_stays_as_it_is(name: str) -> None:
    schema = copy.deepcopy(UNTOUCHED[name])
    expand(schema)
    assert schema == UNTOUCHED[name]


def test_a_complement_that_would_hold_itself_is_left_out() -> None:
    schema: Any = {"not": {"unevaluatedItems": {"not": {"$ref": "#"}}}}
    expand(schema)
    assert json.loads(json.dumps(schema)) == schema, "a tree, as JSON has them"
    assert '"not"' in json.dumps(schema)


def random_schema(draw: random.Random, depth: int) -> Any:
    """Return a schema of the keywords that are rewritten, over the names and values of `instances`."""
    leaves = [STR, INT, OBJ, ARR, A, B, True, {"type": "null"}, {"minimum": 2}, {"maxProperties": 2}]
    leaves += [{"const": draw.choice(SCALARS)}, {"enum": draw.sample(SCALARS, 3)}]
    leaves += [{"maxLength": draw.randrange(3)}, {"minItems": draw.randrange(3)}]
    if depth == 0:
        return copy.deepcopy(draw.choice(leaves))

    def inner() -> Any:
        return random_schema(draw, depth - 1)

    made: list[Any] = [
        {"not": inner()},
        {"if": inner(), "then": inner(), "else": inner()},
        {"oneOf": [inner(), inner()]},
        {"anyOf": [inner(), inner()]},
        {"allOf": [inner(), inner()]},
        {"properties": {draw.choice("abk"): inner()}},
        {"dependentSchemas": {draw.choice("ab"): inner()}},
        {"dependentRequired": {"a": [draw.choice("bc")]}},
        {"contains": inner(), "maxItems": 3},
        {"propertyNames": draw.choice([{"pattern": "^a"}, {"maxLength": 1}, {"enum": ["a", "b"]}])},
    ]
    schema = dict(draw.choice(made))
    if draw.random() < 0.5:
        extra = copy.deepcopy(draw.choice(leaves))
        schema |= extra if isinstance(extra, dict) else {}
    return schema


def check_random_schemas(seed: int, count: int) -> int:
    draw, values, changed = random.Random(seed), instances()[::3], 0
    for _ in range(count):
        schema = random_schema(draw, draw.randrange(1, 4))
        rewritten = copy.deepcopy(schema)
        expand(rewritten)
        if rewritten == schema:
            continue
        changed += 1
        before, after = verdicts(schema, values), verdicts(rewritten, values)
        wrong = [v for v, old, new in zip(values, before, after, strict=True) if old != new]
        assert wrong == [], (json.dumps(schema), json.dumps(rewritten), wrong[:3])
    return changed


def test_random_schemas_mean_the_same() -> None:
    assert check_random_schemas(1, 30) > 15


@pytest.mark.slow
def test_many_random_schemas_mean_the_same() -> None:
    assert check_random_schemas(2, 500) > 250


def test_growth_is_bounded() -> None:
    many = {"dependentRequired": {f"p{i}": [f"p{i + 1}"] for i in range(39)}}
    before = copy.deepcopy(many)
    expand(many)
    assert many == before
    deep: Any = {"type": "string"}
    for _ in range(10):
        deep = {"oneOf": [deep, {"not": deep}, {"required": ["a"]}]}
    expand(deep)
    assert len(json.dumps(deep)) < 100 * MAX_PARTS
    with pytest.raises(NoComplement, match="enum"):
        complement({"enum": [str(i) * 9 for i in range(1000)]}, [{"type": "string"}], {})


@pytest.mark.parametrize("texts", [[""], ["a"], ["a", "ab"], ["\\", '"', "]", "^", "-"], ["\u00e9\u00e8", "\u00e9"]])
def test_a_pattern_of_other_strings(texts: list[str]) -> None:
    validator = jsonschema_rs.Draft202012Validator({"pattern": other_strings(texts)})
    for text in [*texts, "", "a", "ab", "abc", "b", "\\", '"', "]]", "^", "-", "\u00e9", "\u00e9\u00e8x", "x\n"]:
        assert validator.is_valid(text) is (text not in texts), text


SERVED: dict[str, tuple[list[Any], list[Any]]] = {
    "dependentRequired": ([{}, {"b": 1}, {"a": 1, "b": 1, "c": 1}], [{"a": 1}, {"a": 1, "c": 1}]),
    "if by a constant": ([{"k": "x", "a": 1}, {"k": "y", "b": "s"}, {"a": 1}], [{"k": "x"}, {"k": "y", "a": 1}]),
    "not two properties": ([{}, {"a": 1}, {"b": 1, "c": 1}], [{"a": 1, "b": 1}]),
    "not strings": (["", "abc", "aa", "q", "\u00e8"], ["a", "ab", "b", 'q"', "\u00e9"]),
    "oneOf by required": ([{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    "contains in few places": ([["a"], [1, "a"], [1, 2, "a"]], [[], [1], [1, 2, 3]]),
    "propertyNames by pattern": ([{}, {"a": 1, "bc": 2}], [{"c": 1}, {"a": 1, "c": 1}]),
    "uniqueItems of an enum": ([[], ["a"], [1, "a", None]], [["a", "a"], [1, "a", 1]]),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_rewritten_schema_is_enforced_by_its_grammar(libraries: Any, name: str) -> None:
    pytest.importorskip("llguidance")
    library: Library = libraries("llguidance")
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(REWRITTEN[name]))
    valid, invalid = SERVED[name]
    assert compiled.warnings == ()
    assert [value for value in valid if not library.accepts(compiled, json.dumps(value, ensure_ascii=False))] == []
    assert [value for value in invalid if library.accepts(compiled, json.dumps(value, ensure_ascii=False))] == []
