"""When an answer repeats itself: its last tokens are one pattern, again and again.

Invariant: a decision is a function of only the answer's tokens. So the engine and the grammar process come to the same
one, with any drafts, and again when tokens are replayed.
Not responsible for: what happens then (see gpu_engine/core/events/output_processor.py,
grammar_service/completion/budget.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PATTERN_SIZE = 128
MIN_COUNT, MAX_COUNT = 2, 1024


@dataclass(frozen=True, slots=True)
class RepetitionLimit:
    """How often an answer may repeat a pattern."""

    max_pattern_size: int
    """Tokens of the longest pattern, at least 1."""
    min_pattern_size: int
    """Tokens of the shortest pattern, at least 1 and at most `max_pattern_size`."""
    min_count: int
    """The answer repeats itself with so many patterns in a row, at least 2."""
    min_tokens: int = 0
    """An answer with fewer tokens does not repeat itself."""

    @property
    def num_tokens(self) -> int:
        """The last tokens that `is_reached` looks at, at most."""
        return self.max_pattern_size * self.min_count

    def is_reached(self, tokens: Sequence[int], end: int, before: int = 0) -> bool:
        """Return whether an answer repeats itself after its first `before + end` tokens.

        `tokens` are those of the answer, a list or a tuple, without its first `before`, of which only those may be
        missing that are further from the end than `num_tokens`.
        """
        if before + end < self.min_tokens or end < self.min_pattern_size * self.min_count:
            return False
        last = tokens[end - 1]
        for size in range(self.min_pattern_size, min(self.max_pattern_size, end // self.min_count) + 1):
            if tokens[end - 1 - size] == last:
                begin = end - size * self.min_count
                if tokens[begin : end - size] == tokens[begin + size : end]:
                    return True
        return False
