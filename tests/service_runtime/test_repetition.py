"""When an answer repeats itself, compared with a search of all its tokens."""

from __future__ import annotations

import random

from service_runtime.repetition import RepetitionLimit


def test_the_last_tokens_are_enough() -> None:
    """A window of `num_tokens` tokens decides as the whole answer does, at every position."""
    draw, seen = random.Random(3), 0
    for _ in range(300):
        shortest = draw.randrange(1, 4)
        limit = RepetitionLimit(draw.randrange(shortest, 5), shortest, draw.randrange(2, 4), draw.randrange(8))
        assert not limit.is_reached([], 0)
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
