"""What is known of a grammar's answers before their first token: a short way to the end, and how short none is.

Invariant: a function of the grammar and the vocabulary alone, found within a bounded amount of work, never changed and
shared by every answer. Not here: the answers (`closing.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from grammar_service.backends.backend import Matcher, MatcherFailed
from grammar_service.completion.least import least_tokens
from grammar_service.completion.search import Path, Search
from grammar_service.completion.texts import TokenTexts

START_WORK = 2_000
"""Units of work for the way from the start to the end."""
LEAST_WORK = 500
MOST_START = 512
"""Longer ways to the end are not looked for when a grammar is compiled."""
MARGIN = range(12, 65)
_LEAST_COUNT = re.compile(r'"min(?:Length|Items|Properties)"\s*:\s*(\d{1,9})|\{(\d{1,9})')
"""What a text says in few bytes and an answer in many: in JSON Schema, and in a pattern, EBNF or Lark."""


@dataclass(frozen=True, slots=True)
class ClosingPlan:
    """What is known of a grammar before its first token. Immutable, shared by its matchers."""

    texts: TokenTexts
    path: Path | None
    """A short way from the start to the end; None: not found."""
    least: int
    """No answer has fewer tokens, the stop token included."""
    margin: int
    """Tokens to spare below which rows are narrowed: one token may make the way to the end longer by less."""
    toll: int
    """Units of work, beyond those of a fill, for a row of one token: what the dearest that was met cost."""

    @staticmethod
    def of(matcher: Matcher, source: str, texts: TokenTexts) -> ClosingPlan:
        """Look ahead from the start of a grammar: milliseconds, at most some 200. Raises nothing that a matcher raises.

        For a process that compiles: it measures rows (`Matcher.num_jump_forward_bytes`) before it asks for them.
        """
        path, least = None, 1
        # Copies remember what was measured.
        if certain := matcher.num_jump_forward_bytes():
            least += -(-certain // max(map(len, texts.texts)))
        search = Search(matcher.copy(), texts, START_WORK, measures=True)
        try:
            path = search.find(MOST_START)
            least = max(least, least_tokens(matcher.copy(), texts, LEAST_WORK))
        except MatcherFailed:
            path = None
        # What one token can open is a part of the grammar: eight bytes of its text for a token are on the safe side.
        wanted = max(len(source) // 8 + _repetitions(source), 4 + len(path or ()))
        return ClosingPlan(texts, path, least, min(max(wanted, MARGIN.start), MARGIN.stop - 1), search.toll)

    def to_wire(self) -> dict[str, Any]:
        """Return it as plain JSON, without the vocabulary."""
        return {"path": self.path, "least": self.least, "margin": self.margin, "toll": self.toll}

    @staticmethod
    def from_wire(told: Any, texts: TokenTexts) -> ClosingPlan:
        """Return what `to_wire` was called on. Raises ValueError for anything else."""
        match told:
            case {"path": list() | None as path, "least": int(least), "margin": int(margin), "toll": int(toll)} if (
                least > 0 and margin in MARGIN and toll >= 0
            ):
                if all(type(token) is int and 0 <= token < len(texts.texts) for token in path or ()):
                    return ClosingPlan(texts, None if path is None else tuple(path), least, margin, toll)
        raise ValueError("what is known of the answer's end cannot be read")

    def is_far(self, left: int) -> bool:
        """Say whether so many tokens are more than a row at the start of the answer has to look at."""
        return self.path is not None and left - len(self.path) >= self.margin

    def __repr__(self) -> str:
        return f"<ClosingPlan path={len(self.path or ())} least={self.least} margin={self.margin}>"


def _repetitions(source: str) -> int:
    """Return how many repetitions a grammar's text asks for at least, all together."""
    return sum(int(in_schema or in_pattern) for in_schema, in_pattern in _LEAST_COUNT.findall(source))
