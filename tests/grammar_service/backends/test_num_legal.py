"""`ChainFiller.num_legal` counts what `accept` accepts, and leaves the matcher where it was, on every library."""

from __future__ import annotations

import random

import numpy as np
import pytest

from grammar_service.backends.backend import Matcher, Rows, chain_filler_of
from grammar_service.grammar.value import Kind
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import spell

SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":9},"kind":{"enum":["cat","car","dog"]},'
    '"n":{"type":"integer"}},"required":["name","kind"],"additionalProperties":false}'
)
TEXT = '{"name":"a cat","kind":"cat","n":12}'


def legal_row(library: Library, matcher: Matcher) -> bytes:
    rows = Rows(np.zeros((1, library.vocabulary.num_words), dtype=np.int32))
    matcher.fill(rows, 0)
    return rows.words.tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_legal_up_to_the_first_that_is_not_accepted(library: Library, seed: int) -> None:
    draw, right = random.Random(seed), spell(TEXT)
    compiled = library.compiled(Kind.JSON_SCHEMA, SCHEMA)
    matcher, twin = compiled.matcher(), compiled.matcher()
    filler = chain_filler_of(matcher)
    assert filler is not None
    whole = 0
    for at, token in enumerate(right):
        row = legal_row(library, twin)
        for _ in range(4):
            wrong = draw.randint(0, 6)
            tokens = [*right[at : at + wrong], *draw.choices(right, k=draw.randint(0, 3))]
            copy = matcher.copy()
            accepted = next((n for n, each in enumerate(tokens) if not copy.accept(each)), len(tokens))
            assert filler.num_legal(matcher, tokens) == accepted, (at, tokens)
            whole += accepted == len(tokens) > 2
        assert legal_row(library, matcher) == row, "the matcher has not moved"
        assert matcher.accept(token)
        assert twin.accept(token)
    assert whole > 20


def test_a_token_with_a_rule_of_its_own_is_no_candidate(library: Library) -> None:
    matcher = library.compiled(Kind.REGEX, "ab?").matcher()
    filler = chain_filler_of(matcher)
    assert filler is not None
    (a,), stop = spell("a"), library.vocabulary.stop_ids[0]
    assert filler.num_legal(matcher, [a]) == 1
    for apart in (stop, -1, library.vocabulary.size):
        assert filler.num_legal(matcher, [a, apart]) == 0
    assert matcher.accept(a)
    assert matcher.accept(stop)
    assert filler.num_legal(matcher, [a]) == 0
