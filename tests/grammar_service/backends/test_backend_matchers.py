"""The rows, rollbacks, copies and proposals of each library's matchers."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from grammar_service.backends.backend import Compiled, Matcher, Rows, chain_filler_of
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import Kind, Whitespace
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import PADDED, SPECIAL, STOPS, spell, tokenizer_json, tokens_in

TEXT_TOKENS = range(len(SPECIAL), len(SPECIAL) + 256)
FREE = {"type": "object"}
POINT = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
NESTED = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}}},
}


def after(compiled: Compiled, tokens: list[int]) -> Matcher:
    """Return a matcher that has accepted the tokens and has done nothing else."""
    matcher = compiled.matcher()
    assert all(matcher.accept(token) for token in tokens)
    return matcher


def test_a_row_contains_exactly_the_tokens_that_accept_accepts(library: Library) -> None:
    matcher = library.compiled(Kind.JSON_SCHEMA, POINT).matcher()
    for token in spell('{"a":-12,"b":["x\\n",""]}'):
        legal = library.legal(matcher)
        for other in range(PADDED):
            took = matcher.accept(other)
            assert took is (other in legal)
            if took:
                matcher.rollback(1)
        assert matcher.accept(token)
    assert library.legal(matcher) >= set(STOPS)


def test_stop_tokens_are_legal_exactly_when_the_answer_is_complete(library: Library) -> None:
    compiled = library.compiled(Kind.REGEX, "ab?c?")
    for text, complete in (("", False), ("a", True), ("ab", True), ("abc", True)):
        matcher = after(compiled, spell(text))
        assert set(STOPS) & library.legal(matcher) == (set(STOPS) if complete else set())
        for stop in STOPS:
            assert matcher.accept(stop) is complete
            assert matcher.terminated is complete
            if complete:
                assert not matcher.accept(spell("b")[0])
                assert not matcher.accept(stop)
                matcher.rollback(1)
                assert not matcher.terminated


@pytest.mark.parametrize(
    ("kind", "source", "answer"),
    [(Kind.REGEX, "x+", "xxx"), (Kind.JSON_SCHEMA, POINT, '{"a": 10, "b": ["q", "\\n\u00e9", ""]}')],
    ids=["may go on at its end", "may not"],
)
def test_any_rollback_restores_the_rows(library: Library, kind: Kind, source: str, answer: str) -> None:
    draw = random.Random(1)
    text = [*spell(answer), STOPS[0]]
    matcher = library.compiled(kind, source).matcher()
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
    compiled = library.compiled(Kind.JSON_SCHEMA, POINT)
    for _ in range(20):
        at = draw.randrange(len(spell('{"a":')) + 1)
        end = draw.randrange(at, len(text) + 1)
        matcher = after(compiled, text[:end])
        twin, before = matcher.copy(), library.legal(matcher)
        twin.rollback(end - at)
        fresh = after(compiled, other[:at])
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
    matcher = library.compiled(Kind.JSON_SCHEMA, POINT).matcher()
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
    matcher = after(library.compiled(Kind.JSON_SCHEMA, POINT), spell("{"))
    before = library.legal(matcher)
    for token in (spell("x")[0], STOPS[0], 2, PADDED - 1, PADDED, 10**9, -1):
        assert not matcher.accept(token)
    assert library.legal(matcher) == before
    assert matcher.accept(spell('"')[0])


@pytest.mark.parametrize(
    ("kind", "source", "start"),
    [
        (Kind.JSON_OBJECT, "", '{"'),
        (Kind.REGEX, "[^]*", "a"),
        (Kind.EBNF, "root ::= [^a]* ", "b"),
        (Kind.STRUCTURAL_TAG, json.dumps({"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": FREE}]}), "a"),
    ],
)
def test_free_text_is_every_byte_and_no_special_token_or_padding(
    library: Library, kind: Kind, source: str, start: str
) -> None:
    legal = library.legal(after(library.compiled(kind, source), spell(start)))
    tokens = len(json.loads(tokenizer_json())["model"]["vocab"])
    assert 2 not in legal
    assert not legal & set(range(tokens, library.num_words * 32))
    assert len(legal) > 100
    if kind is Kind.REGEX:
        assert {TEXT_TOKENS[byte] for byte in range(0x80)} <= legal


def test_filling_a_row_changes_no_other_row(library: Library) -> None:
    rows = Rows(np.full((5, library.num_words + 6), 0x5A5A5A5A, dtype=np.int32))
    matcher = library.compiled(Kind.REGEX, "a|b").matcher()
    matcher.fill(rows, 3)
    assert tokens_in(rows.words[3, : library.num_words]) == {*spell("a"), *spell("b")}
    assert (np.delete(rows.words, 3, axis=0) == 0x5A5A5A5A).all()
    assert (rows.words[3, library.num_words :] == 0x5A5A5A5A).all()


# -- rollbacks of drafts --------------------------------------------------------------------------------------------


def structural(rng: random.Random, legal: set[int]) -> int | None:
    """Return a legal byte; brackets, quotes, commas and colons are more likely than others."""
    plain = sorted(legal & set(TEXT_TOKENS))
    marks = [token for token in plain if token in spell('{}[]",: ')]
    return rng.choice(marks if marks and rng.random() < 0.7 else plain) if plain else None


def excursion(library: Library, matcher: Matcher, drafts: list[int], *, chains: bool) -> None:
    """Fill the row after each of the drafts, and come back."""
    if chains:
        filler = chain_filler_of(matcher)
        assert filler is not None
        rows = np.zeros((6, -(-PADDED // 32)), dtype=np.int32)
        assert not filler.fill([matcher], [drafts], rows, 6, 1).failed
        return
    for token in drafts:
        assert matcher.accept(token)
        library.legal(matcher)
    matcher.rollback(len(drafts))


@pytest.mark.parametrize("chains", [False, True], ids=["alone", "chains"])
def test_an_object_that_was_taken_back_leaves_a_string_as_it_is(library: Library, chains: bool) -> None:
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(FREE))
    matcher = after(compiled, spell('{"x":'))
    excursion(library, matcher, spell('{"'), chains=chains)
    assert all(matcher.accept(token) for token in spell(' "'))
    assert library.legal(matcher) == library.legal(after(compiled, spell('{"x": "')))


@pytest.mark.parametrize("schema", [FREE, NESTED], ids=["any", "nested"])
@pytest.mark.parametrize("chains", [False, True], ids=["alone", "chains"])
def test_excursions_change_no_later_row(library: Library, schema: object, chains: bool) -> None:
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(schema))
    for seed in range(12):
        rng = random.Random(seed)
        matcher, taken = compiled.matcher(), list[int]()
        for _ in range(24):
            legal = library.legal(after(compiled, taken))
            assert library.legal(matcher) == legal, (seed, taken)
            drafts, scout = list[int](), after(compiled, taken)
            for _ in range(rng.randint(0, 4)):
                token = structural(rng, library.legal(scout))
                if token is None or not scout.accept(token):
                    break
                drafts.append(token)
            excursion(library, matcher, drafts, chains=chains)
            following = structural(rng, legal)
            if following is None:
                break
            assert matcher.accept(following)
            taken.append(following)


# -- jump-forward ---------------------------------------------------------------------------------------------------

JUMP_FORWARD = [
    (Kind.REGEX, "hello world", "", "hello world"),
    (Kind.REGEX, "hello world", "hel", "lo world"),
    (Kind.REGEX, "(hello|help) me", "hel", ""),
    (Kind.REGEX, "(hello|help) me", "hell", "o me"),
    (Kind.REGEX, "(hello|help) me", "help me", ""),
    (Kind.REGEX, "a[0-9]+b", "a", ""),
    (Kind.REGEX, "ab?", "a", ""),
    # The vocabulary contains "tru" and "true", and both are possible after "tr".
    (Kind.REGEX, "x(tru|true|truex)y", "x", ""),
    (Kind.JSON_SCHEMA, '{"const":{"a":"abcd"}}', "", '{"a":"abcd"}'),
    (Kind.JSON_SCHEMA, '{"enum":["customer","supplier"]}', '"c', 'ustomer"'),
    (Kind.CHOICE, '["yes, certainly", "no"]', "y", "es, certainly"),
    (Kind.REGEX, "\u00e9t\u00e9 \u65e5\u672c", "", "\u00e9t\u00e9 \u65e5\u672c"),
]


@pytest.mark.parametrize(("kind", "source", "prefix", "text"), JUMP_FORWARD)
def test_jump_forward_text_is_proposed_in_legal_tokens(
    library: Library, vocabulary: Vocabulary, kind: Kind, source: str, prefix: str, text: str
) -> None:
    matcher = after(library.compiled(kind, source, Whitespace.COMPACT), spell(prefix))
    before = library.legal(matcher)
    tokens = matcher.jump_forward_tokens(99)
    proposed = TokenBytes.of(vocabulary).text(tokens)
    # Tokens at the end may be left out, because later text could change them.
    assert text.encode().startswith(proposed)
    assert len(text.encode()) - len(proposed) <= 2
    assert matcher.jump_forward_tokens(2) == tokens[:2]
    assert library.legal(matcher) == before
    assert all(matcher.accept(token) for token in tokens)


def test_the_rest_of_a_character_is_proposed_after_its_first_bytes(library: Library) -> None:
    tokens = spell("a\u2581b")
    matcher = library.compiled(Kind.REGEX, "a\u2581b|c").matcher()
    for at in range(len(tokens)):
        forced = matcher.jump_forward_tokens(9)
        assert list(forced) == tokens[at : at + len(forced)], at
        assert matcher.accept(tokens[at])
