"""Rows as sets, against sets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from grammar_service.grammar.mask_rows import Words, among, count, few, first, has, spread
from tests.grammar_service.toy import row_of, tokens_in

WORDS = 7
TOKENS = 32 * WORDS


def rows() -> list[Words]:
    luck = random.Random(5)
    some = [row_of(luck.sample(range(TOKENS), size), WORDS) for size in (1, 2, 3, 12, 13, 40, 200) for _ in range(5)]
    return [*some, row_of(range(TOKENS), WORDS), row_of([31], WORDS), row_of([TOKENS - 1], WORDS)]


@pytest.mark.parametrize("words", rows())
def test_rows_are_sets(words: Words) -> None:
    kept = words.copy()
    tokens = sorted(tokens_in(words))
    assert count(words) == len(tokens)
    assert few(words, TOKENS) == tokens
    assert few(words, len(tokens) - 1) == []
    for most in (1, 2, 12, TOKENS):
        assert first(words, most) == tokens[:most]
    assert [has(words, token) for token in range(TOKENS)] == [token in tokens for token in range(TOKENS)]
    assert among(words, np.arange(TOKENS)).tolist() == [token in tokens for token in range(TOKENS)]
    low, middle, high = spread(words)
    assert (low, high) == (tokens[0], tokens[-1])
    used = sorted({token // 32 for token in tokens})
    # The lowest token of the word in the middle of those that have any.
    assert middle == min(token for token in tokens if token // 32 == used[len(used) // 2])
    assert np.array_equal(words, kept)


def test_an_empty_row() -> None:
    words = row_of([], WORDS)
    assert (count(words), few(words, 5), first(words, 5)) == (0, [], [])
