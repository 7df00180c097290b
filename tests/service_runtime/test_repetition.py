"""When an answer repeats itself."""

from __future__ import annotations

import random

import pytest

from service_runtime.repetition import RepetitionLimit


@pytest.mark.parametrize(
    ("tokens", "limit", "reached"),
    [
        ([7, 7, 7], RepetitionLimit(1, 1, 3), True),
        ([7, 7], RepetitionLimit(1, 1, 3), False),
        ([7, 7, 7, 8], RepetitionLimit(1, 1, 3), False),
        ([9, 1, 2, 1, 2, 1, 2], RepetitionLimit(2, 1, 3), True),
        ([9, 1, 2, 1, 2, 1, 2], RepetitionLimit(1, 1, 3), False),
        ([9, 2, 1, 2, 1, 2], RepetitionLimit(4, 1, 3), False),
        ([7, 7, 7, 7], RepetitionLimit(4, 3, 2), False),
        ([7] * 6, RepetitionLimit(4, 3, 2), True),
        ([1, 2, 3] * 3, RepetitionLimit(8, 2, 3), True),
        ([7, 7, 7], RepetitionLimit(1, 1, 3, min_tokens=4), False),
        ([7, 7, 7, 7], RepetitionLimit(1, 1, 3, min_tokens=4), True),
        ([], RepetitionLimit(1, 1, 2), False),
    ],
)
def test_a_pattern_in_a_row_is_seen(tokens: list[int], limit: RepetitionLimit, reached: bool) -> None:
    assert limit.is_reached(tokens, len(tokens)) is reached


def test_the_last_tokens_are_enough() -> None:
    """A window of `num_tokens` tokens decides as the whole answer does, at every position."""
    draw, seen = random.Random(3), 0
    for _ in range(300):
        limit = RepetitionLimit(draw.randrange(2, 5), draw.randrange(1, 3), draw.randrange(2, 4), draw.randrange(8))
        tokens = [draw.randrange(2) for _ in range(24)]
        for end in range(1, len(tokens) + 1):
            begin = max(0, end - limit.num_tokens)
            whole = limit.is_reached(tokens, end)
            assert limit.is_reached(tuple(tokens[begin:end]), end - begin, begin) == whole
            brute = end >= limit.min_tokens and any(
                tokens[end - size * limit.min_count : end] == tokens[end - size : end] * limit.min_count
                for size in range(limit.min_pattern_size, limit.max_pattern_size + 1)
                if size * limit.min_count <= end
            )
            assert whole == brute
            seen += whole
    assert seen > 100
