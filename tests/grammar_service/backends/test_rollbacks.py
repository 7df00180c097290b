"""A matcher that was rolled back equals one that never moved on, whatever masks were computed in between."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from grammar_service.backends.backend import Compiled, Matcher, chain_filler_of
from grammar_service.grammar.value import Kind
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import PADDED, SPECIAL, spell

NESTED = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}}},
}


def behind(compiled: Compiled, tokens: list[int]) -> Matcher:
    """Return a matcher that has accepted the tokens and has done nothing else."""
    matcher = compiled.matcher()
    assert all(matcher.accept(token) for token in tokens)
    return matcher


def structural(rng: random.Random, legal: set[int]) -> int | None:
    """Return a legal byte; brackets, quotes, commas and colons are more likely than others."""
    plain = sorted(token for token in legal if len(SPECIAL) <= token < len(SPECIAL) + 256)
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
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps({"type": "object"}))
    prefix = spell('{"x":')
    matcher = behind(compiled, prefix)
    excursion(library, matcher, spell('{"'), chains=chains)
    for token in spell(' "'):
        assert matcher.accept(token)
    assert library.legal(matcher) == library.legal(behind(compiled, prefix + spell(' "')))


@pytest.mark.parametrize("schema", [{"type": "object"}, NESTED], ids=["any", "nested"])
@pytest.mark.parametrize("chains", [False, True], ids=["alone", "chains"])
def test_excursions_change_no_later_row(library: Library, schema: object, chains: bool) -> None:
    compiled = library.compiled(Kind.JSON_SCHEMA, json.dumps(schema))
    for seed in range(12):
        rng = random.Random(seed)
        matcher, taken = compiled.matcher(), list[int]()
        for _ in range(24):
            legal = library.legal(behind(compiled, taken))
            assert library.legal(matcher) == legal, (seed, taken)
            drafts, scout = list[int](), behind(compiled, taken)
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
