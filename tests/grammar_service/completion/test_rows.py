"""What a narrowed row offers, and what finding it costs: the fills of a matcher are counted, not the time."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from grammar_service.backends.backend import Compiled, Matcher, Rows
from grammar_service.completion.budget import CompletionBudget
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.search import choices_of, is_text
from grammar_service.completion.texts import TokenTexts
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.grammar.mask_rows import Classifier, Words, has_token, token_ids
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import Kind
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.layout import RowKind
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import PADDED, STOPS, row_of, spell


class Counted:
    """A matcher that counts its fills, with those of its copies."""

    def __init__(self, inner: Matcher, fills: list[int]) -> None:
        self._inner, self._fills = inner, fills

    def fill(self, rows: Rows, index: int) -> None:
        self._fills[0] += 1
        self._inner.fill(rows, index)

    def copy(self) -> Counted:
        return Counted(self._inner.copy(), self._fills)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Answer:
    """One answer, text by text; notes the fills that each of its tokens cost."""

    def __init__(self, compiled: Compiled, source: str, vocabulary: Vocabulary, limit: int) -> None:
        self.fills = [0]
        self.matcher: Any = Counted(compiled.matcher(), self.fills)
        self.plan = CompletionPlan.of(compiled.matcher(), source, TokenTexts.of(vocabulary))
        self.budget = CompletionBudget(self.plan, limit, self.matcher)
        self.tokens: list[int] = []

    def say(self, text: str) -> list[int]:
        return [self.take(token) for token in spell(text)]

    def take(self, token: int) -> int:
        assert self.matcher.accept(token), token
        self.tokens.append(token)
        before = self.fills[0]
        self.budget.advance(self.matcher, self.tokens)
        return self.fills[0] - before

    def whole_row(self) -> Words:
        words = self.row()
        if words is None:
            rows = Rows(np.zeros((1, self.plan.texts.num_words), dtype=np.int32))
            self.matcher.fill(rows, 0)
            words = rows.words[0]
        return words

    def row(self) -> Words | None:
        return self.budget.narrowed_row(len(self.tokens))


def answer(library: Library, vocabulary: Vocabulary, schema: Any, limit: int) -> Answer:
    source = json.dumps(schema)
    return Answer(library.compiled(Kind.JSON_SCHEMA, source), source, vocabulary, limit)


@pytest.mark.parametrize("spare", [0, 1, 2, 5])
def test_half_of_a_character_or_escape_is_legal_where_its_other_half_fits(
    library: Library, vocabulary: Vocabulary, spare: int
) -> None:
    said = '"some'
    end = 2  # the quotation mark and the stop token
    told = answer(library, vocabulary, {"type": "string"}, len(spell(said)) + end + spare)
    told.say(said)
    words = told.row()
    assert words is not None
    (letter,), (backslash,), (lead, *_) = spell("x"), spell("\\"), spell("\u00e9")
    assert has_token(words, letter) == (spare >= 1)
    assert has_token(words, backslash) == (spare >= 2)
    assert has_token(words, lead) == (spare >= 2)


def test_a_path_found_behind_a_token_serves_the_next_row(library: Library, vocabulary: Vocabulary) -> None:
    properties = {"n": {"type": "integer", "minimum": 0, "maximum": 500}, "b": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["n"], "additionalProperties": False}
    told = answer(library, vocabulary, schema, len(spell('{"n":4')) + 12)
    (comma,) = spell(",")

    def offered() -> bool:
        words = told.row()
        return words is None or has_token(words, comma)

    searched = told.say('{"n":4')[-1]
    assert offered()
    # No digit fits any more: another row, with the same comma in it, and the same way after that.
    known = told.say("50")[-1]
    assert offered()
    assert known == 1 < searched
    told.say(',"b":""}')


def test_a_text_near_its_bound_keeps_the_table_of_the_row_before(library: Library, vocabulary: Vocabulary) -> None:
    told = answer(library, vocabulary, {"type": "string", "maxLength": 9}, 14)
    letters = told.say('"xxxxxxxxx')[2:]
    # The row alone, though "true" and then "abc" fit no more.
    assert letters[:-1] == [1] * 7
    assert letters[-1] > 0, "of the full text another row is left"


@pytest.mark.parametrize(
    "items",
    [
        [{}, {"maxLength": 40}, {"minLength": 60}],
        pytest.param([{}, {"maxLength": 12}, {"minLength": 30}], marks=pytest.mark.slow),
        pytest.param([{}, {}, {"minLength": 60}], marks=pytest.mark.slow),
        [{"maxLength": 40}, {"maxLength": 40}, {"pattern": "^[A-Z]{3}-[0-9]{20}$"}],
    ],
)
def test_a_token_that_ends_one_text_and_opens_another_gets_a_new_table(
    library: Library, vocabulary: Vocabulary, items: list[dict[str, Any]]
) -> None:
    """The way to the end is the same before and after it, and the rows are alike: what follows then is not."""
    schema = {"type": "array", "prefixItems": [{"type": "string"} | item for item in items], "items": False}
    texts = TokenTexts.of(vocabulary)
    joint = texts.tokens.ids[b'","']
    source = json.dumps(schema | {"minItems": 1})
    compiled = library.compiled(Kind.JSON_SCHEMA, source)
    for limit in range(8, 30):
        told = Answer(compiled, source, vocabulary, limit)
        luck = random.Random(limit)
        for token in (*spell('["wo'), joint, *spell("ca"), joint):
            words = told.row()
            if words is not None and not has_token(words, token):
                break
            told.take(token)
        while len(told.tokens) < limit and not told.matcher.terminated:
            legal = token_ids(told.whole_row(), PADDED)
            told.take(luck.choice(legal))
        assert told.matcher.terminated, (limit, texts.text(told.tokens))


def test_choices_of_rows_are_remembered_up_to_a_bound(vocabulary: Vocabulary) -> None:
    texts = TokenTexts.of(vocabulary)
    texts.choices.clear()
    for number in range(1100):
        pair = {3 + number % 40, 60 + number // 40}
        row = row_of(pair, texts.num_words)
        found = choices_of(row, texts)
        assert set(found) <= pair
        assert found
        assert choices_of(row.copy(), texts) is found
    assert 0 < len(texts.choices) < 1100


def test_a_row_with_most_tokens_is_text(vocabulary: Vocabulary) -> None:
    words = vocabulary.num_words
    assert is_text(row_of(range(PADDED), words))
    assert not is_text(row_of(range(8 * words), words))
    assert is_text(row_of(range(8 * words + 1), words))


def test_tokens_that_end_within_a_character_or_escape_are_halves(vocabulary: Vocabulary) -> None:
    texts = TokenTexts.of(vocabulary)
    half = partial(map, texts.is_half)
    assert list(half(spell("\u00e9"))) == [True, True]
    assert list(half(spell("\\"))) == [True]
    assert not texts.is_half(texts.tokens.ids[b'","'])
    assert not any(half(spell('abc{ "true')))


def test_a_way_is_carried_over_skipped_tokens_without_a_search(library: Library, vocabulary: Vocabulary) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 3}
    text = '["some words","and","others, as many as there is room for'
    told = answer(library, vocabulary, schema, len(text) + 20)
    assert sum(told.say(text)) == 0, "a way that is carried needs no row of the matcher"
    assert told.row() is None
    told.say(17 * "x")
    words = told.row()
    assert words is not None
    assert has_token(words, spell('"')[0])
    told.say('"]')
    assert told.take(STOPS[0]) == 0


def test_a_row_that_a_look_ahead_filled_is_not_filled_again(library: Library, vocabulary: Vocabulary) -> None:
    told = answer(library, vocabulary, {"type": "string"}, 12)
    slot = SlotMatcher.bind(1, told.matcher.copy, [], partial(CompletionBudget, told.plan, 12))
    rows = Rows(np.zeros((1, told.plan.texts.num_words), dtype=np.int32))
    for token in spell('"some'):
        slot.accept(token)
        before = told.fills[0]
        kind, _ = slot.fill(rows, 0, Classifier(PADDED))
        assert told.fills[0] == before
        own = np.zeros_like(rows.words)
        slot.matcher.fill(Rows(own), 0)
        narrowed = slot.budget and slot.budget.narrowed_row(len(slot.tokens))
        assert np.array_equal(rows.words[0], own[0] if narrowed is None else narrowed)
        assert kind in (RowKind.ALL, RowKind.APPLY)


def test_words_outside_a_text_are_tried_one_by_one(library: Library, vocabulary: Vocabulary) -> None:
    letters = "abcdefghijklmnop"
    short = {letters[0], letters[8], letters[-1]}
    values = [letter if letter in short else letter * 20 for letter in letters]
    told = answer(library, vocabulary, {"enum": values}, 8)
    told.say('"')
    words = told.row()
    assert words is not None
    assert [letter for letter in letters if has_token(words, spell(letter)[0])] == sorted(short)


def test_ends_of_a_text_are_spelled_as_texts_of_their_own(vocabulary: Vocabulary) -> None:
    tokens = TokenBytes(*(getattr(TokenTexts.of(vocabulary).tokens, name) for name in ("texts", "ids")))
    fresh = TokenBytes(tokens.texts, tokens.ids)
    text = b'{"abc":true,  "<|end|>","tru","\xc3\xa9"}'
    for at in range(len(text) + 1):
        found = tokens.spell(text, at)
        assert found == fresh.spell(text[at:])
        assert found is not None
        assert tokens.text(found) == text[at:]
    assert TokenBytes((b"a",), {b"a": 0}).spell(b"aba") is None
    assert TokenBytes((b"a",), {b"a": 0}).spell(b"aba", 2) == (0,)


def test_expensive_rows_spend_the_work_after_few_rows(libraries: Any, vocabulary: Vocabulary) -> None:
    # llguidance tokenizes the whole of a text that can only go one way, for every row of it.
    source, fills = json.dumps(["ab" * 10_000]), [0]
    compiled = libraries("llguidance").compiled(Kind.CHOICE, source)
    plan = CompletionPlan.of(Counted(compiled.matcher(), fills), source, TokenTexts.of(vocabulary))  # type: ignore[arg-type]
    assert (plan.path, plan.single_token_cost) == (None, 625)
    assert fills[0] < 8
    assert len(spell("ab" * 10_000)) > plan.min_tokens > 1000, "what is certain has to be written"
    fills[0] = 0
    CompletionBudget(plan, 50, Counted(compiled.matcher(), fills))  # type: ignore[arg-type]
    assert fills[0] < 8
