"""The estimates of how much one token lengthens the way to an answer's end: known cases, and what is really found."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from benchmarks.quality.random_schemas import random_schema
from grammar_service.completion.growth import Growth, growth_of
from grammar_service.completion.plan import MARGIN, CompletionPlan
from grammar_service.completion.search import Search
from grammar_service.completion.texts import TokenTexts
from grammar_service.grammar.mask_rows import token_ids
from grammar_service.grammar.value import Kind
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.conftest import Library


def closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT = {"type": "string"}
FLAGS = closed({"a": {"type": "boolean"}, "b": {"type": "null"}}, ["a", "b"])
LONG = closed({"a": {"const": "x" * 50}}, [])


def bytes_of(schema: Any) -> Growth | None:
    """With a vocabulary of single bytes."""
    return growth_of(json.dumps(schema), len)


@pytest.mark.parametrize(
    ("schema", "growth"),
    [
        ({"const": "abc"}, Growth(0, 5)),
        ({"enum": ["a", "abcdef"]}, Growth(5, 8)),
        ({"type": "boolean"}, Growth(0, 2)),
        # Two members of `"a":` with a comma and a value: 2 * (4 + 1 + 1), the braces, and one of them within it.
        (FLAGS, Growth(0, 22)),
        ({"anyOf": [{"type": "null"}, {"const": "x" * 30}]}, Growth(31, 32)),
        # The optional property: its comma, its name and its value.
        (LONG, Growth(57, 60)),
        ({"type": "array", "items": {"const": "x" * 30}}, Growth(33, 36)),
        ({"type": "string", "pattern": "^A[0-9]{4}$"}, Growth(2, 20)),
    ],
)
def test_the_estimates_of_a_schema_are_what_its_texts_need(schema: Any, growth: Growth) -> None:
    assert bytes_of(schema) == growth


def test_few_texts_of_a_large_schema_are_spelled() -> None:
    spelled = []

    def count(text: str) -> int:
        spelled.append(text)
        return len(text)

    values = ["x" * number for number in range(1, 301)]
    found = growth_of(json.dumps({"type": "array", "items": {"enum": values}}), count)
    assert found is not None
    assert found.by_one_token >= 299
    assert len(spelled) < 10
    assert max(map(len, spelled)) <= 256


def test_choices_inside_a_choice_add_up() -> None:
    inner = {"anyOf": [{"type": "null"}, {"const": "x" * 20}]}
    outer = bytes_of({"type": "array", "items": inner, "minItems": 1})
    listed = bytes_of({"anyOf": [{"type": "null"}, {"type": "array", "items": inner, "minItems": 3}]})
    assert outer is not None
    assert listed is not None
    assert listed.by_one_token > outer.by_one_token > 20


def test_a_minimum_count_is_part_of_what_a_token_opens() -> None:
    few, many = (bytes_of(closed({"a": {"type": "array", "items": TEXT, "minItems": count}}, [])) for count in (1, 100))
    assert few is not None
    assert many is not None
    assert many.by_one_token > few.by_one_token + 99


def test_nested_values_have_no_longest_way() -> None:
    node = {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": [], "additionalProperties": False}
    for schema in (node, {}, {"type": "object"}, {"type": "array"}):
        found = bytes_of(schema)
        assert found is not None
        assert found.longest_way is None


@pytest.mark.parametrize(
    "source",
    [
        "",
        "[a-z]+",
        '["a", "b"]',
        '{"allOf": [{"type": "string"}]}',
        '{"type": "object", "patternProperties": {"^a": {}}}',
        '{"type": "array", "minItems": "3"}',
        '{"type": "text"}',
        '{"$ref": "#/$defs/missing"}',
        '{"$ref": "#"}',
        '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}',
        '{"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}',
        '{"enum": []}',
        '{"anyOf": []}',
        json.dumps({"enum": ["x" * 70_000]}),
        json.dumps({"type": "array", "prefixItems": [{"const": number} for number in range(600)]}),
        "[" * 100_000,
    ],
)
def test_other_grammars_and_keywords_have_no_estimate(source: str) -> None:
    assert growth_of(source, len) is None


def test_a_schema_without_large_choices_has_a_small_margin(library: Library, vocabulary: Vocabulary) -> None:
    names = ["ab", "abc"]
    source = json.dumps(closed(dict.fromkeys(names, TEXT), names) | {"description": "a form " * 80})
    assert len(source) // 8 > 4 * MARGIN.start
    plan = CompletionPlan.of(library.compiled(Kind.JSON_SCHEMA, source).matcher(), source, TokenTexts.of(vocabulary))
    assert plan.margin == MARGIN.start
    assert plan.longest_way is not None
    assert plan.path is not None
    assert plan.longest_way >= len(plan.path)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])
def test_no_token_of_a_random_answer_lengthens_the_way_by_more(
    library: Library, vocabulary: Vocabulary, seed: int
) -> None:
    texts = TokenTexts.of(vocabulary)
    source = json.dumps(random_schema(seed))
    matcher = library.compiled(Kind.JSON_SCHEMA, source).matcher()
    growth = growth_of(source, lambda text: len(texts.spell(text.encode()) or text))
    assert growth is not None
    rng, slack = random.Random(seed), 6
    before = Search(matcher.copy(), texts, 20_000).find(2_000)
    for _ in range(40):
        words = Search(matcher.copy(), texts, 100).mask()
        legal = [token for token in token_ids(words, 400) if token not in texts.stop_ids]
        if not legal or before is None:
            break
        opening = [token for token in legal if texts.texts[token] and texts.texts[token][-1:] in b'{[,":']
        assert matcher.accept(rng.choice(opening if opening and rng.random() < 0.7 else legal))
        after = Search(matcher.copy(), texts, 20_000).find(2_000)
        assert after is not None
        assert len(after) <= len(before) + growth.by_one_token + slack
        assert growth.longest_way is None or len(after) <= growth.longest_way + slack
        before = after
