"""The place in the text, and the log-probability, of each token of an answer.

Invariant: a token counts for every range of whose characters it holds one, or a part of one. Not responsible for: the
tokens' text (see text_output.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class TokenSpans:
    """Collects the tokens of one answer. Used by one task at a time."""

    def __init__(self) -> None:
        self._length = 0
        self._begins: list[int] = []
        self._ends: list[int] = []
        """Characters [begin, end) of the text that each token holds; both rise."""
        self._logprobs: list[float] = []

    def push(self, piece: str, logprob: float, *, holds: bool) -> None:
        """Add a token and the text that is known since it; `holds`: it ends in the middle of the next character."""
        self._begins.append(self._length)
        self.push_text(piece)
        self._ends.append(self._length + holds)
        self._logprobs.append(logprob)

    def push_text(self, piece: str) -> None:
        """Add text of earlier tokens."""
        self._length += len(piece)

    def score(self, begin: int, end: int) -> tuple[float, int]:
        """Return the sum of the log-probabilities of the tokens in [begin, end), and their number."""
        first = bisect_right(self._ends, begin)
        last = bisect_left(self._begins, end)
        return sum(self._logprobs[first:last]), last - first

    def __repr__(self) -> str:
        return f"<TokenSpans {len(self._logprobs)} tokens>"
