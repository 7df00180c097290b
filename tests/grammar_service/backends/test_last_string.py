"""The ends of a string: judged as the validator judges the whole text, wherever the string is."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from grammar_service.backends.json_schema.places import Place, behind, string_start
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.backends.last_string import Check, LastString, check_of
from grammar_service.backends.value_tokens import MAX_KEPT, ValueTokens
from grammar_service.grammar.mask_rows import token_ids
from grammar_service.grammar.vocabulary import Vocabulary

WORDS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
TEXT = {"type": "string", "maxLength": 9}
ENDS = {0: b'"', 1: b'b"', 2: b'\\n"', 3: '\u00e9"'.encode(), 4: b'\\u0061"'}
PIECES = ["", "a", "b", "ab", "\\n", "\u00e9", "\\u0061", '\\"', "\\\\"]


def place_of(text: bytes) -> Place:
    place = Place()
    for byte in text:
        place = behind(place, byte)
    return place


@pytest.mark.parametrize(
    ("text", "start"), [(b'"', 0), (b'["a","b', 5), (b'["a\\"b', 1), (b'["a\\\\","\\"\\"', 7), (b'{"a":"', 5)]
)
def test_the_string_that_is_open_begins_at_its_quote(text: bytes, start: int) -> None:
    assert string_start(text) == start
    assert place_of(text).in_string


@pytest.mark.parametrize(
    ("schema", "path", "check"),
    [
        ({"properties": {"a": TEXT}}, ["a"], Check.NOTHING),
        ({"properties": {"a": WORDS}}, ["a", 1], Check.UNIQUE),
        ({"properties": {"a": {"$ref": "#/$defs/w"}}, "$defs": {"w": WORDS}}, ["a", 1], Check.UNIQUE),
        ({"allOf": [WORDS, {"items": TEXT}]}, [1], Check.UNIQUE),
        ({"allOf": [WORDS, {"items": {"pattern": "^a"}}]}, [1], Check.ANYTHING),
        ({"items": {"properties": {"a": TEXT}}, "uniqueItems": True}, [1, "a"], Check.NOTHING),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, ["a"], Check.ANYTHING),
        ({"properties": {"a": {"not": {"const": "x"}}}}, ["a"], Check.ANYTHING),
        ({"properties": {"a": TEXT}, "if": {"required": ["b"]}, "then": {}}, ["a"], Check.ANYTHING),
        ({"properties": {"a": {**WORDS, "contains": {"const": "x"}}}}, ["a", 0], Check.ANYTHING),
        ({"prefixItems": [TEXT, {"pattern": "x"}], "items": True}, [0], Check.NOTHING),
        ({"prefixItems": [TEXT, {"pattern": "x"}], "items": True}, [1], Check.ANYTHING),
        ({"prefixItems": [TEXT, {"pattern": "x"}], "items": True}, [2], Check.NOTHING),
        ({"properties": {"a": TEXT}, "additionalProperties": {"pattern": "x"}}, ["b"], Check.ANYTHING),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, ["a"], Check.ANYTHING),
        ({"properties": {"a": {"$ref": "#"}, "b": TEXT}}, ["a", "a", "b"], Check.NOTHING),
        ({"allOf": [{"$ref": "#"}], "properties": {"a": TEXT}}, ["a"], Check.ANYTHING),
    ],
)
def test_what_a_string_may_violate(schema: Any, path: list[str | int], check: Check) -> None:
    assert check_of(schema, path[:-1], path[-1]) is check


def test_ends_are_judged_as_the_validator_judges_the_text() -> None:
    draw, lost, checks = random.Random(5), 0, set[Check]()
    schemas = [
        {"properties": {"a": WORDS, "b": {"items": {"properties": {"a": WORDS}}}}},
        {"properties": {"a": {"$ref": "#/$defs/words"}}, "$defs": {"words": WORDS}},
        {"properties": {"a": {"uniqueItems": True, "items": {"pattern": "^a"}}, "b": True}},
        {"properties": {"a": {"uniqueItems": True, "contains": {"const": "b"}, "maxContains": 1}}},
    ]
    for _ in range(400):
        validator = Validator(json.dumps(draw.choice(schemas)))
        spelled = [f'"{"".join(draw.choices(PIECES, k=2))}"' for _ in range(draw.randrange(4))]
        items = list({json.loads(item): item for item in spelled}.values())
        items += draw.sample(["1", "null", "[]", "{}"], k=draw.randrange(2))
        draw.shuffle(items)
        outer = draw.choice(['{"a":', '{"b":[{"a":'])
        before = (outer + "[" + "".join(f"{item}," for item in items)).encode()
        head = ('"' + "".join(draw.choices(PIECES, k=draw.randrange(3)))).encode()
        closing = place_of(before).brackets[::-1]
        if items and validator.is_lost(before.removesuffix(b",") + closing, len(closing)):
            continue  # no grammar process lets an answer come here
        string = LastString(validator, before, closing)
        known = string.known(head, ENDS)
        assert bool(known) is not string.asks
        for at, end in ENDS.items():
            wanted = validator.is_lost(before + head + end + closing, len(closing))
            assert string.is_lost(head + end) is wanted, (before, head, end)
            assert known.get(at, wanted) is wanted, (before, head, end)
            lost += wanted
        checks.add(string._check)
    assert lost > 100
    assert checks == set(Check)


def test_a_text_that_is_no_json_loses_nothing() -> None:
    string = LastString(Validator(json.dumps(WORDS)), b'["a" "b",', b"]")
    assert not string.is_lost(b'"a"')
    assert string.known(b'"', ENDS) == dict.fromkeys(ENDS, False)


def test_ends_that_are_kept_equal_those_that_are_found_anew(vocabulary: Vocabulary) -> None:
    tokens, draw = ValueTokens.of(vocabulary), random.Random(3)
    texts = [b"", b'"', b'["', b'{"a":"', b'{"', b"[1", b'[{"a":"x"', b'["a\\']
    for _ in range(2 * MAX_KEPT):
        place = place_of(draw.choice(texts))
        chosen = draw.sample(range(vocabulary.size), k=draw.choice([3, 40]))
        bits = np.zeros(32 * vocabulary.num_words, dtype=bool)
        bits[chosen] = True
        words = np.packbits(bits, bitorder="little").view(np.int32)
        first = tokens.ends_at(place, words)
        assert tokens.ends_at(place, words) is first
        assert first == ValueTokens.of(vocabulary).ends_at(place, words)
        ended = {token for _, group in first.groups for token in group}
        assert ended <= set(chosen) == set(token_ids(words, len(chosen)))
        assert all(group in first.groups for group in first.beyond)
        assert first.of_string or first.beyond == first.groups
