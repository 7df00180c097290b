"""The functions on mask rows, compared with Python sets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from grammar_service.grammar.mask_rows import (
    Words,
    count_tokens,
    first_token_ids,
    has_token,
    has_tokens,
    spread_token_ids,
    token_ids,
)
from tests.grammar_service.toy import row_of, tokens_in

WORDS = 7
TOKENS = 32 * WORDS


def rows() -> list[Words]:
    generator = random.Random(5)
    some = [
        row_of(generator.sample(range(TOKENS), size), WORDS) for size in (1, 2, 3, 12, 13, 40, 200) for _ in range(5)
    ]
    return [*some, row_of(range(TOKENS), WORDS), row_of([31], WORDS), row_of([TOKENS - 1], WORDS)]


@pytest.mark.parametrize("words", rows())
def test_functions_agree_with_sets(words: Words) -> None:
    before = words.copy()
    tokens = sorted(tokens_in(words))
    assert count_tokens(words) == len(tokens)
    assert token_ids(words, TOKENS) == tokens
    assert token_ids(words, len(tokens) - 1) == []
    for limit in (1, 2, 12, TOKENS):
        assert first_token_ids(words, limit) == tokens[:limit]
    assert [has_token(words, token) for token in range(TOKENS)] == [token in tokens for token in range(TOKENS)]
    assert has_tokens(words, np.arange(TOKENS)).tolist() == [token in tokens for token in range(TOKENS)]
    low, middle, high = spread_token_ids(words)
    assert (low, high) == (tokens[0], tokens[-1])
    used = sorted({token // 32 for token in tokens})
    # The lowest token of the middle one of the words in use.
    assert middle == min(token for token in tokens if token // 32 == used[len(used) // 2])
    assert np.array_equal(words, before)


def test_an_empty_row_has_no_tokens() -> None:
    words = row_of([], WORDS)
    assert (count_tokens(words), token_ids(words, 5), first_token_ids(words, 5)) == (0, [], [])
